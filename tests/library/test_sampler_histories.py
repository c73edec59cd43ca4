"""Random histories of crashes, shrinks, grows and prefetching: each sample exactly once in what was committed."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.sampler import ElasticBatchSampler
from elasticd.shuffle import Permutation

EPOCHS = 2


@dataclass
class Job:
    """What outlives the processes: the dataset, the newest checkpoint, and what was committed up to now."""

    n: int
    global_batch: int
    drop_last: bool
    shuffle: bool
    saved: dict[str, int | bool | str] | None = None
    saved_length: int = 0
    committed: list[tuple[int, list[int]]] = field(default_factory=list)

    def group(self, world_size: int, accumulate: int) -> list[ElasticBatchSampler]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more slices than samples: said, and wanted here
            ranks = [
                ElasticBatchSampler(
                    self.n,
                    self.global_batch,
                    accumulate=accumulate,
                    shuffle=self.shuffle,
                    seed=5,
                    drop_last=self.drop_last,
                    rank=rank,
                    world_size=world_size,
                )
                for rank in range(world_size)
            ]
        del self.committed[self.saved_length :]
        if self.saved is not None:
            for sampler in ranks:
                sampler.load_state_dict(self.saved)
        return ranks

    def expected(self, epoch: int) -> list[list[int]]:
        everything = list(range(self.n))
        order = Permutation(self.n, 5, epoch).at(everything) if self.shuffle else everything
        steps = [order[start : start + self.global_batch] for start in range(0, self.n, self.global_batch)]
        return [step for step in steps if len(step) == self.global_batch or not self.drop_last]


class Prefetcher:
    """What DataLoader workers do to a batch sampler: take from it `depth` batches before anyone asks."""

    def __init__(self, sampler: ElasticBatchSampler, depth: int) -> None:
        self._batches: Iterator[list[int]] = iter(sampler)
        self._depth = depth
        self._ahead: deque[list[int]] = deque()
        self._fill()

    def _fill(self) -> None:
        while len(self._ahead) <= self._depth and (batch := next(self._batches, None)) is not None:
            self._ahead.append(batch)

    def take(self) -> list[int] | None:
        batch = self._ahead.popleft() if self._ahead else None
        self._fill()
        return batch


def take_step(ranks: list[ElasticBatchSampler], readers: list[Prefetcher]) -> list[int] | None:
    """One optimizer step's samples over all ranks and micro-batches, stand-ins left out; None at the epoch's end."""
    step: list[int] = []
    weight = 0.0
    for micro in range(ranks[0].accumulate):
        batches = [reader.take() for reader in readers]
        if None in batches:
            assert batches == [None] * len(ranks)
            assert micro == 0
            return None
        for sampler, batch in zip(ranks, batches, strict=True):
            assert batch is not None
            real = sampler.samples(micro)
            assert len(batch) == max(real, 1)
            assert (sampler.loss_scale(micro) == 0) == (real == 0)
            weight += sampler.loss_scale(micro)
            step += batch[:real]
    assert abs(weight - len(ranks)) < 1e-9
    return step


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_sample_exactly_once_in_any_history(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40), "n")
    drop_last = data.draw(st.booleans(), "drop_last")
    global_batch = data.draw(st.integers(1, n if drop_last else 50), "global_batch")
    job = Job(n, global_batch, drop_last, data.draw(st.booleans(), "shuffle"))
    faults = data.draw(st.integers(0, 5), "faults")
    while not run_round(job, data, can_fail=faults > 0):
        faults -= 1
    for epoch in range(EPOCHS):
        steps = [step for of, step in job.committed if of == epoch]
        assert steps == job.expected(epoch)
        seen = [sample for step in steps for sample in step]
        assert len(set(seen)) == len(seen) == (n - n % global_batch if drop_last else n)
    assert [epoch for epoch, _ in job.committed] == sorted(epoch for epoch, _ in job.committed)


def run_round(job: Job, data: st.DataObject, can_fail: bool) -> bool:
    """Train with a new group from the newest checkpoint; True once all epochs are done, False for a crash."""
    accumulate = data.draw(st.integers(1, min(3, job.global_batch)), "accumulate")
    ranks = job.group(data.draw(st.integers(1, 5), "world size"), accumulate)
    for epoch in range(ranks[0].epoch, EPOCHS):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        readers = start_readers(ranks, data)
        while True:
            assert {len(sampler) for sampler in ranks} == {len(ranks[0])}
            left, is_last = len(ranks[0]), ranks[0].last
            step = take_step(ranks, readers)
            if step is None:
                assert left == 0
                break
            assert left > 0
            assert is_last == (left == accumulate)
            what = data.draw(st.sampled_from(["go on", "go on", "save", "iterate again", "crash"]), "then")
            if what == "crash" and can_fail:  # after the optimizer step or before it: not saved either way
                return False
            if what == "iterate again":  # left the loop before the commit: the step has not happened
                readers = start_readers(ranks, data)
                continue
            for sampler in ranks:
                sampler.commit()
            job.committed.append((epoch, step))
            if what == "save":
                assert all(sampler.state_dict() == ranks[0].state_dict() for sampler in ranks)
                job.saved, job.saved_length = ranks[0].state_dict(), len(job.committed)
    return True


def start_readers(ranks: list[ElasticBatchSampler], data: st.DataObject) -> list[Prefetcher]:
    return [Prefetcher(sampler, data.draw(st.integers(0, 7), "prefetched")) for sampler in ranks]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 45), st.integers(1, 6), st.integers(1, 3))
def test_averaged_gradient_is_gradient_of_mean(n: int, global_batch: int, world_size: int, accumulate: int) -> None:
    generator = torch.Generator().manual_seed(n)
    x = torch.rand(n, 4, dtype=torch.float64, generator=generator)
    y = 10 + torch.rand(n, dtype=torch.float64, generator=generator)  # far from the prediction: nothing cancels
    weights = torch.rand(4, dtype=torch.float64, generator=generator, requires_grad=True)

    def mean_loss(batch: list[int]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(x[batch] @ weights, y[batch])

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, weights)[0]

    job = Job(n, global_batch, drop_last=False, shuffle=True)
    ranks = job.group(world_size, min(accumulate, global_batch))
    readers = [iter(sampler) for sampler in ranks]
    for step in job.expected(0):
        per_rank = [
            sum(
                (gradient(mean_loss(next(reader)) * sampler.loss_scale(m)) for m in range(sampler.accumulate)),
                torch.zeros(4, dtype=torch.float64),
            )
            for sampler, reader in zip(ranks, readers, strict=True)
        ]
        averaged = torch.stack(per_rank).mean(0)  # what DDP's all-reduce does
        alone = gradient(mean_loss(step))
        assert torch.linalg.norm(averaged - alone) <= 1e-12 * torch.linalg.norm(alone)
        for sampler in ranks:
            sampler.commit()
