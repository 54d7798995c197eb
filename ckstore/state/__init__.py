"""A training state as data: nested containers, scalars, arrays and tensors, to bytes and back.

    capture   live state -> tree bytes, order bytes, blobs (runs of bytes, read lazily)
    build     tree, order, filled buffers -> the state again
    match     tree, live target -> a plan that fills the target in place, or a refusal that changed nothing

`tree` is the canonical encoding between them, `paths` the names of what is inside, `describe` a table of it.
Tensors of a framework are described and made by a plug-in, so nothing here imports one.
"""
