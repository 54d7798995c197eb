"""FSDP2 as Accelerate does it, on CPUs: it is switched on for cards only, and the code behind runs anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

SETTINGS = {"fsdp_version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


@contextmanager
def allowed(switched_on: bool) -> Iterator[None]:
    """Accelerators made inside use FSDP2 if they are asked to; each is made anew."""
    own = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        is_first = not self._shared_state
        own(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if is_first and fsdp_plugin is not None:
            assert self.distributed_type == DistributedType.MULTI_CPU
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState._reset_state()
    AcceleratorState.__init__ = init if switched_on else own
    try:
        yield
    finally:
        AcceleratorState.__init__ = own
        AcceleratorState._reset_state()
