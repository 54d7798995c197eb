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

Maker = Callable[[list[Any]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Maker] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "Adam, capturable rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3, max_iter=2),
}


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
    make = OPTIMIZERS[kind]
    model = network(1)
    optimizer = make(list(model.parameters()))
    train(model, optimizer, range(3))
    with Checkpointer(tmp_path / "store", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.save(3)
    train(model, optimizer, range(3, 6))

    resumed = network(2)
    fresh = make(list(resumed.parameters()))
    with Checkpointer(tmp_path / "store", model=resumed, optimizer=fresh) as checkpointer:
        train(resumed, fresh, range(checkpointer.resume(), 6))
    assert bits(resumed) == bits(model)


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
