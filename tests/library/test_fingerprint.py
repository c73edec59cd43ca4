"""The fingerprint finds a change of one tensor among many, and takes no healthy step for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from elasticd.checkpointing.at_fault.fingerprint import Fingerprint

LAYERS = 40
Update = Callable[[torch.nn.Sequential, Any, int], None]


def deep() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(LAYERS)))


def usual(net: torch.nn.Sequential, optimizer: Any, step: int) -> None:
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def with_layers_left_out(net: torch.nn.Sequential, optimizer: Any, step: int) -> None:
    """Every second step leaves one layer out, every third another."""
    kept = [layer for index, layer in enumerate(net) if (index, step % 2) != (7, 0) and (index, step % 3) != (31, 0)]
    torch.nn.Sequential(*kept)(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def with_all_loaded_once(net: torch.nn.Sequential, optimizer: Any, step: int) -> None:
    usual(net, optimizer, step)
    if step == 110:
        net.load_state_dict(net.state_dict())
    if step == 60:
        optimizer.load_state_dict(optimizer.state_dict())


def with_layers_frozen_later(net: torch.nn.Sequential, optimizer: Any, step: int) -> None:
    for layer in net[: LAYERS // 2]:
        layer.requires_grad_(step <= 70)
    usual(net, optimizer, step)


def with_weights_clamped_once(net: torch.nn.Sequential, optimizer: Any, step: int) -> None:
    usual(net, optimizer, step)
    if step == 60:
        with torch.no_grad():
            net[3].weight.clamp_(-1, 1)


OPTIMIZERS = {
    "Adam": lambda net: torch.optim.Adam(net.parameters()),
    "Adam-foreach": lambda net: torch.optim.Adam(net.parameters(), foreach=True),
    "AdamW-amsgrad": lambda net: torch.optim.AdamW(net.parameters(), amsgrad=True),
    "SGD": lambda net: torch.optim.SGD(net.parameters(), 0.001),
    "SGD-momentum": lambda net: torch.optim.SGD(net.parameters(), 0.001, momentum=0.9, nesterov=True),
    "RAdam": lambda net: torch.optim.RAdam(net.parameters()),
    "NAdam": lambda net: torch.optim.NAdam(net.parameters()),
    "Adafactor": lambda net: torch.optim.Adafactor(net.parameters()),
    "RMSprop": lambda net: torch.optim.RMSprop(net.parameters(), centered=True),
}


def known_steps(net: torch.nn.Sequential, optimizer: Any, update: Update, steps: int, step_s: float = 0.0) -> list[int]:
    """The steps after which the state is known to be unchanged."""
    update(net, optimizer, 1)
    fingerprint = Fingerprint([net], [optimizer])
    fingerprint.set_step_s(step_s)
    update(net, optimizer, 1)
    known = []
    for step in range(1, steps + 1):
        update(net, optimizer, step)
        fingerprint.commit()
        if not fingerprint.is_changed():
            known.append(step)
    return known


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_optimizer_are_no_change(name: str) -> None:
    net = deep()
    known = known_steps(net, OPTIMIZERS[name](net), usual, 40)
    missing = sorted({*range(1, 41)} - {*known})
    assert len(missing) <= (10 if name == "RAdam" else 0), missing


@pytest.mark.parametrize(
    ("update", "step_s", "unknown"),
    [
        (with_layers_left_out, 0.0, 16),
        (with_layers_left_out, 1.0, 0),
        (with_weights_clamped_once, 0.0, 61),
        (with_all_loaded_once, 0.0, 0),
        (with_layers_frozen_later, 0.0, 0),
    ],
)
def test_irregular_steps_cost_few_donors(update: Update, step_s: float, unknown: int) -> None:
    net = deep()
    known = known_steps(net, torch.optim.Adam(net.parameters()), update, 130, step_s)
    assert len(known) >= 130 - unknown, sorted({*range(1, 131)} - {*known})


def test_one_change_among_many_is_found_at_any_commit() -> None:
    net = deep()
    optimizer = torch.optim.Adam(net.parameters())
    fingerprint = Fingerprint([net], [optimizer])
    parameters = list(net.parameters())
    for step in range(1, 130):
        usual(net, optimizer, step)
        fingerprint.commit()
        assert not fingerprint.is_changed()
        if step % 21 == 0:
            with torch.no_grad():
                parameters[step % len(parameters)].add_(1.0)
            assert fingerprint.is_changed()
            fingerprint = Fingerprint([net], [optimizer])


def test_a_commit_before_what_was_not_expected_is_not_compared_any_more() -> None:
    """A GPU may still be there: before a state that an optimizer has begun to keep, or before a change of one counter
    that the next commit takes as it finds it.
    """
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    fingerprint = Fingerprint([torch.nn.ParameterList(parameters)], [optimizer])
    seen = []
    for number, trained in enumerate((1, 1, 1, 2, 2, 2, 2, 2)):
        for each in parameters[:trained]:
            each.grad = torch.ones(2)
        if number >= 6:
            with torch.no_grad():
                parameters[2].add_(1)
            assert fingerprint.has_irregular_change() == (number == 7), (
                "from the first change on it is read at every commit"
            )
        optimizer.step()
        fingerprint.commit()
        assert not fingerprint.is_changed()
        seen.append(fingerprint.revision)
    assert seen[1] == seen[2] < seen[3] < seen[4] == seen[5] < seen[6], seen
