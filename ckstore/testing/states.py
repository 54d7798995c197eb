"""A state to data and back in memory, without a store: for tests of what a state may hold."""

from __future__ import annotations

from ckstore.state import tree as trees
from ckstore.state.build import allocate, blobs_needed, build
from ckstore.state.capture import Captured, capture
from ckstore.state.match import RestoreReport, plan_into
from ckstore.state.selection import Keys
from ckstore.state.tree import Tree

CHUNK_SIZE = 4 << 20


def captured_bytes(captured: Captured) -> list[bytes]:
    """The bytes of every blob."""
    return [bytes(blob.load()) for blob in captured.blobs]


def decoded(captured: Captured) -> Tree:
    """The tree of a capture, checked as a reader would."""
    return trees.decode(captured.tree, [blob.nbytes for blob in captured.blobs])


def there_and_back(state: object, keys: Keys = None, *, chunk_size: int = CHUNK_SIZE) -> object:
    """What a restore of a saved `state` gives, or of the part that `keys` select."""
    captured = capture(state, chunk_size=chunk_size)
    tree = decoded(captured)
    buffers = {index: _read(captured, index, None) for index in blobs_needed(tree, keys)}
    return build(tree, captured.order, buffers, keys)


def there_and_into(
    state: object, target: object, *, keys: Keys = None, strict: bool = True, cast: bool = False
) -> RestoreReport:
    """Fill `target` from a saved `state`, as `Store.restore(into=...)` does."""
    captured = capture(state, chunk_size=CHUNK_SIZE)
    plan = plan_into(decoded(captured), captured.order, target, keys=keys, strict=strict, cast=cast)
    plan.finish({index: _read(captured, index, plan.direct(index)) for index in plan.blobs})
    return plan.report


def _read(captured: Captured, index: int, into: memoryview | None) -> memoryview:
    blob = captured.blobs[index]
    buffer = allocate(blob.nbytes) if into is None else into
    buffer[:] = blob.load()
    return buffer
