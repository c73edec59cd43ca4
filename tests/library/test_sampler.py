"""The sampler's contract, and the errors for uses that would lose or repeat samples."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from elasticd.errors import SamplerError
from elasticd.sampler import ElasticBatchSampler, usage_of
from elasticd.shuffle import Permutation


def alone(n: int = 20, global_batch: int = 4, **options: int | bool) -> ElasticBatchSampler:
    accumulate, seed = int(options.pop("accumulate", 1)), int(options.pop("seed", 0))
    shuffle, drop_last = bool(options.pop("shuffle", True)), bool(options.pop("drop_last", False))
    assert not options
    return ElasticBatchSampler(
        n, global_batch, accumulate=accumulate, seed=seed, shuffle=shuffle, drop_last=drop_last, rank=0, world_size=1
    )


def train(sampler: ElasticBatchSampler, steps: int | None = None) -> list[list[int]]:
    """Commit that many steps, or the rest of the epoch."""
    done = []
    for batch in islice(sampler, steps):
        done.append(batch)
        sampler.commit()
    return done


def order(n: int, epoch: int, seed: int = 0) -> list[int]:
    return Permutation(n, seed, epoch).at(list(range(n)))


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


@pytest.fixture
def eager_loader() -> Iterator[tuple[ElasticBatchSampler, DataLoader[int]]]:
    """A DataLoader that takes the whole epoch from its sampler before the first step."""
    sampler = alone()
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=2, prefetch_factor=4, persistent_workers=True)
    yield sampler, loader
    loader._iterator = None  # ends the persistent workers now rather than at some garbage collection


def test_sampler_imports_no_torch() -> None:
    code = "import sys, elasticd.sampler; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0


def test_prefetching_workers_do_not_move_the_cursor(eager_loader: tuple[ElasticBatchSampler, DataLoader[int]]) -> None:
    sampler, loader = eager_loader
    expected = order(20, epoch=0)
    assert len(loader) == 5
    for number, batch in enumerate(loader):
        assert batch.tolist() == expected[4 * number : 4 * number + 4]
        if number == 2:
            break
        sampler.commit()
    assert sampler.offset == 8
    assert len(loader) == 3
    again = []
    for batch in loader:
        again += batch.tolist()
        sampler.commit()
    assert again == expected[8:]
    assert len(loader) == 0
    sampler.set_epoch(1)
    assert [sample for batch in loader for sample in batch.tolist()] == order(20, epoch=1)


def test_order_without_shuffle_is_sequential() -> None:
    assert train(alone(6, 4, shuffle=False)) == [[0, 1, 2, 3], [4, 5]]


def test_set_epoch_keeps_position_or_starts_over() -> None:
    sampler = alone()
    train(sampler, 2)
    sampler.set_epoch(0)
    assert (sampler.epoch, sampler.offset) == (0, 8)
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.offset) == (1, 0)
    assert [sample for batch in train(sampler) for sample in batch] == order(20, epoch=1)


def test_iteration_of_finished_epoch_raises() -> None:
    sampler = alone()
    train(sampler)
    with pytest.raises(SamplerError, match=r"epoch 0 is finished; call sampler.set_epoch\(1\)"):
        iter(sampler)
    sampler.set_epoch(1)
    assert len(train(sampler)) == 5


@pytest.mark.parametrize("workers", [0, 1])
def test_finished_epoch_that_was_restored_is_iterated_once(workers: int) -> None:
    """A loop without `set_epoch` would pass over all further epochs, and its job would succeed."""
    before, sampler = alone(), alone()
    train(before)
    sampler.load_state_dict(before.state_dict())
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers)
    assert list(loader) == []
    with pytest.raises(SamplerError, match=r"epoch 0 is finished; call sampler.set_epoch\(1\)"):
        iter(sampler)
    sampler.set_epoch(0)
    assert list(loader) == [], "the loop's own call for the epoch that it resumed in"
    sampler.set_epoch(1)
    assert len(train(sampler)) == 5


def test_set_epoch_before_restored_epoch_raises() -> None:
    before = alone()
    for epoch in range(3):
        before.set_epoch(epoch)
        train(before, 2)
    resumed = alone()
    resumed.load_state_dict(before.state_dict())
    with pytest.raises(SamplerError, match=r"range\(sampler.epoch, epochs\)"):
        resumed.set_epoch(0)
    assert (resumed.epoch, resumed.offset) == (2, 8)
    train(resumed, 1)
    resumed.set_epoch(0)  # now it is meant
    assert (resumed.epoch, resumed.offset) == (0, 0)


def test_last_and_steps_per_epoch() -> None:
    sampler = alone(10, 4)
    assert sampler.steps_per_epoch == 3
    seen = []
    for _ in sampler:
        seen.append(sampler.last)
        sampler.commit()
    assert seen == [False, False, True]
    assert not sampler.last
    assert sampler.steps_per_epoch == 3
    dropping = alone(10, 4, drop_last=True)
    assert dropping.steps_per_epoch == 2
    train(dropping, 1)
    assert dropping.last


def test_small_last_batch_has_stand_ins_of_weight_zero() -> None:
    ranks = [ElasticBatchSampler(5, 4, accumulate=2, rank=rank, world_size=2) for rank in range(2)]
    for sampler in ranks:
        train_micro = iter(sampler)
        next(train_micro), next(train_micro)
        sampler.commit()
        last = [next(train_micro), next(train_micro)]
        assert last == [[order(5, epoch=0)[4]]] * 2
    assert [[sampler.loss_scale(micro) for micro in range(2)] for sampler in ranks] == [[2.0, 0.0], [0.0, 0.0]]
    assert [[sampler.samples(micro) for micro in range(2)] for sampler in ranks] == [[1, 0], [0, 0]]


def test_loss_scale_is_independent_of_prefetching() -> None:
    sampler = ElasticBatchSampler(11, 8, rank=1, world_size=2)
    assert len(list(sampler)) == 2
    assert sampler.loss_scale() == 1.0
    sampler.commit()
    assert sampler.loss_scale() == 1 * 2 / 3
    sampler.commit()
    with pytest.raises(SamplerError, match=r"loss_scale\(\) at the end of epoch 0"):
        sampler.loss_scale()


@pytest.mark.parametrize("micro", [-1, 2])
def test_micro_batch_out_of_range_raises(micro: int) -> None:
    with pytest.raises(SamplerError, match="not one of this sampler's 2 micro-batches"):
        alone(accumulate=2).loss_scale(micro)


def test_commit_before_whole_step_is_fetched_raises() -> None:
    sampler = alone(accumulate=2)
    with pytest.raises(SamplerError, match="have not all been fetched"):
        sampler.commit()
    batches = iter(sampler)
    next(batches)
    with pytest.raises(SamplerError, match=r"after all of its micro-batches \(2\)"):
        sampler.commit()
    next(batches)
    sampler.commit()
    with pytest.raises(SamplerError, match="do not call both"):
        sampler.commit()
    assert sampler.offset == 4


@pytest.mark.parametrize("drop_last", [False, True])
def test_commit_after_end_of_epoch_raises(drop_last: bool) -> None:
    sampler = alone(22, drop_last=drop_last)
    train(sampler)
    assert sampler.offset == 22
    with pytest.raises(SamplerError, match=r"commit\(\) at the end of epoch 0"):
        sampler.commit()


def test_epoch_finished_and_restored_in_one_process() -> None:
    sampler = alone()
    train(sampler)
    sampler.load_state_dict(sampler.state_dict())
    assert list(sampler) == []


def test_double_commit_with_prefetching_raises() -> None:
    sampler = alone(400, 4)
    batches = iter(sampler)
    list(islice(batches, 8))

    def go_on() -> None:
        for _ in batches:
            sampler.commit()  # session.step() did this
            sampler.commit()  # and the script once more

    with pytest.raises(SamplerError, match="do not call both"):
        go_on()
    assert sampler.offset < 100


@pytest.mark.parametrize(
    "move",
    [
        lambda sampler: sampler.set_epoch(1),
        lambda sampler: sampler.load_state_dict(sampler.state_dict()),
        lambda sampler: train(sampler, 2),
    ],
    ids=["another epoch", "restored", "trained on from another iterator"],
)
def test_stale_iterator_raises(move: Callable[[ElasticBatchSampler], object]) -> None:
    sampler = alone()
    batches = iter(sampler)
    next(batches)
    move(sampler)
    with pytest.raises(SamplerError, match="start a new iteration"):
        next(batches)


def test_commit_of_batch_fetched_before_restore_raises() -> None:
    sampler = alone()
    list(sampler)
    sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(SamplerError, match="have not all been fetched"):
        sampler.commit()


def test_extra_iterator_does_not_move_cursor() -> None:
    sampler = alone()
    trained = []
    for batch in sampler:
        assert next(iter(sampler)) == batch
        trained += batch
        sampler.commit()
    assert trained == order(20, epoch=0)

    sampler.set_epoch(1)
    prefetched = list(sampler)
    next(iter(sampler))
    for _ in prefetched:
        sampler.commit()
    assert sampler.offset == 20


def test_state_survives_json_and_weights_only_load() -> None:
    sampler = alone(seed=2**64 - 1)
    train(sampler, 3)
    state = sampler.state_dict()
    assert {type(value) for value in state.values()} <= {int, bool, str}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for copy in (json.loads(json.dumps(state)), torch.load(file, weights_only=True)):
        resumed = ElasticBatchSampler(20, 4, accumulate=2, seed=2**64 - 1, rank=0, world_size=2)
        resumed.load_state_dict(copy)
        assert resumed.state_dict() == state


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"dataset_size": 21}, "dataset_size was 21 when this state was saved and is 20 now"),
        ({"seed": 1}, "seed was 1 "),
        ({"shuffle": False}, "shuffle was False "),
        ({"order": "feistel-0"}, "order was 'feistel-0' "),
        ({"global_batch": 2}, "global_batch was 2 .* at sample 8 of 20 of epoch 0.* may change only between epochs"),
        ({"drop_last": True}, "drop_last was True .* may change only between epochs"),
        ({"version": 2}, "version 2; this elasticd reads 1"),
        ({"offset": 9}, "is invalid"),
        ({"offset": 24}, "is invalid"),
        ({"epoch": -1}, "is invalid"),
        ({"offset": "8"}, "not a sampler's state: offset is '8'"),
        ({"epoch": True}, "not a sampler's state: epoch is True"),
    ],
)
def test_mismatched_state_is_refused_and_changes_nothing(change: dict[str, int | bool | str], complaint: str) -> None:
    before = alone()
    train(before, 2)
    sampler = alone()
    train(sampler, 1)
    mine = sampler.state_dict()
    with pytest.raises(SamplerError, match=complaint):
        sampler.load_state_dict(before.state_dict() | change)
    assert sampler.state_dict() == mine


def test_incomplete_state_is_refused() -> None:
    state = alone().state_dict()
    del state["offset"]
    with pytest.raises(SamplerError, match="not a sampler's state: offset is None"):
        alone().load_state_dict(state)
    with pytest.raises(SamplerError, match="version None"):
        alone().load_state_dict({})


@pytest.mark.parametrize("steps", [0, None], ids=["beginning", "end"])
def test_global_batch_may_change_between_epochs(steps: int | None) -> None:
    before = alone()
    train(before, steps)
    resumed = alone(global_batch=6, drop_last=True)
    resumed.load_state_dict(before.state_dict())
    assert len(train(resumed)) == (0 if steps is None else 3)
    resumed.set_epoch(1)
    assert len(train(resumed)) == 3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"dataset": 0}, "has 0 samples"),
        ({"dataset": True}, "give a dataset or its length"),
        ({"dataset": Stream()}, "Stream has no length"),
        ({"global_batch": 0}, "global_batch=0 must be at least 1"),
        ({"global_batch": 8.0}, "global_batch=8.0 must be an integer"),
        ({"accumulate": 0}, "accumulate=0 must be at least 1"),
        ({"accumulate": 9}, "accumulate=9 micro-batches cannot share a global batch of 8"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"seed": 2**64}, "does not fit into 64 bits"),
        ({"dataset": 7, "drop_last": True}, "leaves nothing to train on"),
        ({"world_size": None}, "give both rank and world_size"),
        ({"rank": 2}, "rank=2 must be below world_size=2"),
        ({"rank": -1}, "rank=-1 must be at least 0"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, object], complaint: str) -> None:
    usual: dict[str, object] = {"dataset": 20, "global_batch": 8, "rank": 0, "world_size": 2}
    with pytest.raises(SamplerError, match=complaint):
        ElasticBatchSampler(**(usual | arguments))  # type: ignore[arg-type]


def test_more_slices_than_samples_warns() -> None:
    with pytest.warns(UserWarning, match="4 ranks x 2 micro-batches share a global batch of 6"):
        ElasticBatchSampler(20, 6, accumulate=2, rank=0, world_size=4)


def test_sampler_before_process_group_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SamplerError, match=r"WORLD_SIZE=4 but there is no process group yet"):
        ElasticBatchSampler(20, 4)
    monkeypatch.delenv("WORLD_SIZE")
    assert len(ElasticBatchSampler(20, 4)) == 5


def test_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        assert train(alone(20, 20)) == [order(20, epoch=0)]


class SecondDivision:
    """Gives this rank every second batch of a batch sampler, as Accelerate's BatchSamplerShard does."""

    def __init__(self, sampler: ElasticBatchSampler) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler) // 2

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(self.sampler):
            if number % 2 == 1:
                yield batch


class Unchanged(SecondDivision):
    """A wrapper that takes no batch away."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.sampler


def shared(n: int, **options: int) -> ElasticBatchSampler:
    """Rank 0 of 2."""
    return ElasticBatchSampler(n, 8, rank=0, world_size=2, **options)


def epoch_of(
    sampler: ElasticBatchSampler, wrapper: type[SecondDivision] | None, workers: int, take: int = 1, limit: int = 10**6
) -> None:
    """Train on at most `limit` steps of `take` batches from a DataLoader."""
    batches = wrapper(sampler) if wrapper else sampler
    loader = DataLoader(range(100_000), batch_sampler=batches, num_workers=workers)  # type: ignore[arg-type, var-annotated]
    for number, _ in enumerate(loader, 1):
        if number % take == 0:
            sampler.commit()
        if number == limit * take:
            break


@pytest.mark.parametrize(
    ("n", "wrapper", "workers", "take", "at"),
    [
        (64, SecondDivision, 0, 1, 32),
        (64, SecondDivision, 2, 1, 32),  # all are prefetched
        (240, SecondDivision, 2, 1, 88),  # at the end of the sampler, with batches still in the DataLoader's queues
        (160, None, 0, 2, 80),  # accumulate= is not given
        (100_000, None, 0, 2, 248),
    ],
)
@pytest.mark.parametrize("again", [lambda sampler: sampler.set_epoch(1), iter], ids=["set_epoch", "iter"])
def test_more_than_one_step_fetched_for_each_commit_raises(
    n: int,
    wrapper: type[SecondDivision] | None,
    workers: int,
    take: int,
    at: int,
    again: Callable[[ElasticBatchSampler], object],
) -> None:
    sampler = shared(n)

    def train_on_epoch() -> None:
        epoch_of(sampler, wrapper, workers, take)
        again(sampler)

    with pytest.raises(SamplerError, match=rf"sample \d+ of {n}, but .*leave it out"):
        train_on_epoch()
    assert sampler.epoch == 0
    assert sampler.offset == at


@pytest.mark.parametrize(
    ("n", "wrapper", "workers", "accumulate", "limit"),
    [
        (64, None, 0, 1, 4),
        (64, None, 2, 1, 4),
        (64, None, 2, 1, 7),
        (400, None, 2, 1, 48),
        (400, None, 1, 1, 49),
        (64, Unchanged, 2, 1, 7),
        (400, Unchanged, 0, 1, 25),
        (400, None, 2, 2, 1000),
        (400, Unchanged, 2, 1, 1000),
    ],
)
def test_epoch_that_is_left_early_may_be_followed(
    n: int, wrapper: type[SecondDivision] | None, workers: int, accumulate: int, limit: int
) -> None:
    sampler = shared(n, accumulate=accumulate)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epoch_of(sampler, wrapper, workers, accumulate, limit)
    assert sampler.epoch == 1
    assert sampler.offset == min(8 * limit, n)


def test_thread_may_fetch_faster_than_the_loop_commits() -> None:
    """Two steps for each commit, until the end of the epoch."""
    sampler = alone(64)
    with ThreadPoolExecutor(1) as thread:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            batches = iter(sampler)
            for _ in range(sampler.steps_per_epoch):
                thread.submit(list, islice(batches, 2)).result()
                sampler.commit()
    assert (sampler.epoch, sampler.offset) == (1, 64)


@pytest.mark.parametrize(
    ("trained", "skip", "ahead", "workers", "found"),
    [
        (10, 10, 0, 0, 10),
        (10, 10, 0, 2, 10),
        (10, 10, 1, 0, 11),
        (20, 20, 0, 0, 12),  # all that is left
        (20, 20, 0, 2, 8),  # but what the workers have fetched
        (10, 0, 0, 0, 0),
        (10, 0, 0, 2, 0),
        (10, 0, 1, 2, 0),
        (2, 0, 1, 0, 0),
        (10, 5, 0, 0, 0),  # of another reason
        (28, 0, 0, 2, 0),
    ],
)
def test_batches_that_a_loop_skips_after_a_restore_are_counted(
    trained: int, skip: int, ahead: int, workers: int, found: int
) -> None:
    before, after = alone(128), alone(128)
    train(before, trained)
    after.load_state_dict(before.state_dict())
    batches = iter(DataLoader(range(128), batch_sampler=after, num_workers=workers))  # type: ignore[arg-type, var-annotated]
    list(islice(batches, skip))
    if list(islice(batches, 1 + ahead)):
        after.commit()
    after.set_epoch(1)
    assert usage_of(after).skipped_steps == found


class Repeated(Unchanged):
    """The batch sampler of an InfiniteDataLoader."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from self.sampler


class RepeatedInNextEpoch(Unchanged):
    """One that goes on by itself."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from self.sampler
            self.sampler.set_epoch(self.sampler.epoch + 1)


@pytest.mark.parametrize("wrapper", [Repeated, RepeatedInNextEpoch])
@pytest.mark.parametrize("workers", [0, 2])
def test_loader_without_an_end_may_not_fetch_ahead(workers: int, wrapper: type[Unchanged]) -> None:
    """With worker processes its next epoch would begin with the rest of this one."""
    sampler = shared(64)
    loader = DataLoader(range(64), batch_sampler=wrapper(sampler), num_workers=workers)  # type: ignore[arg-type, var-annotated]
    fetched = iter(loader)
    used: list[int] = []

    def train() -> None:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for _ in range(sampler.steps_per_epoch):
                used.extend(next(fetched).tolist())
                sampler.commit()

    if workers:
        with pytest.raises(SamplerError, match=r"epoch 0, sample 32 of 64, .* its batch sampler has no end"):
            train()
        assert len(used) == len({*used}) == 16
    else:
        train()
        assert len(used) == 64


@pytest.mark.parametrize("wrapper", [None, Unchanged])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_commit_of_unordered_batches_raises(workers: int, wrapper: type[SecondDivision] | None) -> None:
    sampler = shared(64)
    batches = wrapper(sampler) if wrapper else sampler
    loader = DataLoader(range(64), batch_sampler=batches, num_workers=workers, in_order=False)  # type: ignore[arg-type, var-annotated]
    fetched = iter(loader)
    next(fetched)
    if workers < 2:
        sampler.commit()
        return
    with pytest.raises(SamplerError, match="in_order at its default"):
        sampler.commit()


WEIGHTS = [1.0, 5.0, 0.5, 2.0] * 5


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler(WEIGHTS, 24)


@pytest.mark.parametrize(
    "order",
    [weighted, lambda: SubsetRandomSampler(range(3, 19)), lambda: list(range(19, -1, -1)), lambda: backwards],
    ids=["weighted", "subset", "sequence", "function"],
)
def test_given_order_is_the_same_for_any_number_of_ranks_and_after_a_resume(order: Callable[[], Any]) -> None:
    """Four ranks train on half of an epoch, and three on the rest: together on what one rank trains on."""
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))  # nothing is drawn from the script's own stream
    before = torch.get_rng_state()
    one = ElasticBatchSampler(20, 4, seed=7, order=order(), rank=0, world_size=1)
    expected = [train(one), one.set_epoch(1), train(one)]

    done: list[list[int]] = []
    states = None
    for world_size, steps in ((4, 2), (3, None)):
        ranks = [
            ElasticBatchSampler(20, 4, seed=7, order=order(), rank=r, world_size=world_size) for r in range(world_size)
        ]
        for each in ranks if states is not None else ():
            each.load_state_dict(states)
        for batches in islice(zip(*ranks, strict=True), steps):
            shares = [batch for batch, each in zip(batches, ranks, strict=True) if each.samples()]
            done.append([index for share in shares for index in share])
            for each in ranks:
                each.commit()
        states = json.loads(json.dumps(ranks[0].state_dict()))
        assert all(each.state_dict() == ranks[0].state_dict() for each in ranks)
    assert done == expected[0]
    assert expected[0] != expected[2] or order()[0] == 19  # a sequence is the same in every epoch
    assert torch.equal(torch.get_rng_state(), before)


def backwards(epoch: int) -> list[int]:
    return list(range(19 + epoch, epoch - 1, -1))


class EachRankItsOwn(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(20), 20))

    def __len__(self) -> int:
        return 20


def test_given_order_that_is_not_the_same_again_is_refused() -> None:
    before = ElasticBatchSampler(20, 4, order=EachRankItsOwn(), rank=0, world_size=1)
    with pytest.warns(UserWarning, match="another one each time that it is drawn"):
        train(before, 2)
    after = ElasticBatchSampler(20, 4, order=EachRankItsOwn(), rank=0, world_size=1)
    with pytest.raises(SamplerError, match="order was 'EachRankItsOwn/"):
        after.load_state_dict(before.state_dict())


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (DistributedSampler(range(20), 2, 0), "gives each rank a share"),
        (7, "give a sampler"),
        ([], "the dataset has 0 samples"),
        (BatchSampler(SequentialSampler(range(20)), 4, drop_last=False), "numbers of single samples"),
    ],
)
def test_given_order_that_cannot_work(order: Any, message: str) -> None:
    with pytest.raises(SamplerError, match=message):
        train(ElasticBatchSampler(20, 4, order=order, rank=0, world_size=1))


def test_given_order_of_another_length_in_a_later_epoch_is_refused() -> None:
    sampler = ElasticBatchSampler(20, 4, order=lambda epoch: range(20 - epoch), rank=0, world_size=1)
    train(sampler)
    sampler.set_epoch(1)
    with pytest.raises(SamplerError, match="epoch 1 has 19 samples, and the first one had 20"):
        next(iter(sampler))
