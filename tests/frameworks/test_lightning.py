"""What Lightning's modules, callbacks and data keep is as it was after a restart: of every type, also through hooks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader, TensorDataset

from elasticd.errors import CheckpointRefused, UsageError
from elasticd.integrations.lightning import ElasticdCallback
from examples import lightning_fit

pytestmark = pytest.mark.filterwarnings("default")
VALUES: dict[str, Any] = {
    "number keys": {3: 0.5, (1, 2): None},
    "set": {1, 2},
    "tuple": (1, ("a",)),
    "double": torch.tensor(0.1, dtype=torch.float64),
    "one": torch.tensor([7]),
    "matrix": torch.arange(6, dtype=torch.int16).reshape(2, 3),
}


class Keeper(lightning.Callback):
    """Has a state, and hooks."""

    def __init__(self, **values: Any) -> None:
        self.values, self.hooked = values, dict(values)

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["state_dict"].keys() == pl_module.state_dict().keys()
        checkpoint["keeper"] = {"step": trainer.global_step, "values": self.hooked}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["keeper"]["step"] == checkpoint["global_step"] == trainer.global_step
        assert checkpoint["optimizer_states"][0]["state"], "the optimizer has its state already"
        self.hooked = checkpoint["keeper"]["values"]


class Hooked(lightning_fit.Regression):
    table: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["table"] = self.table
        checkpoint["seen"] = checkpoint["keeper"]["step"]  # after the callbacks, as in Lightning

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.table = checkpoint["table"]


class Data(lightning.LightningDataModule):
    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader, self.version = loader, 0

    def train_dataloader(self) -> Any:
        return self.loader

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.version = state_dict["version"]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def fit(folder: Path, epochs: int, module: Any, callbacks: list[Any], version: int = 0, **options: Any) -> Data:
    elastic = ElasticdCallback(global_batch=4, directory=folder, every=1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=epochs, **quiet, **options, **elastic.arguments(callbacks=callbacks))
    torch.manual_seed(0)
    loader: Any = DataLoader(TensorDataset(torch.randn(8, 8), torch.randn(8, 8)), batch_size=4)
    data = Data(elastic.loader(loader))
    data.version = version
    try:
        trainer.fit(module, datamodule=data)
    finally:
        elastic.session.close()
    return data


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


def test_values_of_hooks_and_callbacks_come_back_as_they_were(tmp_path: Path) -> None:
    module = Hooked()
    module.table = {5: (torch.tensor(2.5), "x")}
    fit(tmp_path, 1, module, [Keeper(**VALUES)], version=3)
    again, keeper = Hooked(), Keeper()
    data = fit(tmp_path, 2, again, [keeper])
    assert same(keeper.values, VALUES)
    assert same(keeper.hooked, VALUES)
    assert again.table[5][1] == "x" and torch.equal(again.table[5][0], torch.tensor(2.5))
    assert data.version == 3


class Ended(Exception):
    """As a kill."""


class Observer(lightning.Callback):
    """Notes what validations have changed, before each step."""

    def __init__(self, early: EarlyStopping, ends_at: int) -> None:
        self._early, self._ends_at = early, ends_at
        self.seen: dict[int, float] = {}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.seen[trainer.global_step] = float(self._early.best_score)
        if trainer.global_step == self._ends_at:
            raise Ended


def test_result_of_a_validation_after_the_save_is_saved_at_the_next_step(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(32, 8), torch.randn(32, 8))

    def train(ends_at: int) -> dict[int, float]:
        elastic = ElasticdCallback(global_batch=4, directory=tmp_path, every=4)
        early = EarlyStopping("error", patience=50)
        observer = Observer(early, ends_at)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
        how = {"max_epochs": 2, "val_check_interval": 4, "num_sanity_val_steps": 0}
        trainer = lightning.Trainer(**how, **quiet, **elastic.arguments(callbacks=[early, observer]))
        loaders: list[Any] = [elastic.loader(DataLoader(data, batch_size=4)), DataLoader(data, batch_size=4)]
        with pytest.raises(Ended):
            trainer.fit(lightning_fit.Regression(), *loaders)
        elastic.session.close()
        return observer.seen

    first, second = train(7), train(6)
    assert second == {step: first[step] for step in (5, 6)}
    assert first[4] < first[3]


class Standing(lightning_fit.Regression):
    """Knows whether its forward pass is within an optimizer's step, where no rank can save at a fault."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind, self.within = kind, set()

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.01)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        (elastic,) = [each for each in self.trainer.callbacks if isinstance(each, ElasticdCallback)]
        self.within.add(elastic.session.has_optimized)
        return super().training_step(batch)


@pytest.mark.parametrize(("kind", "within"), [(torch.optim.Adam, {False}), (torch.optim.LBFGS, {True})])
def test_forward_pass_is_before_the_optimizers_step(tmp_path: Path, kind: Any, within: set[bool]) -> None:
    """Unless the optimizer makes several of them."""
    module = Standing(kind)
    fit(tmp_path, 2, module, [])
    assert module.within == within


class Watcher(lightning.Callback):
    def __init__(self) -> None:
        self.handlers: set[Any] = set()

    def on_train_batch_end(self, *_: Any) -> None:
        self.handlers.add(signal.getsignal(signal.SIGTERM))


def test_handler_of_the_script_stays(tmp_path: Path) -> None:
    own, watcher = (lambda *_: None), Watcher()
    before = signal.signal(signal.SIGTERM, own)
    try:
        fit(tmp_path, 1, lightning_fit.Regression(), [watcher])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert watcher.handlers == {own}


def test_fit_in_another_thread(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fit, tmp_path, 1, lightning_fit.Regression(), []).result()


def test_averaged_weights_continue(tmp_path: Path) -> None:
    """Lightning's own callback swaps weights in its hooks."""
    finals = []
    for name, epochs in (("whole", [4]), ("resumed", [2, 4])):
        for count in epochs:
            torch.manual_seed(1)
            module = lightning_fit.Regression()
            average = EMAWeightAveraging(decay=0.5)
            fit(tmp_path / name, count, module, [average])
        finals.append(module.state_dict())
    assert same(*finals)


def test_value_that_would_not_come_back_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointRefused, match=r"trainer\.callbacks\..*Keeper.*\.where is pathlib\.\S+Path"):
        fit(tmp_path, 1, lightning_fit.Regression(), [Keeper(where=tmp_path)])


@pytest.mark.parametrize("kind", [DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy])
def test_strategy_that_keeps_a_part_on_every_rank(kind: type[Any]) -> None:
    elastic = ElasticdCallback(global_batch=4)
    trainer = SimpleNamespace(strategy=object.__new__(kind))  # each needs a GPU, or a package
    with pytest.raises(UsageError, match=f"{kind.__name__} keeps a part of the state on every rank; leave it out"):
        elastic.setup(trainer, None, "fit")
    elastic.session.close()


def test_refusal_is_before_the_strategy_begins(tmp_path: Path) -> None:
    class DeepSpeedStrategy(DDPStrategy):
        def setup(self, trainer: Any) -> None:
            raise AssertionError("too late")

    with pytest.raises(UsageError, match="DeepSpeedStrategy keeps a part of the state on every rank"):
        fit(tmp_path, 1, lightning_fit.Regression(), [], strategy=DeepSpeedStrategy())
