"""Two records of conditions are compared: what breaks bit-identity, what is only told, and what is no record at all."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from ckstore import InvalidInputError
from ckstore.errors import FormatError
from ckstore_torch.conditions import Conditions
from ckstore_torch.reproducibility import Difference, check, compare, hazards, wants_warmup

HERE: Conditions = {
    "world_size": 4, "rank": 1, "torch/version": "2.6.0", "devices": "cpu", "cpu/threads": 2, "python": "3.11.7",
    "ddp/ranks": 4, "ddp/buckets": "first", "ddp/layout": None, "ddp/bucket_bytes_cap": 1048576,
}  # fmt: skip


def differing(saved: Any, here: Conditions = HERE) -> dict[str, bool]:
    return {difference.name: difference.exact for difference in compare(saved, here)}


def test_the_same_record_does_not_differ() -> None:
    assert compare(dict(HERE), HERE) == []


@pytest.mark.parametrize(
    ("name", "value", "exact"),
    [
        ("world_size", 8, True),
        ("rank", 2, True),
        ("torch/version", "2.7.0", True),
        ("cpu/threads", 4, True),
        ("cpu/threads", 2.0, True),
        ("python", "3.12.0", False),
        ("ddp/buckets", "rebuilt", True),
        ("ddp/bucket_bytes_cap", 1, True),
        ("flags/cudnn.benchmark", True, False),
        ("cuda/gpu", "NVIDIA H100", False),
        ("from/the/future", 1, True),
    ],
)
def test_a_difference_says_whether_it_breaks_bit_identity(name: str, value: Any, exact: bool) -> None:
    assert differing({**HERE, name: value}) == {name: exact}
    [difference] = compare({**HERE, name: value}, HERE)
    assert (difference.saved, difference.here) == (value, HERE.get(name))
    assert len(difference.meaning) > 20


def test_what_only_one_record_holds_differs_unless_it_is_none() -> None:
    less = {name: value for name, value in HERE.items() if name not in ("cpu/threads", "ddp/layout")}
    assert differing(less) == {"cpu/threads": True}
    assert differing(HERE, less) == {"cpu/threads": True}


def test_the_order_of_sums_matters_from_three_ranks_on() -> None:
    two = {**HERE, "ddp/ranks": 2}  # a DDP module on two of the four ranks
    assert differing({**two, "ddp/buckets": "rebuilt"}, two) == {"ddp/buckets": False}
    of_two: Conditions = {"world_size": 2, "devices": "cpu", "ddp/buckets": "first"}
    assert differing({**of_two, "ddp/buckets": "rebuilt"}, of_two) == {"ddp/buckets": False}


def test_layouts_are_compared_once_both_are_known() -> None:
    known = {**HERE, "ddp/layout": "ab"}
    assert differing(known) == {}
    assert differing(known, {**HERE, "ddp/layout": "cd"}) == {"ddp/layout": True}


def test_what_concerns_a_device_that_computes_nothing_is_only_told() -> None:
    card = {**HERE, "devices": "cuda", "cuda/gpu": "NVIDIA H100", "flags/cudnn.benchmark": False}
    other = {**card, "cuda/gpu": "NVIDIA H200", "flags/cudnn.benchmark": True, "cpu/threads": 64}
    assert differing(card, other) == {"cuda/gpu": True, "flags/cudnn.benchmark": True, "cpu/threads": False}
    both = {**card, "devices": "cpu,cuda"}
    assert differing(both, {**both, "cpu/threads": 64}) == {"cpu/threads": True}


def test_a_snapshot_without_a_record_is_said_to_have_none() -> None:
    assert differing(None) == {"conditions": True}
    with pytest.raises(InvalidInputError, match="an older version recorded none"):
        check(None, HERE, exact=True)


@pytest.mark.parametrize(
    "saved",
    [
        [],
        "world_size",
        {1: 2},
        {"a": [1]},
        {"a": b"1"},
        {"a": math.nan},
        {"a": math.inf},
        {"a": 1 << 65},
        {"a": "x" * 1001},
        {"x" * 1001: 1},
        {str(n): n for n in range(10_001)},
    ],
)
def test_what_is_no_record_is_refused(saved: Any) -> None:
    with pytest.raises(FormatError):
        compare(saved, HERE)
    with pytest.raises(FormatError):
        wants_warmup(saved)


def test_one_error_lists_everything_what_breaks_first() -> None:
    with pytest.raises(InvalidInputError) as raised:
        check({**HERE, "python": "3.12.0", "cpu/threads": 4, "world_size": 3}, HERE, exact=True)
    first, *listed = str(raised.value).splitlines()
    assert "nothing was restored" in first
    assert [line.split(":")[0].strip() for line in listed] == ["cpu/threads", "world_size", "python"]


def test_one_warning_lists_everything(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        check({**HERE, "python": "3.12.0", "cpu/threads": 4}, HERE, exact=False)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "cpu/threads: 4 when saved, 2 here" in record.getMessage()
    assert "python: '3.12.0' when saved" in record.getMessage()


@pytest.mark.parametrize("exact", [True, False])
def test_what_changes_no_bits_is_no_more_than_logged(caplog: pytest.LogCaptureFixture, exact: bool) -> None:
    with caplog.at_level(logging.INFO):
        check({**HERE, "python": "3.12.0"}, HERE, exact=exact)
        check(HERE, HERE, exact=exact)
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_a_snapshot_full_of_differences_is_told_in_fifty_lines() -> None:
    many = {f"ddp/{n}/ranks": n for n in range(9000)}
    with pytest.raises(InvalidInputError, match="and 8959 more") as raised:
        check(many, HERE, exact=True)
    assert len(str(raised.value).splitlines()) == 52


def test_what_a_snapshot_says_cannot_reach_the_terminal() -> None:
    [difference] = compare({**HERE, "a\x1b[2J\n": "b\x1b[31m\u202e"}, HERE)
    assert str(difference).isprintable()


def test_a_card_that_adds_up_in_any_order_is_refused_though_nothing_differs() -> None:
    card: Conditions = {
        "world_size": 1, "devices": "cuda", "cuda/gpu": "NVIDIA H100",
        "flags/deterministic": True, "flags/cudnn.benchmark": False,
    }  # fmt: skip
    assert hazards(card) == []
    check(card, card, exact=True)
    loose = {**card, "flags/deterministic": False, "flags/cudnn.benchmark": True}
    assert [hazard.name for hazard in hazards(loose)] == ["flags/deterministic", "flags/cudnn.benchmark"]
    assert hazards({**loose, "devices": "cpu"}) == []
    with pytest.raises(InvalidInputError, match=r"flags/deterministic: False: GPU .*use_deterministic_algorithms"):
        check(loose, loose, exact=True)
    check(loose, loose, exact=False)


def test_what_else_is_known_is_refused_in_the_same_error() -> None:
    known = [Difference("dataloader", None, None, True, "its workers draw random numbers")]
    with pytest.raises(InvalidInputError) as raised:
        check({**HERE, "cpu/threads": 4}, HERE, exact=True, also=known)
    _, first, second = str(raised.value).splitlines()
    assert first.strip() == "dataloader: its workers draw random numbers"
    assert second.strip().startswith("cpu/threads: 4 when saved, 2 here: ")
    check(HERE, HERE, exact=False, also=known)


def test_ranks_whose_sums_cannot_be_seen_are_refused() -> None:
    unseen: Conditions = {"world_size": 3, "devices": "cpu"}
    assert [hazard.name for hazard in hazards(unseen)] == ["ddp"]
    assert hazards({**unseen, "world_size": 2}) == hazards({**unseen, "ddp/ranks": 3}) == []


def test_a_warm_up_is_wanted_unless_the_saved_run_had_not_built_its_buckets_again() -> None:
    assert wants_warmup(None)
    assert wants_warmup({"world_size": 1})
    assert wants_warmup({"ddp/buckets": "rebuilt"})
    assert wants_warmup({"ddp/a/buckets": "first", "ddp/b/buckets": "rebuilt"})
    assert not wants_warmup({"ddp/buckets": "first"})
