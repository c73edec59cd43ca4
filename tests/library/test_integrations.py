"""What the integrations share, without a framework: the loader in place of a script's own, and loaders with a state."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import metadata
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
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

import elasticd
from elasticd.errors import SamplerError, UsageError
from elasticd.integrations import accelerate, lightning, transformers
from elasticd.integrations.loader import ElasticLoader
from elasticd.integrations.torchdata import RankLoader
from elasticd.sampler import ElasticBatchSampler, check_attached_loader
from elasticd.shuffle import Permutation


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(22))


class Sharded:
    """As Accelerate wraps the batches of a loader that it prepares."""

    def __init__(self, batches: BatchSampler) -> None:
        self.batch_sampler = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batch_sampler)


class OwnBatches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        yield [0]


def shuffled(**options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), batch_size=4, shuffle=True, **options)


def prepared() -> DataLoader[int]:
    return DataLoader(Numbers(), batch_sampler=Sharded(BatchSampler(RandomSampler(Numbers()), 4, drop_last=True)))


SHARE = DistributedSampler(Numbers(), 2, 1)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (shuffled, lambda: Permutation(22, 5, 0).at(list(range(22)))),
        (lambda: shuffled(drop_last=True), lambda: Permutation(22, 5, 0).at(list(range(20)))),
        (prepared, lambda: Permutation(22, 5, 0).at(list(range(20)))),
        (lambda: DataLoader(Numbers(), sampler=SHARE), lambda: Permutation(22, 5, 0).at(list(range(22)))),
        (lambda: DataLoader(Numbers(), batch_size=4), lambda: list(range(22))),
        (lambda: DataLoader(Numbers(), sampler=[3, 1, 3]), lambda: [3, 1, 3]),
    ],
    ids=["shuffled", "without the last", "prepared by Accelerate", "distributed", "in order", "an order of its own"],
)
def test_loader_takes_over_order_and_rest(
    make: Callable[[], DataLoader[int]], expected: Callable[[], list[int]]
) -> None:
    loader = ElasticLoader(make(), 4, seed=5)
    found = []
    for batch in loader:
        found += batch.tolist()
        loader.sampler.commit()
    assert found == expected()


def test_loader_continues_where_it_was_and_is_as_long_as_a_whole_epoch() -> None:
    loader = ElasticLoader(shuffled(), 4, per_rank_batch=2)
    assert len(loader) == 12
    assert loader.sampler.accumulate == 2
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    loader.sampler.commit()
    loader.sampler.commit()
    after = ElasticLoader(shuffled(), 4, per_rank_batch=1)
    after.load_state_dict(loader.state_dict())
    assert len(after) == 24
    assert sum(1 for _ in after.epochs(3)) == 3
    loader.load_state_dict(loader.state_dict())
    assert len(list(loader)) == 8


def test_loader_keeps_a_weighted_order() -> None:
    weighted = DataLoader(Numbers(), sampler=WeightedRandomSampler([0.0, 1.0, *[0.0] * 20], 10))
    assert [batch.tolist() for batch in ElasticLoader(weighted, 5)] == [[1] * 5] * 2


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: DataLoader(Stream(), batch_size=4), "Stream is a stream"),
        (lambda: DataLoader(Numbers(), batch_sampler=OwnBatches()), "OwnBatches makes batches of its own"),
        (lambda: DataLoader(Numbers(), batch_size=None), "NoneType makes batches of its own"),
    ],
)
def test_loader_that_cannot_be_taken_over(loader: Callable[[], DataLoader[int]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ElasticLoader(loader(), 4)


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("transformers", lambda: transformers.ElasticdCallback(None)),
        ("accelerate", lambda: accelerate.ElasticDataLoader(None, shuffled())),
        ("accelerate", lambda: accelerate.main([])),
        ("lightning", lambda: lightning.ElasticdCallback(4)),
    ],
)
def test_missing_package_is_one_sentence_at_the_first_call(
    package: str, use: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"{package} needs {package}\S* \(.*\): pip install 'elasticd\[{package}\]'$"):
        use()
    assert package in metadata("elasticd").get_all("Provides-Extra")


def test_rank_loader_needs_a_state() -> None:
    with pytest.raises(UsageError, match=r"RankLoader\(DataLoader\): it has no state_dict and no load_state_dict"):
        RankLoader(shuffled())


class StatefulLoader:
    """As torchdata's, on one process."""

    batch_size = 2

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 6:
            self.at += 2
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("taken", range(8))
def test_rank_loader_continues_at_every_place(taken: int) -> None:
    expected = [(epoch, batch) for epoch in range(2) for batch in (2, 4, 6)]
    before, found = RankLoader(StatefulLoader()), []
    state = before.state_dict()
    for epoch in before.epochs(2):
        for batch in before:
            if len(found) < taken:
                found.append((epoch, batch))
                state = before.state_dict()
    after = RankLoader(StatefulLoader())
    after.load_state_dict(state)
    found += [(epoch, batch) for epoch in after.epochs(2) for batch in after]
    assert found == expected


def test_rank_loader_on_another_number_of_ranks_says_that_its_epoch_begins_again() -> None:
    states = [{"epoch": 3, "samples": 4, "loader": {}}] * 2
    loader = RankLoader(StatefulLoader())
    assert loader.load_state_dicts(states, 0, 3) == (
        "epoch 3 begins again: its stream was read by 2 ranks, and now there are 3"
    )
    assert (loader.epoch, next(iter(loader))) == (3, 2)
    assert loader.load_state_dicts([{"epoch": 1, "samples": 0, "loader": {}}], 0, 3) == ""
    assert loader.state_dict()["samples"] == 0, "a process that stays has counted those before"


def test_rank_loader_with_a_sampler_for_other_ranks() -> None:
    """In a process that stays, the next round has another number of ranks than its sampler."""

    class Sharing(StatefulLoader):
        sampler = DistributedSampler(range(12), num_replicas=1, rank=0)

    loader = RankLoader(Sharing())
    with pytest.raises(UsageError, match="DistributedSampler was made for 1 ranks, and now there are 2"):
        loader.load_state_dicts([{"epoch": 0, "samples": 0, "loader": {}}], 0, 2)


@pytest.mark.parametrize("wrapper", [lambda loader: loader, RankLoader])
def test_state_of_a_loader_that_fetches_ahead_of_its_sampler_is_refused(wrapper: Callable[[Any], Any]) -> None:
    """As of torchdata's StatefulDataLoader."""

    class Loader(DataLoader[int]):
        state_dict = load_state_dict = dict

    def over(**how: Any) -> Any:
        return wrapper(Loader(Numbers(), **how))

    sampler = ElasticBatchSampler(Numbers(), 2)
    for loader in (over(batch_sampler=sampler), over(num_workers=1), ElasticLoader(shuffled(num_workers=1), 4)):
        check_attached_loader("loader", loader)
    with pytest.raises(SamplerError, match=r"the place of this (Rank)?Loader is its ElasticBatchSampler"):
        check_attached_loader("loader", over(batch_sampler=sampler, num_workers=1))


@pytest.mark.parametrize("per_epoch", [True, False])
def test_tail_of_a_rank_loaders_epoch_is_no_late_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, per_epoch: bool
) -> None:
    """A run that resumes from the epoch's last step repeats it, as with an attached sampler."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, loader = torch.nn.ParameterList([weight]), RankLoader(StatefulLoader())
    with contextlib.closing(elasticd.init()) as session:
        session.attach(model=model, optimizer=optimizer, scheduler=scheduler, per_rank={"loader": loader})
        session.restore(tmp_path)
        session.checkpoint(2, tmp_path)
        for _ in loader.epochs(3):
            for _ in loader:
                weight.sum().backward()
                optimizer.step()
                session.step()
                if not per_epoch:
                    scheduler.step()
            if per_epoch:
                scheduler.step()
    assert ("scheduler changed after session.step()" in caplog.text) != per_epoch


def test_iteration_that_was_left_early_has_no_part_in_the_place_of_the_next() -> None:
    """As of the longer one of two loaders that are used together."""

    class Loader(list[int]):
        state_dict = load_state_dict = dict

    loader = RankLoader(Loader(range(5)))
    for taken in (3, 2):
        list(itertools.islice(loader, taken))
    assert loader.state_dict()["samples"] == 2
    after = RankLoader(Loader(range(5)))
    after.load_state_dict(loader.state_dict())
    list(itertools.islice(after, 1))
    assert after.state_dict()["samples"] == 3, "the first one continues"


def test_callers_random_stream_is_left_alone() -> None:
    before = torch.get_rng_state()
    list(ElasticLoader(shuffled(), 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_epoch_that_is_left_early_has_ended() -> None:
    class Loader(list[int]):
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    loader = RankLoader(Loader(range(5)))
    seen = [
        (epoch, batch) for epoch in loader.epochs(2) for batch in itertools.takewhile(lambda each: each < 2, loader)
    ]
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert loader.state_dict() == {"epoch": 2, "samples": 0, "loader": {}}
