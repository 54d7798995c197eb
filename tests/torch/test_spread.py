"""States taken apart, who writes which piece, and tensors of any mesh read on any other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import ckstore
from ckstore.errors import FormatError, InvalidInputError
from ckstore.state.paths import spell
from ckstore_torch.ranks import Ranks
from ckstore_torch.shards import Sharded
from ckstore_torch.spread import (
    PLACE,
    SavePlans,
    Spread,
    empty_like,
    owner_of,
    parameters_of,
    places,
    put_together,
    read_tensors,
    split,
    take_apart,
)
from tests.torch.threaded_ranks import as_rank, on_ranks

GROUP = "00112233445566aa"


def cut(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    """This rank's piece, as a DTensor."""
    sizes, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    local = whole
    for dimension, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        local = local.narrow(dimension, min(offset, whole.shape[dimension]), size)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def test_a_state_comes_back_from_its_tensors_and_the_rest() -> None:
    weight, moment = torch.rand(3), torch.rand(2)
    model: Any = OrderedDict({'a/b "c"': weight, "tied": weight})
    model._metadata = {"": {"version": 1}}
    state = {"model": model, "optimizer": {"state": {"x": [moment, (1, 2.5, None)]}}, "step": 3, "none": {}, 5: "five"}
    tensors, rest = take_apart(state)
    assert list(tensors) == [spell(("model", 'a/b "c"')), "optimizer/state/x/0"]
    assert list(places(rest)) == [next(iter(tensors))] * 2 + ["optimizer/state/x/0"]
    back = put_together(rest, tensors.__getitem__)
    assert back["model"]["tied"] is back["model"]['a/b "c"'] is weight
    assert back["model"]._metadata == model._metadata
    assert type(back["model"]) is OrderedDict
    assert back["optimizer"]["state"]["x"][0] is moment
    assert (back["optimizer"]["state"]["x"][1], back["step"], back["none"], back[5]) == ((1, 2.5, None), 3, {}, "five")


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4))
def test_names_are_split_as_they_are_spelled(steps: list[str]) -> None:
    assert split(spell(tuple(steps))) == steps


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.eye(3).to_sparse(), "model/odd is of layout torch.sparse_coo"),
        (torch.nn.parameter.UninitializedParameter(), "model/odd is not initialised yet"),
        ({PLACE: "model/other"}, "the key 'ckstore:tensor' cannot be saved"),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_name(value: Any, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        take_apart({"model": {"odd": value}})


def test_a_tensor_of_summands_is_refused_by_name() -> None:
    with as_rank(0, 2):
        summand = DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [0, 1]), [Partial()], run_check=False)
        with pytest.raises(InvalidInputError, match=r"model/odd is spread by .*redistribute it"):
            take_apart({"model": {"odd": summand}})


def test_a_place_without_a_name_is_refused() -> None:
    for odd in ({PLACE: 3}, {PLACE: "a", "more": 1}):
        with pytest.raises(FormatError, match="a place for a tensor without a name"):
            put_together(odd, {}.__getitem__)


def test_tied_parameters_are_one_even_where_a_rank_holds_nothing_of_them() -> None:
    with as_rank(2, 3):
        memory = torch.zeros(2, 4)  # padded, as FSDP has it
        mesh = DeviceMesh("cpu", [0, 1, 2])
        nothing = DTensor.from_local(
            memory[:0], mesh, [Shard(0)], run_check=False, shape=torch.Size([2, 4]), stride=(4, 1)
        )
        tensors, _ = take_apart({"model": {"one": nothing, "other": nothing.detach()}})
        assert list(tensors) == ["model/one"]
        apart, _ = take_apart({"model": {"one": memory[:1], "other": memory[1:]}})
        assert list(apart) == ["model/one", "model/other"]


def plan(ranks: Ranks, plans: SavePlans, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What this rank is to write."""
    proposal = plans.propose(tensors)
    digests = ranks.exchange(lambda: proposal.digest)
    plans.agree(proposal, digests, ranks.exchange(lambda: plans.known))
    return plans.part(proposal)


def test_what_is_the_same_everywhere_is_written_once_and_evenly() -> None:
    def act(ranks: Ranks) -> list[str]:
        part = plan(ranks, SavePlans(ranks), {f"w{n}": torch.ones(100) for n in range(6)})
        return list(part["shards"])

    found = on_ranks(3, act)
    assert sorted(name for names in found for name in names) == [f"w{n}" for n in range(6)]
    assert [len(names) for names in found] == [2, 2, 2]


@pytest.mark.parametrize("odd", [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(2, 1)])
def test_another_shape_or_dtype_on_one_rank_is_refused_by_name_on_all(odd: torch.Tensor) -> None:
    def act(ranks: Ranks) -> str:
        plans = SavePlans(ranks)
        tensors = {"same": torch.ones(2), "odd": odd if ranks.rank == 2 else torch.ones(2)}
        with pytest.raises(InvalidInputError) as found:
            plan(ranks, plans, tensors)
        plan(ranks, plans, {"same": torch.ones(2)})
        return str(found.value)

    for text in on_ranks(3, act):
        assert "odd is torch.float32 (2,) on rank 0 and " in text
        assert "on rank 2" in text


def test_plans_are_made_anew_on_all_ranks_if_one_does_not_know_them() -> None:
    def act(ranks: Ranks) -> Any:
        plans, tensors = SavePlans(ranks), {"w": torch.ones(2)}
        first = plan(ranks, plans, tensors)
        gathered = []
        gather = ranks.gather
        ranks.gather = lambda data: gathered.append(data) or gather(data)  # type: ignore[method-assign, func-returns-value]
        known = plan(ranks, plans, tensors)
        calls = len(gathered)
        plans.known = b"" if ranks.rank == 1 else plans.known  # as after an interrupt
        anew = plan(ranks, plans, tensors)
        return calls, len(gathered) - calls, first.keys() == known.keys() == anew.keys()

    # Two exchanges; with plans and the word that they were made, two more.
    assert on_ranks(2, act) == [(2, 4, True)] * 2


def test_parameters_and_their_state_are_found_by_name() -> None:
    names = ["model/0.weight", 'model/"a/b"', "extra/head/weight", "optimizer/state/0.weight/exp_avg", "ema/x"]
    found = parameters_of({name: torch.ones(1) for name in names})
    assert list(found) == ["0.weight", "a/b", "extra/head/weight"]
    alone = {
        "optimizer/state/0.weight/exp_avg": "0.weight",
        'optimizer/state/"a/b"/deep/0': "a/b",
        'optimizer/state/"extra/head/weight"/step': "extra/head/weight",
        "optimizer/shared/0": None,
        "optimizer/state/other/exp_avg": None,
        "model/0.weight": None,
    }
    for name, parameter in alone.items():
        owner = None if parameter is None else found[parameter]
        assert owner_of(name, found, False) is owner
        by_name = name.replace("optimizer/", "optimizer/state/", 1)
        assert owner_of(by_name, found, True) is owner


def test_state_of_another_shape_is_cut_as_it_was_or_refused_by_name() -> None:
    name = "optimizer/state/w/rows"
    with as_rank(1, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        here = {"model": {"w": cut(torch.ones(4, 3), mesh, [Shard(0)]), "plain": torch.ones(4, 3)}}
        rows = torch.empty(4, device="meta")
        found = Spread(here, cut={name: [0]}).template(name, rows).memory()
        assert isinstance(found, DTensor)
        assert (found.shape, found.to_local().shape, found.placements) == ((4,), (2,), (Shard(0),))
        step = Spread(here, cut={"optimizer/state/w/step": ["R"]}).template(
            "optimizer/state/w/step", torch.empty((), device="meta")
        )
        assert step.memory().placements == (Replicate(),)
        plain = Spread(here, plain={name}).template(name, rows).memory()
        assert type(plain) is torch.Tensor
        assert type(Spread(here).template("optimizer/state/w/step", rows[0]).memory()) is torch.Tensor
        assert Spread(here).template("optimizer/state/plain/rows", rows).memory().shape == (4,)
        with pytest.raises(InvalidInputError, match=r"rows has shape .* how it would have to be cut is not known"):
            Spread(here).template(name, rows)
        with pytest.raises(InvalidInputError, match="mesh of 2 dimensions; here are 1"):
            Spread(here, cut={name: ["R", 0]}).template(name, rows)
        for odd in (1, -1, True, None):
            with pytest.raises(FormatError, match="which cannot be"):
                Spread(here, cut={name: [odd]}).template(name, rows)


MESHES = [(1,), (2,), (3,), (4,), (2, 2), (1, 3), (3, 2)]
_placement = st.sampled_from(["R", 0, 1])
_tensor = st.tuples(
    st.lists(st.integers(0, 7), min_size=2, max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.lists(_placement, min_size=4, max_size=4),
)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(MESHES), st.sampled_from(MESHES), st.lists(_tensor, min_size=1, max_size=4))
@example((3,), (2, 2), [([2, 5], torch.float32, [0, "R", 1, 0])])
def test_what_n_ranks_saved_m_ranks_read_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, there: tuple[int, ...], here: tuple[int, ...], tensors: list[Any]
) -> None:
    sizes = [torch.Size(size) for size, _, _ in tensors]
    dtypes = [dtype for _, dtype, _ in tensors]
    wholes = [torch.arange(size.numel()).view(size).to(kind) for size, kind in zip(sizes, dtypes, strict=True)]

    def spread_over(shape: tuple[int, ...], at: int) -> dict[str, torch.Tensor]:
        mesh = DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).view(shape))
        found = {}
        for n, (whole, (_, _, how)) in enumerate(zip(wholes, tensors, strict=True)):
            placements = [Replicate() if one == "R" else Shard(one) for one in how[at : at + len(shape)]]
            found[f"w{n}"] = cut(whole, mesh, placements)
        return found

    parts = _parts(torch.Size(there).numel(), lambda: spread_over(there, 0))
    with saved(tmp_path_factory.mktemp("reshaped"), parts) as snapshot:
        for rank in range(torch.Size(here).numel()):
            with as_rank(rank, torch.Size(here).numel()):
                expected: Any = spread_over(here, 2)
                found = {name: empty_like(tensor, tensor.dtype) for name, tensor in expected.items()}
                read_tensors(Sharded(snapshot), found)
                for name, tensor in found.items():
                    assert torch.equal(tensor.to_local(), expected[name].to_local())  # type: ignore[attr-defined]


def _parts(world: int, tensors: Any) -> list[Any]:
    """What each of `world` ranks saves: first all propose, then all plan."""
    proposals: list[Any] = []
    for rank in range(world):
        with as_rank(rank, world):
            plans = SavePlans(_Known(rank, []))  # type: ignore[arg-type]
            proposals.append(plans.propose(tensors()))
    parts = []
    for rank, proposal in enumerate(proposals):
        plans = SavePlans(_Known(rank, [one.encoded for one in proposals]))  # type: ignore[arg-type]
        plans.agree(proposal, [one.digest for one in proposals], [b""] * world)
        parts.append(plans.part(proposal))
    return parts


class _Known:
    """One of ranks of which all is known that they say."""

    def __init__(self, rank: int, said: list[bytes]) -> None:
        self.rank, self._said = rank, said

    def gather(self, data: bytes) -> list[bytes]:
        return self._said

    def together(self, act: Any) -> Any:
        return act()


@contextmanager
def saved(path: Path, parts: list[Any]) -> Iterator[ckstore.Snapshot]:
    """The snapshot whose ranks saved `parts`."""
    with ckstore.open(path / "s", create=True) as store:

        def save(rank: int) -> None:
            member = ckstore.Member(rank, len(parts), GROUP, 0) if len(parts) > 1 else None
            store.save(parts[rank], step=1, member=member)

        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(save, range(len(parts))))
        with store.snapshot() as snapshot:
            yield snapshot
