"""The elastic batch sampler: which samples each rank trains on, exact across crashes, shrinks and grows.

The position in the data is one global cursor (epoch, offset), moved only by `commit()`, together with the optimizer
step that used the samples. Ranks, micro-batches and DataLoader workers are never part of it: they only select slices of
the global batch at the cursor. So samples that were prefetched but not trained on are fetched again after a restart,
and samples that were trained on are not, with any number of ranks before and after.

A fetch never moves the cursor, and the sampler sends nothing to other ranks. torch is imported only for the process
group's rank and size and for the shuffle's arithmetic.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from elasticd.errors import SamplerError
from elasticd.order import GivenOrder, length
from elasticd.shuffle import ALGORITHM, MAX_LENGTH, Permutation

# Positions shuffled at a time: a call into torch costs 0.3 ms, and 0.15 ms more for each thousand of them. The first
# chunk is small so that the first batch after a restart does not wait for later ones.
_FIRST_CHUNK_POSITIONS = 128
_MAX_CHUNK_POSITIONS = 8192
# Frames between a DataLoader's iterator and this sampler: none, or those of a wrapper's generators.
_MAX_WRAPPER_FRAMES = 8
# A loop that looks ahead may fetch more than a step a commit, until its buffer is full: not so many.
_COMMITS_FOR_CERTAINTY = 32
_COMMITS_IN_WINDOW = 16
"""Commits in which the loop has at least once trained on all that it had fetched, but what a DataLoader prefetches."""
_MAX_STEPS_AHEAD = 4
"""Steps whose batches a loop takes ahead, to copy them to its device."""
_LOADER_MODULES = ("torch.utils.data.", "torchdata.")


class _Slice(NamedTuple):
    """Positions [start, stop) of the epoch's order that one rank trains on in one micro-batch; may be empty."""

    start: int
    stop: int


class _Loader(NamedTuple):
    """The DataLoader that iterates over a sampler, as far as it is known."""

    unordered: bool = False  #: the batches arrive in another order than the sampler's
    wrapped: bool = False  #: another batch sampler is between them
    queued: int = 0  #: batches that its worker processes fetch ahead
    iteration: weakref.ref[Any] | None = None
    """The iterator of the other batch sampler that the DataLoader has begun."""

    def continues(self, before: _Loader) -> bool:
        """The DataLoader is in the same iteration as `before`."""
        iteration = None if self.iteration is None else self.iteration()
        return iteration is not None and before.iteration is not None and before.iteration() is iteration


@dataclass(slots=True)
class SamplerUsage:
    """A process's use of a sampler."""

    has_committed: bool = False
    begun_iterations: int = 0
    last_exhausted_iteration: int = 0  #: the last one that has come to the end of its epoch, 0 for none
    fetched_batches: int = 0  #: micro-batches of this rank
    fetched_training_batches: int = 0  #: those that were not fetched in `torch.no_grad()`
    fetching_thread: int = 0
    left_out_steps: int = 0  #: steps of an epoch that were fetched, and for which `commit()` was not called
    skipped_steps: int = 0  #: those that the loop has left out first after a restore, as from the epoch's beginning


_SAMPLERS: weakref.WeakSet[ElasticBatchSampler] = weakref.WeakSet()
"""Samplers of this process: a session has to find those that it is not given."""


def uncommitted_samplers() -> list[ElasticBatchSampler]:
    """Samplers that this process has iterated over, and that have never committed a step."""
    return [sampler for sampler in _SAMPLERS if sampler._usage.begun_iterations and not sampler._usage.has_committed]


def follow_group() -> None:
    """This process has another rank, or other ranks beside it: a sampler that has its rank from the process group takes
    the new one. An iteration ends there: the next one starts at the cursor.
    """
    for sampler in _SAMPLERS:
        if sampler._follows_group:
            sampler._rank, sampler._world_size = _rank_in_group()
            sampler._place_cursor(sampler._epoch, sampler._offset)


def has_sampler_with_given_rank() -> bool:
    """A sampler was given a rank among several, which it keeps when this process gets another one."""
    return any(not sampler._follows_group and sampler._world_size > 1 for sampler in _SAMPLERS)


def samplers_of(attached: object) -> list[ElasticBatchSampler]:
    """The attached sampler itself, or those of an object whose `commit()` commits the one in use."""
    if isinstance(attached, ElasticBatchSampler):
        return [attached]
    if not callable(getattr(attached, "commit", None)):
        return []
    held = [*getattr(attached, "__dict__", {}).values()]
    held += [each for value in held if isinstance(value, dict) for each in value.values()]
    held += [each for value in held if isinstance(value, (list, tuple)) for each in value]
    return [each for each in held if isinstance(each, ElasticBatchSampler)]


def check_attached_loader(name: str, attached: Any) -> None:
    """SamplerError for torchdata's loader, whose state has another place of its ElasticBatchSampler: of batches that
    its worker processes have fetched.
    """
    places = [getattr(attached, attribute, None) for attribute in ("sampler", "batch_sampler")]
    is_place_of_its_own = [isinstance(place, ElasticBatchSampler) for place in places] == [False, True]
    if is_place_of_its_own and getattr(attached, "num_workers", 0) > 0:
        raise SamplerError(
            f"attach({name}=...): the place of this {type(attached).__name__} is its ElasticBatchSampler's, and a "
            "restart would train on samples again that had been fetched ahead: attach the sampler alone"
        )


def usage_of(sampler: ElasticBatchSampler) -> SamplerUsage:
    return sampler._usage


@dataclass(slots=True)
class _Consumption:
    """The indices that one iteration fetched, and those committed meanwhile."""

    loader: _Loader
    steps_at_start: int = 0  #: at its beginning, until the end of the epoch
    exhausted: bool = False
    commits: int = 0
    fetched_at_commit: int = 0  #: the position at the last commit
    least_fetched: int | None = None
    """The fewest positions fetched between two commits, before the last step was fetched."""
    least_ahead: float = math.inf
    """The fewest positions fetched beyond a step at its commit, in the present window."""
    first_ahead: float = math.inf
    """The same of the first window."""

    def on_commit(self, fetched: int, is_told_by_fetches: bool) -> None:
        """`is_told_by_fetches`: what the loop uses since the last commit is what was fetched meanwhile."""
        self.commits += 1
        if self.commits > 1 and is_told_by_fetches:  # before the first commit the DataLoader fills its queues
            new = fetched - self.fetched_at_commit
            self.least_fetched = new if self.least_fetched is None else min(self.least_fetched, new)
        self.fetched_at_commit = fetched

    def find_left_out(self, ahead: int) -> int:
        """The positions that a loop has fetched, and that neither a commit nor a DataLoader's queue accounts for.

        `ahead`: those fetched beyond the step that is committed now, by the thread that commits. A loop that leaves out
        a batch stays ahead by it; one that fetches several at once does not.
        """
        self.least_ahead = min(self.least_ahead, ahead)
        if self.commits % _COMMITS_IN_WINDOW:
            return 0
        least, self.least_ahead = self.least_ahead, math.inf
        self.first_ahead = min(self.first_ahead, least)
        return int(least - self.first_ahead)

    def leaves_steps_uncommitted(self, global_batch: int) -> bool:
        """More than one step is fetched for each commit, beyond what a DataLoader prefetches."""
        certain = self.exhausted or self.commits >= _COMMITS_FOR_CERTAINTY
        return certain and self.least_fetched is not None and self.least_fetched > global_batch

    def has_left_steps_uncommitted(self, global_batch: int, world_size: int) -> bool:
        """The same after the loop; also where all steps were prefetched, and a wrapper took every world_size-th one."""
        if self.least_fetched is not None or not self.exhausted:
            return self.leaves_steps_uncommitted(global_batch)
        return (
            self.loader.wrapped and world_size > 1 and abs(self.steps_at_start - self.commits * world_size) < world_size
        )


class ElasticBatchSampler:
    """Batch sampler for `DataLoader(dataset, batch_sampler=...)` that keeps one global cursor over the dataset.

    Args:
        dataset: a map-style dataset, anything with a length, or the length itself.
        global_batch: samples in one optimizer step, over all ranks and micro-batches together. It does not change
            with the world size; never compute it from the world size.
        accumulate: micro-batches a rank takes for one optimizer step. It may differ from run to run.
        shuffle: False walks the dataset in order.
        seed: the same on every rank, below 2**64. The order is a function of (dataset length, seed, epoch) alone, see
            `elasticd.shuffle`.
        drop_last: leave out the samples after the last full global batch of an epoch.
        rank, world_size: from the default process group unless both are given; 0 of 1 where there is none. Under tensor
            parallelism those of the mesh's dimension that divides the data: ranks of one group get the same samples.
        order: a sampler of your own (weighted, grouped by length), a sequence of indices, or a function that gives one
            for an epoch, in place of the shuffle. It has to be the same on all ranks; see `elasticd.order`. `shuffle`
            has no effect then, and an epoch is as long as the order.

    The global batch at the cursor is cut into `accumulate * world_size` contiguous slices, sizes differing by one at
    most; micro-batch m of rank r is slice `m * world_size + r`. Where there are fewer samples than slices, a rank
    without samples gets one stand-in sample, so that it takes part in DDP's collectives, with `loss_scale()` 0.

    Call `commit()` after each optimizer step (`session.step()` does), `set_epoch()` before each epoch of `for epoch in
    range(sampler.epoch, epochs)`, and multiply each loss by `loss_scale()`: docs/sampler.md has the loop.

    Raises SamplerError for arguments that cannot work.
    """

    def __init__(
        self,
        dataset: Sized | int,
        global_batch: int,
        *,
        accumulate: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        order: Iterable[int] | Callable[[int], Iterable[int]] | None = None,
    ) -> None:
        self._size = _dataset_length(dataset)
        self._global_batch = _checked_integer("global_batch", global_batch, at_least=1)
        self._accumulate = _checked_integer("accumulate", accumulate, at_least=1)
        self._seed = _checked_integer("seed", seed, at_least=0)
        self._shuffle = bool(shuffle)
        self._drop_last = bool(drop_last)
        self._follows_group = rank is None
        self._rank, self._world_size = _rank_in_world(rank, world_size)
        if self._seed >= 2**64:
            raise SamplerError(f"seed={seed} does not fit into 64 bits")
        self._given = order
        self._given_orders: dict[int, GivenOrder] = {}
        """The order of the last epoch that was asked for, by its number."""
        if order is not None:
            self._size = _dataset_length(length(order, self._seed))
        if self._drop_last and self._size < self._global_batch:
            raise SamplerError(
                f"drop_last=True leaves nothing to train on: {self._size} samples are no full global batch of "
                f"{self._global_batch}; lower global_batch or set drop_last=False"
            )
        if self._accumulate > self._global_batch:
            raise SamplerError(
                f"accumulate={accumulate} micro-batches cannot share a global batch of {global_batch} samples; "
                f"accumulate at most {global_batch} times"
            )
        if self._accumulate * self._world_size > self._global_batch:
            warnings.warn(
                f"{self._world_size} ranks x {self._accumulate} micro-batches share a global batch of "
                f"{self._global_batch}: some train on a stand-in with loss scale 0 at every step. The result is right, "
                "but the time is wasted; raise global_batch, or lower accumulate or the number of ranks",
                stacklevel=2,
            )
        self._epoch = 0
        self._offset = 0
        # Positions before this one have been fetched, with all micro-batches, since the cursor was last placed.
        self._fetched = 0
        # Grows when the cursor is placed elsewhere; an iterator with another number is stale.
        self._generation = 0
        self._restored = False
        self._finished_here = False
        self._stopped = False
        self.on_next: Callable[[bool], None] | None = None
        """Called before a batch is given; with True when an iteration begins."""
        self._is_past = False
        self._consumption = _Consumption(_Loader())
        self._usage = SamplerUsage()
        _SAMPLERS.add(self)

    @property
    def epoch(self) -> int:
        """The epoch of the cursor; after `load_state_dict` the one to continue with, possibly at its end."""
        return self._epoch

    @property
    def offset(self) -> int:
        """Samples of this epoch that are committed; the dataset's length once the epoch is over (drop_last too)."""
        return self._offset

    @property
    def global_batch(self) -> int:
        """Samples in one optimizer step, over all ranks and micro-batches."""
        return self._global_batch

    @property
    def accumulate(self) -> int:
        """Micro-batches this rank takes for one optimizer step."""
        return self._accumulate

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a whole epoch, independent of the cursor: the number for a learning-rate schedule."""
        return len(range(0, self._last_step_end, self._global_batch))

    @property
    def last(self) -> bool:
        """True if the step at the cursor is the epoch's last one; False after it too."""
        return self._offset < self._size and self._offset + self._global_batch >= self._last_step_end

    def __len__(self) -> int:
        """Micro-batches this rank would still yield in this epoch, counted from the committed cursor."""
        return len(self._remaining_step_starts()) * self._accumulate

    def samples(self, micro: int = 0) -> int:
        """Real samples in this rank's micro-batch of the step at the cursor: 0 means that it holds a stand-in."""
        start, stop = self._slice(self._step_at_cursor("samples()"), micro)
        return stop - start

    def loss_scale(self, micro: int = 0) -> float:
        """The factor for this micro-batch's mean loss, for the step at the cursor: n * W / B.

        n: samples in this rank's micro-batch (0 for a stand-in), W: world size, B: samples in this global step. With it
        the gradient that DDP averages over the ranks is that of the mean loss over the global batch in one process,
        1/W * sum over r, m of (n_rm * W / B) * (mean gradient of r, m) = 1/B * sum of all samples' gradients, however
        uneven the slices, without a further division by `accumulate`. The loss must be a mean over samples.

        Call it before `commit()`. It never depends on what was prefetched. Raises SamplerError at the end of an epoch,
        and for a micro-batch out of range.
        """
        step = self._step_at_cursor("loss_scale()")
        start, stop = self._slice(step, micro)
        return (stop - start) * self._world_size / (step.stop - step.start)

    def commit(self) -> None:
        """Move the cursor past its global batch: the optimizer step that used the batch is done.

        `session.step()` calls this for an attached sampler. Raises SamplerError, and moves nothing, if the epoch is
        over or the step's micro-batches have not all been fetched: then they cannot have been trained on.
        """
        step = self._step_at_cursor("commit()")
        if self._fetched < step.stop:
            raise SamplerError(
                f"commit() at {self._cursor_text()}, but that step's samples have not all been fetched. Commit once "
                f"for each optimizer step, after all of its micro-batches ({self._accumulate}); session.step() already "
                "commits an attached sampler, so do not call both. It commits each of several: of samplers that take "
                "turns attach one object with state_dict(), load_state_dict() and a commit() for the one in use"
            )
        if self._consumption.loader.unordered:
            raise SamplerError(
                "DataLoader(in_order=False) with several workers yields batches in the order in which the workers "
                "finish, and commit() counts them in the order of the epoch: a resume would repeat some samples and "
                "lose others. Leave in_order at its default, True"
            )
        self._find_skipped(has_ended=False)
        # A thread of its own fetches as fast as it can: that says nothing about what the loop uses.
        is_fetched_here = self._usage.fetching_thread == threading.get_ident()
        self._consumption.on_commit(self._fetched, is_fetched_here and self._fetched < self._last_step_end)
        self._refuse_uncommitted_steps(self._consumption.leaves_steps_uncommitted(self._global_batch))
        if is_fetched_here:
            left_out = self._consumption.find_left_out(self._fetched - step.stop)
            self._usage.left_out_steps = max(self._usage.left_out_steps, left_out // self._global_batch)
        self._usage.has_committed = True
        # The samples that drop_last leaves out belong to the last step, so that offset == length always means "over".
        self._offset = self._size if step.stop == self._last_step_end else step.stop
        self._restored = False
        self._finished_here = self._offset == self._size

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch: the epoch of the cursor keeps its position, another one starts at its beginning.

        Call it at the start of every epoch, after a resume too: the resumed epoch continues from its last commit, and
        an epoch resumed at its very end yields nothing. Raises SamplerError for an epoch before a restored one before
        the first commit since: a loop written `range(epochs)` would train on everything again.
        """
        epoch = _checked_integer("epoch", epoch, at_least=0)
        if self._stopped:
            return
        if epoch < self._epoch and self._restored:
            raise SamplerError(
                f"set_epoch({epoch}) after a restore at {self._cursor_text()} would train on finished epochs again; "
                "write the loop as `for epoch in range(sampler.epoch, epochs)`"
            )
        self._finished_here = False
        if epoch != self._epoch:
            self._refuse_uncommitted_steps(
                self._consumption.has_left_steps_uncommitted(self._global_batch, self._world_size)
            )
            self._refuse_endless_loader(_calling_loader(self))
            self._find_skipped(has_ended=True)
            self._place_cursor(epoch, 0)

    @property
    def is_at_end(self) -> bool:
        """The epoch of the cursor is over."""
        return self._offset == self._size

    @contextlib.contextmanager
    def in_next_epoch(self) -> Iterator[None]:
        """The state of an epoch that is over is, in this block, that of the beginning of the next one."""
        self._is_past = self.is_at_end
        try:
            yield
        finally:
            self._is_past = False

    def on_stop(self) -> None:
        """The job stops here: from now on every iteration ends, and the cursor stays. `session.step()` calls this."""
        self._stopped = True

    def state_dict(self) -> dict[str, int | bool | str]:
        """The cursor and the arguments it depends on: plain ints, bools and one str; the same on every rank."""
        epoch, offset = (self._epoch + 1, 0) if self._is_past else (self._epoch, self._offset)
        return {
            "version": 1,
            "order": self._order_name(epoch),
            "dataset_size": self._size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "global_batch": self._global_batch,
            "drop_last": self._drop_last,
            "epoch": epoch,
            "offset": offset,
        }

    def _order_name(self, epoch: int) -> str:
        if self._given is not None:
            return self._given_order(epoch).name
        return ALGORITHM if self._shuffle else "sequential"

    def _given_order(self, epoch: int) -> GivenOrder:
        assert self._given is not None
        if epoch not in self._given_orders:
            order = GivenOrder(self._given, self._seed, epoch)
            if len(order) != self._size:
                raise SamplerError(
                    f"order={order.name}: epoch {epoch} has {len(order)} samples, and the first one had {self._size}; "
                    "every epoch has to be as long"
                )
            self._given_orders = {epoch: order}
        return self._given_orders[epoch]

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the cursor of `state_dict()`. World size, rank and accumulate may differ.

        Raises SamplerError, and changes nothing, when the dataset's size, seed, shuffle or order differ: the same
        offset would mean other samples. A different global_batch or drop_last is accepted between epochs (at the
        beginning or the end of one) and refused inside one.
        """
        epoch, offset = _checked_cursor(state, self.state_dict(), self._order_name)
        self._place_cursor(epoch, offset)
        self._restored = True
        self._finished_here = False

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's micro-batches from the committed cursor to the end of the epoch, `accumulate` of them a step.

        Raises SamplerError when the epoch was finished by this process and `set_epoch` has not been called since; also,
        as do `commit()` and `set_epoch()`, when the loop fetches several steps for each commit: it skips samples.
        """
        if self._stopped:
            return iter(())
        if self._finished_here:
            raise SamplerError(
                f"epoch {self._epoch} is finished; call sampler.set_epoch({self._epoch + 1}) before the next iteration"
            )
        self._refuse_uncommitted_steps(
            self._consumption.has_left_steps_uncommitted(self._global_batch, self._world_size)
        )
        loader = _calling_loader(self)
        self._refuse_endless_loader(loader)
        self._consumption = _Consumption(loader, steps_at_start=len(self._remaining_step_starts()))
        if self.on_next is not None:
            self.on_next(True)
        self._usage.begun_iterations += 1
        # Not a generator itself: it starts at the cursor of iter(), not of the first next().
        return self._micro_batches(self._remaining_step_starts(), self._generation)

    def _micro_batches(self, starts: range, generation: int) -> Iterator[list[int]]:
        from torch import is_grad_enabled

        epoch, iteration, usage = self._epoch, self._usage.begun_iterations, self._usage
        order = self._order(epoch)
        share = -(-self._global_batch // self._world_size)
        chunk, done = _FIRST_CHUNK_POSITIONS, 0
        if not starts and generation == self._generation:
            self._finished_here = True  # a restored epoch that is over has one iteration, an empty one
        self._report_next()
        while done < len(starts):
            steps = [self._step_from(start) for start in starts[done : done + max(1, chunk // share)]]
            slices = [self._slice_or_stand_in(step, micro) for step in steps for micro in range(self._accumulate)]
            positions = [position for start, stop in slices for position in range(start, stop)]
            indices = positions if order is None else order.at(positions)
            taken = 0
            for number, (start, stop) in enumerate(slices):
                self._report_next()
                if self._stopped:
                    return
                step, micro = steps[number // self._accumulate], number % self._accumulate
                self._refuse_stale(step, generation, epoch)
                if micro == self._accumulate - 1:
                    self._fetched = max(self._fetched, step.stop)
                usage.fetched_batches += 1
                usage.fetched_training_batches += is_grad_enabled()
                usage.fetching_thread = threading.get_ident()
                yield indices[taken : taken + stop - start]
                taken += stop - start
            done += len(steps)
            chunk = min(2 * chunk, _MAX_CHUNK_POSITIONS)
        usage.last_exhausted_iteration = max(usage.last_exhausted_iteration, iteration)
        if generation == self._generation:
            self._consumption.exhausted = True
            self._refuse_uncommitted_steps(self._consumption.leaves_steps_uncommitted(self._global_batch))

    def _report_next(self) -> None:
        if self.on_next is not None:
            self.on_next(False)

    def _order(self, epoch: int) -> Permutation | GivenOrder | None:
        if self._given is not None:
            order = self._given_order(epoch)
            # What a restart would find: it draws the order again.
            is_first = self._usage.begun_iterations == 1 and not self._restored
            if is_first and GivenOrder(self._given, self._seed, epoch).name != order.name:
                warnings.warn(
                    f"order={order.name}: it is another one each time that it is drawn, so a restart cannot continue "
                    "in an epoch, and will fail: draw from torch's generator, which is seeded here, or give a function "
                    "of the epoch that seeds its own",
                    stacklevel=2,
                )
            return order
        return Permutation(self._size, self._seed, epoch) if self._shuffle else None

    def _refuse_uncommitted_steps(self, skipped: bool) -> None:
        """SamplerError for an iteration that commits only some of the steps it fetches.

        One that is left early has fetched ahead by what its DataLoader prefetches, and then one step for each commit.
        """
        if not skipped or not 0 < self._offset < self._size:
            return
        raise SamplerError(
            f"the cursor is at {self._cursor_text()}, but all samples before {self._fetched} were fetched, more than "
            "one step for each commit(). If this DataLoader went through Accelerate's prepare(), leave it out: "
            "the sampler already gives each rank its share. If each step trains on several micro-batches, give "
            "ElasticBatchSampler(accumulate=...). If the loop leaves out batches, call session.step() for them, too"
        )

    def _find_skipped(self, has_ended: bool) -> None:
        """Count what a loop has left out that resumes by itself: after a restore, and before its first commit or the
        epoch's end, as many steps as were trained on, or all that were left.
        """
        consumed, is_fetched_here = self._consumption, self._usage.fetching_thread == threading.get_ident()
        if not (self._restored and is_fetched_here and not consumed.commits and consumed.exhausted == has_ended):
            return
        trained = self._offset // self._global_batch
        taken = (self._fetched - self._offset) // self._global_batch - consumed.loader.queued // self._accumulate
        skipped = taken if has_ended else taken - 1
        # A loop may take a batch before it trains on the one before.
        if skipped > _MAX_STEPS_AHEAD and (skipped <= trained if has_ended else skipped - trained in (0, 1)):
            self._usage.skipped_steps = skipped

    def _refuse_endless_loader(self, loader: _Loader) -> None:
        """SamplerError for a DataLoader that fetches ahead of `commit()` beyond the end of an epoch: the cursor cannot
        follow it.
        """
        before = self._consumption
        if not (before.exhausted and before.commits and self._offset < self._size and loader.continues(before.loader)):
            return
        raise SamplerError(
            f"the cursor is at {self._cursor_text()}, and this DataLoader has fetched the rest of the epoch and "
            "continues: its batch sampler has no end, as that of an InfiniteDataLoader or a MultiEpochsDataLoader. "
            "Iterate over DataLoader(dataset, batch_sampler=sampler) once in each epoch; persistent_workers=True "
            "keeps its workers"
        )

    def _refuse_stale(self, step: _Slice, generation: int, epoch: int) -> None:
        if generation != self._generation or step.start < self._offset:
            raise SamplerError(
                f"this iterator would continue at epoch {epoch}, sample {step.start}, but the sampler was moved to "
                f"{self._cursor_text()}, by set_epoch(), load_state_dict() or commits of steps of another iterator; "
                "start a new iteration over the DataLoader"
            )

    def _slice_or_stand_in(self, step: _Slice, micro: int) -> _Slice:
        piece = self._slice(step, micro)
        return piece if piece.start < piece.stop else _Slice(step.start, step.start + 1)  # the stand-in

    def _slice(self, step: _Slice, micro: int) -> _Slice:
        if not 0 <= micro < self._accumulate:
            raise SamplerError(f"micro={micro} is not one of this sampler's {self._accumulate} micro-batches (from 0)")
        base, larger = divmod(step.stop - step.start, self._accumulate * self._world_size)
        # Micro-batches outside, ranks inside: a small last batch then spreads over the ranks before any gets a second.
        number = micro * self._world_size + self._rank
        start = step.start + number * base + min(number, larger)
        return _Slice(start, start + base + (number < larger))

    def _remaining_step_starts(self) -> range:
        return range(self._offset, self._last_step_end, self._global_batch)

    def _step_from(self, start: int) -> _Slice:
        return _Slice(start, min(start + self._global_batch, self._last_step_end))

    def _step_at_cursor(self, caller: str) -> _Slice:
        if self._offset == self._size:
            raise SamplerError(
                f"{caller} at the end of epoch {self._epoch}: no step is left in it. Call it before the step's "
                f"commit(); set_epoch({self._epoch + 1}) starts the next epoch"
            )
        return self._step_from(self._offset)

    def _place_cursor(self, epoch: int, offset: int) -> None:
        self._epoch = epoch
        self._offset = offset
        self._fetched = offset
        self._generation += 1
        self._restored = False
        self._consumption = _Consumption(_Loader())

    @property
    def _last_step_end(self) -> int:
        return self._size - self._size % self._global_batch if self._drop_last else self._size

    def _cursor_text(self) -> str:
        return f"epoch {self._epoch}, sample {self._offset} of {self._size}"


def _calling_loader(sampler: object) -> _Loader:
    """The DataLoader whose iterator is asking for indices: it names neither itself nor its options to a sampler."""
    frame = sys._getframe(2)
    for _ in range(_MAX_WRAPPER_FRAMES):
        names = frame.f_locals if frame.f_globals.get("__name__", "").startswith(_LOADER_MODULES) else {}
        iterator: Any = names.get("self")
        if hasattr(iterator, "_index_sampler"):
            _refuse_batches_of_batches(iterator._index_sampler, sampler)
            # While the iterator is being made only the DataLoader has the option.
            in_order = getattr(names.get("loader"), "in_order", getattr(iterator, "_in_order", True))
            unordered = not in_order and getattr(iterator, "_num_workers", 0) > 1
            wrapped = getattr(iterator, "_index_sampler", sampler) is not sampler
            queued = (getattr(names.get("loader"), "prefetch_factor", 0) or 0) * getattr(iterator, "_num_workers", 0)
            with contextlib.suppress(AttributeError, TypeError):  # not begun, or of a class without weak references
                return _Loader(unordered, wrapped, queued, weakref.ref(iterator._sampler_iter))
            return _Loader(unordered, wrapped, queued)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return _Loader()


def _refuse_batches_of_batches(index_sampler: Any, sampler: object) -> None:
    size = getattr(index_sampler, "batch_size", 1)
    if getattr(index_sampler, "sampler", None) is sampler and isinstance(size, int) and size > 1:
        raise SamplerError(
            f"this DataLoader makes one batch of {size} batches, because ElasticBatchSampler gives whole batches and "
            "no samples: write DataLoader(dataset, batch_sampler=sampler), without batch_size and sampler"
        )


def _dataset_length(dataset: Sized | int) -> int:
    if isinstance(dataset, bool):
        raise SamplerError(f"dataset={dataset}: give a dataset or its length")
    if isinstance(dataset, int):
        size = dataset
    else:
        try:
            size = len(dataset)
        except (TypeError, NotImplementedError) as error:
            raise SamplerError(
                f"{type(dataset).__name__} has no length: the sampler needs a map-style dataset (__len__ and "
                "__getitem__) or the number of samples"
            ) from error
    if not 1 <= size <= MAX_LENGTH:
        raise SamplerError(f"the dataset has {size} samples; the sampler needs at least one, and at most 2**62")
    return size


def _checked_integer(name: str, value: object, *, at_least: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # raises TypeError unless an integer
    except TypeError:
        raise SamplerError(f"{name}={value!r} must be an integer") from None
    if number < at_least:
        raise SamplerError(f"{name}={number} must be at least {at_least}")
    return number


def _rank_in_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise SamplerError("give both rank and world_size, or neither to take them from the process group")
    if rank is None or world_size is None:
        return _rank_in_group()
    ranks = _checked_integer("world_size", world_size, at_least=1)
    number = _checked_integer("rank", rank, at_least=0)
    if number >= ranks:
        raise SamplerError(f"rank={number} must be below world_size={ranks}")
    return number, ranks


def _rank_in_group() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        # As rank 0 of 1 every rank would silently train on everything.
        raise SamplerError(
            f"WORLD_SIZE={world_size} but there is no process group yet: create the sampler after elasticd.init() or "
            "torch.distributed.init_process_group(), or give rank and world_size"
        )
    return 0, 1


def _checked_cursor(
    state: Mapping[str, object], mine: Mapping[str, int | bool | str], order_name: Callable[[int], str]
) -> tuple[int, int]:
    """(epoch, offset) of a saved state that fits this sampler; SamplerError, naming the difference, otherwise."""
    if state.get("version") != mine["version"]:
        raise SamplerError(
            f"the sampler's state has version {state.get('version')!r}; this elasticd reads {mine['version']}"
        )
    for key, value in mine.items():
        if type(state.get(key)) is not type(value):
            raise SamplerError(f"this is not a sampler's state: {key} is {state.get(key)!r}")
    mine = {**mine, "order": order_name(max(0, cast("int", state["epoch"])))}
    for key in ("dataset_size", "shuffle", "seed", "order"):
        if state[key] != mine[key]:
            raise SamplerError(
                f"{key} was {state[key]!r} when this state was saved and is {mine[key]!r} now: its position would mean "
                f"other samples. Set it to {state[key]!r} again. To begin an epoch 0 of the samples as they are now, "
                "attach the sampler under another name with optional=True"
            )
    saved = cast("Mapping[str, int]", state)  # the types were compared above
    size, batch, epoch, offset = saved["dataset_size"], saved["global_batch"], saved["epoch"], saved["offset"]
    inside = 0 < offset < size
    if epoch < 0 or batch < 1 or not 0 <= offset <= size or (inside and offset % batch):
        raise SamplerError(f"this state is invalid: epoch {epoch}, sample {offset} of {size}, global batch {batch}")
    for key in ("global_batch", "drop_last"):
        if inside and state[key] != mine[key]:
            raise SamplerError(
                f"{key} was {state[key]!r} when this state was saved, at sample {offset} of {size} of epoch {epoch}, "
                f"and is {mine[key]!r} now; it may change only between epochs. global_batch counts the samples of all "
                "ranks together: do not compute it from the world size"
            )
    return epoch, offset
