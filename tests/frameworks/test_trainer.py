"""Trainer's own choices that the callback keeps, and its log where another node goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import Dataset

from elasticd.integrations.transformers import ElasticdCallback
from tests.frameworks.test_refusals import trainer
from tests.library.test_object_store import disconnect, servers
from tests.s3_server import BUCKET

__all__ = ["servers"]

pytestmark = pytest.mark.filterwarnings("default")


class Texts(Dataset[dict[str, Any]]):
    """Of 1 to 16 words."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise IndexError(index)  # Trainer iterates over it for the lengths
        size = index * 7 % 16 + 1
        return {"input_ids": [index] * size, "labels": [index] * size}


def pad(texts: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(each["input_ids"]) for each in texts)
    return {
        "input_ids": torch.tensor([each["input_ids"] + [0] * (longest - len(each["input_ids"])) for each in texts]),
        "labels": torch.tensor([each["labels"] + [-100] * (longest - len(each["labels"])) for each in texts]),
    }


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a thread that outlives every bar
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def fit(folder: Path, directory: Any, collate: Any = pad, **options: Any) -> transformers.Trainer:
    small = {"per_device_train_batch_size": 8, "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    one = trainer(folder, Texts(), **{**small, **options})
    one.data_collator = collate
    elastic = ElasticdCallback(one, directory=directory, every=1)
    one.add_callback(elastic)
    one.train()
    elastic.session.close()
    return one


def test_texts_of_like_length_stay_together(tmp_path: Path) -> None:
    """Trainer sorts every two batches of so small a dataset, and moves one text to the beginning."""
    seen: list[int] = []

    def collate(texts: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        seen.extend(each["input_ids"][0] for each in texts)
        return pad(texts)

    def are_sorted() -> list[bool]:
        lengths = [len(Texts()[index]["input_ids"]) for index in seen]
        two = [lengths[at + 1 : at + 16] for at in range(0, 64, 16)]
        return [each == sorted(each, reverse=True) for each in two]

    fit(tmp_path, tmp_path / "own", collate, max_steps=8, train_sampling_strategy="group_by_length")
    assert sorted(seen) == list(range(64)), "not each sample once"
    assert all(are_sorted())
    seen.clear()
    fit(tmp_path, tmp_path / "other", collate, max_steps=8)
    assert not any(are_sorted()), "any order would have passed"


def test_labels_weigh_alike_on_all_ranks(tmp_path: Path) -> None:
    one = trainer(tmp_path, Texts(), average_tokens_across_devices=False)
    elastic = ElasticdCallback(one, directory=tmp_path / "own")
    assert one.args.average_tokens_across_devices
    elastic.session.close()


class Ended(Exception):
    """As a kill after an evaluation, and before the next step ends."""


class Observer(transformers.TrainerCallback):
    """Notes what evaluations have changed, before each step."""

    def __init__(self, stopping: transformers.EarlyStoppingCallback, ends_at: int) -> None:
        self._stopping, self._ends_at = stopping, ends_at
        self.seen: dict[int, tuple[Any, ...]] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        best = state.best_metric, state.best_global_step, state.best_model_checkpoint
        self.seen[state.global_step] = (*best, self._stopping.early_stopping_patience_counter)
        if state.global_step == self._ends_at:
            raise Ended


@pytest.mark.parametrize("often", ["steps", "epoch"])
def test_evaluation_after_the_last_save_counts(tmp_path: Path, often: str) -> None:
    """Every step is saved before its evaluation; an epoch has four."""
    options = {"eval_strategy": often, "eval_steps": 4, "save_strategy": often, "save_steps": 4, "max_steps": 16}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 1e-2}

    def train(ends_at: int) -> dict[int, tuple[Any, ...]]:
        one = trainer(tmp_path, Texts(), Texts(), per_device_train_batch_size=16, disable_tqdm=True, **options, **best)
        one.data_collator = pad
        # No improvement is enough for it.
        stopping = transformers.EarlyStoppingCallback(9, early_stopping_threshold=100.0)
        elastic = ElasticdCallback(one, directory=tmp_path / "own", every=1)
        observer = Observer(stopping, ends_at)
        for each in (stopping, observer, elastic):
            one.add_callback(each)
        with pytest.raises(Ended):
            one.train()
        elastic.session.close()
        return observer.seen

    first, second = train(8), train(9)
    assert min(second) == 8, "resumed from another step"
    assert second[8] == first[8]
    assert first[8][1:] == (8, str(tmp_path / "checkpoint-8"), 1)


@pytest.mark.usefixtures("servers")
def test_log_is_in_the_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node continues it, without a step twice."""
    for node, steps in (("a", 3), ("b", 5)):
        monkeypatch.setenv("ELASTICD_OBJECT_CACHE", str(tmp_path / node))
        found = fit(tmp_path, f"s3://{BUCKET}/run", max_steps=steps).state.log_history
    assert [each["step"] for each in found if "loss" in each] == [1, 2, 3, 4, 5]
    disconnect()
