"""A fingerprint that shows whether parameters and the optimizers' state are still those of the last commit.

A counter in each tensor (`_version`) counts the in-place changes that torch sees. Changes through `.data`, or through
numpy's view of a tensor, move no counter: a piece of each tensor is compared, too. Both are compared between a commit
and the next optimizer step, in the first steps and ever more rarely, which finds scripts that change a state there at
every step. At a fault all counters are compared with those as of the last commit. Reading all of them at every commit
may cost too much: then they are read every few commits, and each has to have grown by the same number at every commit
since. Those that grow irregularly, such as of layers that not every step trains, are read at every commit, and so are a
few others: where one of them shows a change, such as by load_state_dict(), all are read at once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from elasticd.checkpointing.at_fault.step_record import PIECE_BYTES, piece
from elasticd.checkpointing.state.training_state import local_part
from elasticd.process_group import host_bytes

READ_COUNTER_S = 50e-9
COMPARE_COUNTER_S = 150e-9
"""The time to read one counter and compare it with an earlier value."""
MIN_BUDGET_S = 0.5e-6
BUDGET_SHARE_OF_STEP = 0.0003
"""The share of a step that reading counters may take at a commit, on average, or MIN_BUDGET_S if that is longer."""
MIN_IRREGULAR_BUDGET_S = 4e-6
IRREGULAR_BUDGET_SHARE = 0.001
"""The same for reading irregular ones, as of two models that are trained in turn."""
FULLY_READ_FIRST_COMMITS = 8
"""All counters are read at each of them, which shows how they grow."""
SAMPLED_COUNTERS = 2
"""Counters that are read at every commit, since most changes are of all tensors."""
RELEARN_AFTER_COMMITS = 64
"""The fewest commits between two times at which the growth of all counters is found anew."""
_version = operator.attrgetter("_version")


class Fingerprint:
    """The fingerprint of the parameters of `modules` and the state of `optimizers`."""

    def __init__(self, modules: Sequence[Any], optimizers: Sequence[Any]) -> None:
        self._modules, self._optimizers = modules, optimizers
        self._parameters = list(_parameters(modules))
        self.set_step_s(0.0)
        self.revision = 0
        """Grows when counters or tensors are not as was expected: they say nothing about commits before that."""
        self._collect_tensors()
        self.recollect_at_next_commit()

    def _collect_tensors(self) -> None:
        """The tensors, again whenever an optimizer has begun to keep a state for more parameters, or has loaded one."""
        self.revision += 1
        self._states = [(optimizer, optimizer.state) for optimizer in self._optimizers]
        self._entries = sum(len(state) for _, state in self._states)
        self._tensors = [*self._parameters, *_state_tensors(self._optimizers)]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._counters = list(map(_version, self._tensors))
        self._growth: list[int] = []
        """The growth of each counter at a commit; none before they were read a second time."""
        self._irregular: dict[int, torch.Tensor] = {}
        """Tensors by index whose counters have grown by another number at some commit, read at every one."""
        self._irregular_counters: list[int] = []
        self._commits = self._age = 0
        """Since all counters were read, and from all tensors having been collected until then."""
        self._sample: list[torch.Tensor] = []
        self._sample_sum = self._sample_growth = 0
        self._interval = 1
        self._first = FULLY_READ_FIRST_COMMITS

    def _read_counters(self) -> None:
        now, commits = list(map(_version, self._tensors)), self._commits
        grown = list(map(operator.sub, now, self._counters))
        self._age += commits
        if grown == [count * commits for count in self._growth]:
            self._sample_sum += commits * self._sample_growth
        else:
            self.revision += 1
            if not self._try_learn_growth(now, grown):
                self._collect_tensors()
                return
        self._counters, self._commits = now, 0
        self._first -= 1
        if self._first > 0:
            return
        # Odd numbers: what changes at every second commit is found to be irregular.
        self._interval = min(2 * self._interval + 1, int(len(now) * COMPARE_COUNTER_S / self._budget_s) | 1)

    def _try_learn_growth(self, now: list[int], grown: list[int]) -> bool:
        """Learn how counters grow that have not grown as before; False if that is to be found anew for all of them."""
        growth = [count // self._commits for count in grown]
        before = self._growth or growth
        odd = {index for index, count in enumerate(grown) if count != before[index] * self._commits}
        are_few = len(odd | self._irregular.keys()) <= self._irregular_budget_s / READ_COUNTER_S
        if self._age >= RELEARN_AFTER_COMMITS and (2 * len(odd) > len(now) or not are_few):
            return False
        # Of more than can be read, the state is known to be unchanged only once they grow regularly again.
        if are_few:
            self._irregular |= {index: self._tensors[index] for index in odd}
        self._growth = growth
        sample = [
            index for index in range(0, len(now), len(now) // SAMPLED_COUNTERS + 1) if index not in self._irregular
        ]
        self._sample = [self._tensors[index] for index in sample]
        self._sample_sum, self._sample_growth = (sum(map(counts.__getitem__, sample)) for counts in (now, growth))
        return True

    def set_step_s(self, step_s: float) -> None:
        """Say how long a step takes: counters can be read more often where it is long."""
        self._budget_s = max(MIN_BUDGET_S, BUDGET_SHARE_OF_STEP * step_s)
        self._irregular_budget_s = max(MIN_IRREGULAR_BUDGET_S, IRREGULAR_BUDGET_SHARE * step_s)

    def recollect_at_next_commit(self) -> None:
        """At the next commit the tensors may be other ones, or may have been changed any number of times."""
        self._entries = -1

    def commit(self) -> None:
        """The state is that of a step now."""
        entries = 0
        for optimizer, state in self._states:
            entries += len(state)
            if optimizer.state is not state:  # after load_state_dict()
                self.recollect_at_next_commit()
        if entries != self._entries:
            self._collect_tensors()
            return
        self._commits += 1
        expected = self._sample_sum + self._commits * self._sample_growth
        if self._commits >= self._interval or sum(map(_version, self._sample)) != expected:
            self._read_counters()
        if self._irregular:
            self._irregular_counters = list(map(_version, self._irregular.values()))

    def recollect_if_replaced(self) -> None:
        """Follow tensors that have been replaced: to be called after a commit, from time to time."""
        if self._are_tensors_replaced():
            self._collect_tensors()

    def _are_tensors_replaced(self) -> bool:
        now = [*_parameters(self._modules), *_state_tensors(self._optimizers)]
        same = [id(tensor) for tensor in now] == [id(tensor) for tensor in self._tensors]
        return not same or [tensor.data_ptr() for tensor in now] != self._addresses

    def read_all(self) -> tuple[list[int], list[int], bytes]:
        """Counters, addresses and pieces in the host's memory, of all tensors."""
        tensors = [*_parameters(self._modules), *_state_tensors(self._optimizers)]
        pieces = [piece(tensor, PIECE_BYTES) for tensor in tensors if tensor.device.type == "cpu"]
        return (
            [tensor._version for tensor in tensors],
            [tensor.data_ptr() for tensor in tensors],
            bytes(host_bytes(torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *pieces]))),
        )

    def is_changed(self) -> bool:
        """Since the last commit; also True where that cannot be known."""
        return self._are_tensors_replaced() or self._has_counted_change()

    def has_irregular_change(self) -> bool:
        """A counter that is read at every commit shows a change since the last one."""
        return bool(self._irregular) and list(map(_version, self._irregular.values())) != self._irregular_counters

    def _has_counted_change(self) -> bool:
        if not self._commits:
            return list(map(_version, self._tensors)) != self._counters
        if not self._growth:
            return True
        expected = [old + self._commits * growth for old, growth in zip(self._counters, self._growth, strict=True)]
        for index, counter in zip(self._irregular, self._irregular_counters, strict=True):
            expected[index] = counter
        return list(map(_version, self._tensors)) != expected


def _parameters(modules: Sequence[Any]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from module.parameters()


def _state_tensors(optimizers: Sequence[Any]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for values in optimizer.state.values():
            yield from (local_part(value) for value in values.values() if isinstance(value, torch.Tensor))
