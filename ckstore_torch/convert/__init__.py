"""Checkpoints of other programs into a store, and snapshots out of it.

    discover        what is in a file or folder: checkpoints, their formats and steps
    importing       a plan of what becomes a snapshot, and carrying it out
    exporting       a snapshot into files of another format

    torch_file      what torch.save wrote          archive, pickled, numpy_values   checked before torch reads it
    safetensors_files   one file or several        index_file   the index of several
    dcp_folder      torch.distributed.checkpoint   dcp_metadata   what its `.metadata` says, read as data
    hf_folder       what Hugging Face trainers write

    steps           the step in a name             fingerprint   whether files are what was imported before
    contents        what reading gave              leaves        what of a snapshot is exported, under which names
    formats         what each format can hold      shards        tensors in groups, read one after the other
    publish         files that appear whole or not at all

Files are untrusted. Nothing in them is unpickled: torch.load runs with `weights_only=True` on archives whose claims
were checked, and the one pickle that torch itself would unpickle freely is decoded as data.
"""
