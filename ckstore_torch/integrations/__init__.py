"""Training frameworks that save and resume through a `Checkpointer`.

    transformers   CkstoreTrainer: Hugging Face's Trainer with a store behind `checkpoint-N/`
    lightning      CkstoreCheckpoint: Lightning's ModelCheckpoint with a store behind its files
    accelerate     CkstoreStates: `save_state` and `load_state` of an Accelerator
    Settings       what can be told to each of them

Nothing else in ckstore imports a framework. What a framework finds where it
looks for a checkpoint is a pointer, a few hundred bytes that name a snapshot; everything else is in the snapshot.
"""

from ckstore_torch.integrations.settings import Settings

__all__ = ["Settings"]
