"""The attached samplers of one round: which one the loop is over, and the random state at the begin of an iteration.

An iteration over a DataLoader draws a seed. One that continues in the middle of an epoch, after a restore, draws one
where an undisturbed run draws none: the random state of before is put back when the first batch is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elasticd.checkpointing.state import training_state
from elasticd.sampler import ElasticBatchSampler, samplers_of, usage_of

if TYPE_CHECKING:
    import torch


class AttachedSamplers:
    """`attached`: everything attached, by name; it grows."""

    def __init__(self, attached: Mapping[str, Any], device: torch.device) -> None:
        self._attached, self._device = attached, device
        self._loop: ElasticBatchSampler | None = None
        """The one that a step asks first: where a step takes batches of two, the loop is over this one."""
        self._random_state: dict[str, Any] | None = None
        """The state that is set when the first batch is given."""
        self._first: tuple[tuple[ElasticBatchSampler, int, int], dict[str, Any]] | None = None
        """The place of that batch, and that state. The script may only have looked at the batch."""
        self._continued: list[ElasticBatchSampler] = []
        """Samplers whose next iteration begins in the middle of an epoch."""
        self._before_seed: tuple[ElasticBatchSampler, torch.Tensor] | None = None
        """The random state before the seed of a second sampler, whose iteration begins in a step."""

    def all(self) -> list[ElasticBatchSampler]:
        every = (sampler for obj in self._attached.values() for sampler in samplers_of(obj))
        return list(dict.fromkeys(every))

    def find_used(self) -> list[tuple[str, int]]:
        """The names and epochs of those that have committed a step in this process."""
        samplers = [(name, obj) for name, obj in self._attached.items() if isinstance(obj, ElasticBatchSampler)]
        return [(name, sampler.epoch) for name, sampler in samplers if usage_of(sampler).has_committed]

    def is_loop_at_end(self) -> bool:
        """The loop over the batches has come to the end of an epoch. A second sampler has epochs of its own."""
        return any(loop.is_at_end for loop in ([self._loop] if self._loop is not None else self.all()))

    def on_restore(self) -> None:
        """The cursors are where a checkpoint was."""
        self._continued = [sampler for sampler in self.all() if sampler.offset]
        if self._continued:
            self._random_state = training_state.random_state(self._device)

    def on_next(self, sampler: ElasticBatchSampler, *, is_iteration: bool, is_first: bool, has_stepped: bool) -> None:
        """A sampler is asked for a batch, or for an iteration; `is_first`: no other one was asked in this step."""
        if self._loop is None or is_first:
            self._loop = sampler
        before, self._before_seed = self._before_seed, None
        is_continued, place = sampler in self._continued, (sampler, sampler.epoch, sampler.offset)
        if is_iteration:
            if not has_stepped and self._first is not None and self._first[0] == place:
                self._random_state = self._first[1]
            if is_continued:
                self._before_seed = sampler, training_state.torch_random_state()
            return
        if is_continued:
            self._continued.remove(sampler)
        if self._random_state is not None:
            if not has_stepped:
                training_state.set_random_state(self._random_state, self._device)
                self._first = place, self._random_state
            self._random_state = None
        elif is_continued and before is not None and before[0] is sampler:
            training_state.undo_seed_draw(before[1])
