"""Which blobs of a state lie in memory that the caller will leave alone for a while."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterable

from ckstore import staging
from ckstore.state.capture import capture

Span = tuple[str, int, int]
"""A run of memory: where, its first address and the one behind its last."""


def spans_of(steady: Iterable[object]) -> list[Span]:
    """The runs of memory of tensors and arrays, sorted and merged."""
    found = capture(list(steady), chunk_size=staging.PAGE).blobs
    spans: list[Span] = []
    for space, lo, hi in sorted(blob.span for blob in found if blob.span is not None):
        if spans and spans[-1][0] == space and lo <= spans[-1][2]:
            spans[-1] = (space, spans[-1][1], max(hi, spans[-1][2]))
        else:
            spans.append((space, lo, hi))
    return spans


def is_within(span: Span | None, spans: list[Span]) -> bool:
    """Whether `span` lies within one of `spans`, which `spans_of` gave."""
    if span is None:
        return False
    space, lo, hi = span
    at = bisect.bisect_right(spans, (space, lo, sys.maxsize)) - 1
    return at >= 0 and spans[at][0] == space and hi <= spans[at][2]
