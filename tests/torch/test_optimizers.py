"""Optimizer state follows the names of parameters, and comes back exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckstore
from ckstore_torch import Checkpointer
from examples.demo.digests import digests_of
from tests.torch.twenty_steps import Training, check_twenty_steps

Maker = Callable[[list[Any]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Maker] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, maximize=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "Adam, capturable rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.1, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01, t0=3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3, max_iter=2),
    "LBFGS, line search": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
}
ELSEWHERE = {"Muon", "SparseAdam"}
"""Those that not every parameter suits: in tests of their own."""


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps whose data follow from their number alone."""
    for n in steps:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(n))

        def loss(inputs: Tensor = inputs) -> Tensor:
            optimizer.zero_grad()
            found: Tensor = model(inputs).square().mean()
            found.backward()
            return found

        optimizer.step(loss)  # type: ignore[arg-type]


def bits(model: nn.Module) -> dict[str, bytes]:
    """The exact bytes of every parameter and buffer."""
    return {
        name: bytes(value.detach().contiguous().flatten().view(torch.uint8).numpy())
        for name, value in model.state_dict().items()
    }


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_goes_on_exactly(tmp_path: Path, kind: str) -> None:
    check_twenty_steps(tmp_path, lambda seed: Training(seed, OPTIMIZERS[kind]))


def test_every_optimizer_of_this_torch_is_tried() -> None:
    found = {name: getattr(torch.optim, name) for name in torch.optim.__all__ if name != "Optimizer"}
    there = {name for name, value in found.items() if isinstance(value, type)}
    assert there - {kind.partition(",")[0] for kind in OPTIMIZERS} == ELSEWHERE


def test_several_at_once_one_of_them_muon(tmp_path: Path) -> None:
    def muon_and_adam(parameters: Any) -> dict[str, torch.optim.Optimizer]:
        weights = list(parameters)
        return {
            "muon": torch.optim.Muon([p for p in weights if p.dim() == 2], lr=0.02),
            "adam": torch.optim.AdamW([p for p in weights if p.dim() != 2], lr=0.01),
        }

    check_twenty_steps(tmp_path, lambda seed: Training(seed, muon_and_adam))


class Looked(nn.Module):
    """Rows of a table, of which each step uses a few: their gradients are sparse."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.table((x * 10).long() % 50).cos()
        return found


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SparseAdam(p, lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)]
)
def test_sparse_gradients(tmp_path: Path, make: Maker) -> None:
    with torch.sparse.check_sparse_tensor_invariants(True):  # Adagrad makes some, and torch wants to know
        check_twenty_steps(tmp_path, lambda seed: Training(seed, lambda m: make(list(m.parameters())), model=Looked))


class Master(torch.optim.Optimizer):
    """Keeps what torch casts or takes apart when it loads: fp32 copies of bf16 weights, lists and dicts, text."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0, dtype=torch.int32)
                    state["master"] = parameter.float()
                    state["past"] = [torch.zeros_like(parameter, dtype=torch.float64)]
                    state["by name"] = {"sum": torch.zeros((), dtype=torch.float64), "of": parameter.dim()}
                    state["note"] = "of fp32"
                state["step"] += 1
                state["past"][0].mul_(0.9).add_(parameter.grad)
                state["by name"]["sum"] += parameter.grad.double().sum()
                state["master"] -= group["lr"] * state["past"][0] + 1e-9 * state["by name"]["sum"]
                parameter.copy_(state["master"])


def test_moments_of_another_dtype_than_the_parameter_go_on_as_they_were(tmp_path: Path) -> None:
    def half(_: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 2)).to(torch.bfloat16)

    class Half(Training):
        def loss(self, inputs: Tensor) -> Tensor:
            return super().loss(inputs.bfloat16()).float()

    resumed = check_twenty_steps(tmp_path, lambda seed: Half(seed, lambda m: Master(m.parameters()), model=half))
    (state, *_) = resumed.optimizers[""].state.values()
    assert [state["step"].dtype, state["master"].dtype, state["past"][0].dtype] == [
        torch.int32, torch.float32, torch.float64,
    ]  # fmt: skip
    assert (state["note"], state["by name"]["sum"].dtype) == ("of fp32", torch.float64)


def test_a_group_that_was_added_later(tmp_path: Path) -> None:
    class Growing(Training):
        """Trains its last layer from the fifth step on; one that resumes is made with all of it."""

        def __init__(self, seed: int) -> None:
            def first(parameters: Any) -> torch.optim.Optimizer:
                self.later = list(parameters)[-2:]
                return torch.optim.AdamW(list(self.model.parameters())[:-2], lr=0.01)

            super().__init__(seed, first)
            self.steps = 0
            if seed == 2:
                self.add()

        def add(self) -> None:
            self.optimizers[""].add_param_group({"params": self.later, "lr": 0.1, "betas": (0.5, 0.9)})

        def step(self) -> dict[str, str]:
            self.steps += 1
            if self.steps == 5 and len(self.optimizers[""].param_groups) == 1:
                self.add()
            return super().step()

    check_twenty_steps(tmp_path, Growing, on_disk=True)
    run = Growing(1)
    with Checkpointer(tmp_path / "store", **run.parts) as checkpointer:
        with pytest.raises(ckstore.MismatchError, match="1 groups here, 2 in the snapshot; those added later must be"):
            checkpointer.resume()
        run.add()
        assert checkpointer.resume() == 7


def test_a_parameter_without_saved_state_has_none_afterwards(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = PartlyUsed()
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path / "store", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.save(1)
        train(model, optimizer, range(2))
        assert len(optimizer.state) == 4
        checkpointer.resume()
    assert dict(optimizer.state) == {}
    assert optimizer.state[model.used.weight] == {}  # and it makes new state, as that of a new optimizer does


def test_weights_that_are_swapped_when_they_are_loaded_keep_their_state(tmp_path: Path) -> None:
    run = Training(1, OPTIMIZERS["AdamW"])
    for _ in range(3):
        run.step()
    with Checkpointer(tmp_path / "store", **run.parts) as checkpointer:
        checkpointer.save(3)
    expected = [run.step() for _ in range(3)]
    resumed = Training(2, OPTIMIZERS["AdamW"])
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with Checkpointer(tmp_path / "store", **resumed.parts) as checkpointer:
            checkpointer.resume()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert [resumed.step() for _ in range(3)] == expected


def test_the_state_of_lbfgs_is_of_parameters_in_a_row_and_another_order_is_refused(tmp_path: Path) -> None:
    model = TwoLayers(("first", "second"))
    with Checkpointer(tmp_path / "store", model=model, optimizer=torch.optim.LBFGS(model.parameters())) as checkpointer:
        checkpointer.save(1)
    turned = torch.optim.LBFGS(reversed(list(model.parameters())))
    with Checkpointer(tmp_path / "store", model=model, optimizer=turned) as checkpointer:
        with pytest.raises(ckstore.MismatchError, match=r"groups/0 \(parameters in another order, on which the"):
            checkpointer.resume()


class Faulty(torch.optim.AdamW):
    """Fails when half of its state is loaded."""

    fails = False

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        if self.fails:
            raise RuntimeError("half-way")


def test_an_optimizer_that_fails_half_way_is_put_back(tmp_path: Path) -> None:
    run = Training(1, lambda p: Faulty(p, lr=torch.tensor(0.01), foreach=False))
    run.step()
    with Checkpointer(tmp_path / "store", **run.parts) as checkpointer:
        checkpointer.save(1)
        run.step()
        optimizer = run.optimizers[""]
        optimizer.param_groups[0]["lr"].fill_(0.5)
        before, held = digests_of(run.state()), optimizer.param_groups[0]
        optimizer.fails = True  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="half-way"):
            checkpointer.resume()
        assert digests_of(run.state()) == before
        assert optimizer.param_groups[0] is held


class TwoLayers(nn.Module):
    """Layers of one shape, defined in either order: positions then mean other parameters."""

    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.get_submodule("second")(torch.tanh(self.get_submodule("first")(x)))
        return found


def test_moments_follow_names_when_the_order_of_parameters_is_reversed(tmp_path: Path) -> None:
    model = TwoLayers(("first", "second"))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(3))
    with Checkpointer(tmp_path / "store", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.save(3)
    resumed = TwoLayers(("second", "first"))
    fresh = torch.optim.AdamW(reversed(list(resumed.parameters())))
    with Checkpointer(tmp_path / "store", model=resumed, optimizer=fresh) as checkpointer:
        checkpointer.resume()
    found = {name: fresh.state[parameter]["exp_avg"].tolist() for name, parameter in resumed.named_parameters()}
    expected = {name: optimizer.state[parameter]["exp_avg"].tolist() for name, parameter in model.named_parameters()}
    assert found == expected
    train(model, optimizer, range(3, 6))
    train(resumed, fresh, range(3, 6))
    assert bits(resumed) == {name: bits(model)[name] for name in bits(resumed)}


def test_groups_that_hold_other_parameters_are_refused(tmp_path: Path) -> None:
    def make(model: TwoLayers, *names: str) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": list(model.get_submodule(name).parameters())} for name in names], lr=0.1)

    model = TwoLayers(("first", "second"))
    with Checkpointer(tmp_path / "store", model=model, optimizer=make(model, "first", "second")) as checkpointer:
        checkpointer.save(0)
    with Checkpointer(tmp_path / "store", model=model, optimizer=make(model, "second", "first")) as checkpointer:
        with pytest.raises(ckstore.MismatchError) as raised:
            checkpointer.resume()
    assert raised.value.missing == tuple(
        f"optimizer/groups/{number}/{name}.{kind}"
        for number, name in ((0, "second"), (1, "first"))
        for kind in ("weight", "bias")
    )
    assert raised.value.unexpected == tuple(
        f"optimizer/groups/{number}/{name}.{kind}"
        for number, name in ((0, "first"), (1, "second"))
        for kind in ("weight", "bias")
    )


class PartlyUsed(nn.Module):
    """One layer that is never used, one that is frozen after some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.later_frozen, self.never_used = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.later_frozen(torch.tanh(self.used(x)))
        return found


def test_unused_and_frozen_parameters_and_an_empty_group(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": list(model.parameters())}, {"params": [], "lr": 0.5}])

    torch.manual_seed(1)
    model = PartlyUsed()
    optimizer = make(model)
    train(model, optimizer, range(3))
    model.later_frozen.requires_grad_(False)
    train(model, optimizer, range(3, 5))
    with Checkpointer(tmp_path / "store", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.save(5)
    resumed = PartlyUsed()  # not frozen: that it was is part of the state
    fresh = make(resumed)
    with Checkpointer(tmp_path / "store", model=resumed, optimizer=fresh) as checkpointer:
        checkpointer.resume()
    assert [name for name, parameter in resumed.named_parameters() if parameter in fresh.state] == [
        "used.weight", "used.bias", "later_frozen.weight", "later_frozen.bias",
    ]  # fmt: skip
    train(model, optimizer, range(5, 8))
    train(resumed, fresh, range(5, 8))
    assert bits(resumed) == bits(model)
    assert not resumed.later_frozen.weight.requires_grad


def test_state_kept_in_another_dtype_than_its_parameter_keeps_it(tmp_path: Path) -> None:
    model = nn.Linear(4, 4).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    master = torch.full((4, 4), 1.0 + 2.0**-20)  # lost in bfloat16
    optimizer.state[model.weight]["master"] = master
    optimizer.state[model.weight]["seen"] = torch.tensor([1, 2**40])
    with Checkpointer(tmp_path / "store", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.save(1)
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path / "store", model=model, optimizer=fresh) as checkpointer:
        checkpointer.resume()
    found = fresh.state[model.weight]
    assert (found["master"].dtype, found["master"].tolist()) == (torch.float32, master.tolist())
    assert (found["seen"].dtype, found["seen"].tolist()) == (torch.int64, [1, 2**40])


def test_groups_stay_the_same_objects_for_those_who_hold_them(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with Checkpointer(tmp_path / "a", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5)) as first:
        first.save(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = optimizer.param_groups[0]
    with Checkpointer(tmp_path / "a", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
    assert optimizer.param_groups[0] is held
    assert held["lr"] == 0.5


def test_a_parameter_without_a_name_is_refused_at_once(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ckstore.InvalidInputError, match=r"parameter 2 of group 0 .*shape \(3, 3\).* has no name"):
        Checkpointer(tmp_path / "store", model=model, optimizer=optimizer)
    assert not (tmp_path / "store").exists()
    Checkpointer(tmp_path / "store", model=model, optimizer=optimizer, extra={"other": other}).close()
