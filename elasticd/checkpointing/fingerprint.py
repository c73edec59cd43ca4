"""Whether parameters and the optimizers' state are still those of the last commit.

A counter in each tensor (`_version`) counts the in-place changes that torch sees. Changes through `.data`, or through
numpy's view of a tensor, move no counter: a piece of each tensor is compared, too. Both are compared between a commit
and the next optimizer step, in the first steps and ever more rarely, which finds scripts that change a state there at
every step. At a fault, counters and pieces as of the last commit are compared again, of as many tensors as reading them
at every commit may cost.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from elasticd.checkpointing.commit_record import PIECE_BYTES, local, piece

if TYPE_CHECKING:
    import torch

READ_S = 50e-9
"""What reading one counter takes."""
LEAST_S = 0.8e-6
SHARE = 0.0003
"""What reading counters at a commit may take: LEAST_S, or this share of a step if that is longer."""
_version = operator.attrgetter("_version")


class Fingerprint:
    """Of the parameters of `modules` and the state of `optimizers`."""

    def __init__(self, modules: Sequence[Any], optimizers: Sequence[Any]) -> None:
        self._modules, self._optimizers = modules, optimizers
        self._parameters = list(_parameters(modules))
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._step_s = 0.0
        self._collect()

    def _collect(self) -> None:
        """The tensors, again whenever an optimizer has begun to keep a state for more parameters."""
        self._entries = self._count_entries()
        self._tensors = [*self._parameters, *_states(self._optimizers)]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._choose()

    def _choose(self) -> None:
        most = max(1, int(max(LEAST_S, SHARE * self._step_s) / READ_S))
        self._watched = self._tensors[:: max(1, -(-len(self._tensors) // most))]
        self._counted = sum(map(_version, self._watched))

    def _count_entries(self) -> int:
        count = 0
        for optimizer in self._optimizers:
            count += len(optimizer.state)
        return count

    def set_step_s(self, step_s: float) -> None:
        """How long a step takes: more tensors can be watched where it is long."""
        self._step_s = step_s
        self._choose()

    def commit(self) -> None:
        """The state is that of a step now."""
        if self._count_entries() != self._entries:
            self._collect()
        else:
            self._counted = sum(map(_version, self._watched))

    def refresh(self) -> None:
        """Follow tensors that have been replaced: to be called after a commit, from time to time."""
        if self._is_replaced():
            self._collect()

    def _is_replaced(self) -> bool:
        now = [*_parameters(self._modules), *_states(self._optimizers)]
        same = [id(tensor) for tensor in now] == [id(tensor) for tensor in self._tensors]
        return not same or [tensor.data_ptr() for tensor in now] != self._addresses

    def whole(self) -> tuple[list[int], list[int], bytes]:
        """Of all tensors: counters, addresses, pieces."""
        import torch

        tensors = [*_parameters(self._modules), *_states(self._optimizers)]
        return (
            [tensor._version for tensor in tensors],
            [tensor.data_ptr() for tensor in tensors],
            bytes(torch.cat([piece(tensor, PIECE_BYTES) for tensor in tensors]).numpy()),
        )

    def changed(self) -> bool:
        """Since the last commit, as far as it can be known."""
        trained = [parameter.requires_grad for parameter in _parameters(self._modules)]
        unchanged = trained == self._trained and sum(map(_version, self._watched)) == self._counted
        return not unchanged or self._is_replaced()


def _parameters(modules: Sequence[Any]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from module.parameters()


def _states(optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
    import torch

    for optimizer in optimizers:
        for values in optimizer.state.values():
            yield from (local(value) for value in values.values() if isinstance(value, torch.Tensor))
