"""What would lose samples or a part of the state is refused in one sentence, at the first call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
import transformers
from accelerate import Accelerator, DistributedType
from accelerate.parallelism_config import ParallelismConfig
from torch.utils.data import DataLoader, IterableDataset

from elasticd.errors import UsageError
from elasticd.integrations.accelerate import ElasticDataLoader
from elasticd.integrations.lightning import ElasticdCallback as LightningCallback
from elasticd.integrations.transformers import ElasticdCallback
from examples import hf_trainer, lightning_fit
from tests.examples.launching import Run
from tests.frameworks.jobs import Job

pytestmark = pytest.mark.filterwarnings("default")


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(hf_trainer.Counting(8)[index] for index in range(8))


@pytest.fixture
def group() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def no_tqdm_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that outlives every bar."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


def trainer(folder: Path, dataset: Any = None, evaluation: Any = None, **options: Any) -> transformers.Trainer:
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 1}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    arguments = transformers.TrainingArguments(output_dir=str(folder), use_cpu=True, **{"max_steps": 2, **options})
    training = dataset or hf_trainer.Counting(8)
    return transformers.Trainer(model, arguments, train_dataset=training, eval_dataset=evaluation)


def test_trainer_that_takes_each_rank_for_the_only_one(run: Run, tmp_path: Path) -> None:
    job = Job(run, tmp_path, Path(__file__).parent / "scripts" / "hf_alone.py", "transformers")
    ran = job.start(2)
    assert ran.wait() == 1, ran.output
    assert "Trainer counts 1 ranks, and the session 2: on CPUs, give TrainingArguments(use_cpu=True)" in ran.output


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size changes the global batch"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance makes batches of its own"),
        ({"dataset": Stream()}, "IterableDatasetShard is a stream|Stream is a stream"),
    ],
)
def test_trainer(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    one = trainer(tmp_path, **options)

    def train() -> None:
        one.add_callback(ElasticdCallback(one))
        one.train()

    with pytest.raises(UsageError, match=message):
        train()


def with_loader(loader: Any, folder: Path, prepares: bool = False) -> transformers.Trainer:
    """Of a subclass that makes its own."""

    class Own(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(loader) if prepares else loader

    one = trainer(folder, per_device_train_batch_size=2)
    one.__class__ = Own
    return one


@pytest.mark.usefixtures("group")
def test_trainer_with_a_loader_of_its_own(tmp_path: Path) -> None:
    """Such as of GRPO, which takes the prompts of several steps at once."""
    dataset = hf_trainer.Counting(8)
    with pytest.raises(UsageError, match="Own takes batches of 4 samples, not of the 2 of per_device_train_batch_size"):
        ElasticdCallback(with_loader(DataLoader(dataset, batch_size=4), tmp_path))
    with pytest.raises(UsageError, match="Stream is a stream"):
        ElasticdCallback(with_loader(DataLoader(Stream()), tmp_path))
    ElasticdCallback(with_loader(DataLoader(dataset, batch_size=2), tmp_path)).session.close()


def test_what_is_no_trainer() -> None:
    with pytest.raises(UsageError, match=r"int is no transformers\.Trainer"):
        ElasticdCallback(1)


@pytest.mark.usefixtures("group", "no_tqdm_monitor")
def test_second_training_with_one_callback(tmp_path: Path) -> None:
    one = trainer(tmp_path, disable_tqdm=True)
    one.add_callback(elastic := ElasticdCallback(one))
    one.train()
    with pytest.raises(UsageError, match=r"keeps the state of one training. Call its withdraw\(\)"):
        one.train()
    elastic.withdraw()
    assert one.train().global_step == 2
    elastic.session.close()


@pytest.mark.usefixtures("group")
def test_accelerate_before_prepare(tmp_path: Path) -> None:
    loader = DataLoader(torch.arange(8.0), batch_size=2)
    elastic = ElasticDataLoader(Accelerator(cpu=True), loader, directory=tmp_path)
    with pytest.raises(UsageError, match=r"accelerator.prepare\(model, optimizer, ...\) first"):
        next(iter(elastic))


@pytest.mark.parametrize(
    ("kind", "parallel", "message"),
    [
        (DistributedType.DEEPSPEED, None, "DEEPSPEED keeps a part of the state on every rank"),
        (DistributedType.FSDP, None, "FSDP keeps a part of the state on every rank"),
        (DistributedType.MEGATRON_LM, None, "MEGATRON_LM keeps a part of the state on every rank"),
        (DistributedType.MULTI_GPU, ParallelismConfig(tp_size=2), "sequence parallelism share batches"),
    ],
)
def test_accelerate_that_divides_the_state(kind: Any, parallel: Any, message: str) -> None:
    accelerator = SimpleNamespace(distributed_type=kind, parallelism_config=parallel)
    with pytest.raises(UsageError, match=message):
        ElasticDataLoader(accelerator, DataLoader(torch.arange(8.0), batch_size=2))


@pytest.mark.parametrize(
    ("what", "message"), [("deepspeed", "DeepSpeed keeps a state of its own"), ("fsdp", "Trainer's FSDP keeps a part")]
)
def test_trainer_that_divides_the_state(tmp_path: Path, what: str, message: str) -> None:
    one = trainer(tmp_path)
    setattr(one, f"is_{what}_enabled", True)
    with pytest.raises(UsageError, match=message):
        ElasticdCallback(one)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("accumulates", "message"), [(None, "has no elastic loader"), (3, r"accumulate_grad_batches=3\) takes another")]
)
def test_lightning(tmp_path: Path, accumulates: int | None, message: str) -> None:
    elastic = LightningCallback(global_batch=4, directory=tmp_path)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    one = lightning.Trainer(max_epochs=1, accumulate_grad_batches=accumulates or 1, **quiet, **elastic.arguments())
    loader: Any = DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 8), torch.zeros(8, 8)), batch_size=4)
    with pytest.raises(UsageError, match=message):
        one.fit(lightning_fit.Regression(), elastic.loader(loader) if accumulates else loader)


@pytest.mark.usefixtures("group")
def test_second_fit_with_one_lightning_callback(tmp_path: Path) -> None:
    elastic = LightningCallback(global_batch=4, directory=tmp_path)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    loader: Any = DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 8), torch.zeros(8, 8)), batch_size=4)
    model = lightning_fit.Regression()
    one = lightning.Trainer(max_epochs=1, **quiet, **elastic.arguments())
    one.fit(model, elastic.loader(loader))
    one.validate(model, loader, verbose=False)
    one.fit_loop.max_epochs = 2
    with pytest.raises(UsageError, match=r"keeps the state of one training. Call its withdraw\(\)"):
        one.fit(model, elastic.loader(loader))
    elastic.withdraw()
    one.fit(model, loader)
    assert one.current_epoch == 2
    elastic.session.close()
