"""Scripts without a line of elasticd under `--integrate auto`: as exact as with the callback, or left alone."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import lightning.pytorch
import pytest
import torch
import transformers.trainer
from torch.utils.data import DataLoader, TensorDataset

from elasticd.integrations import automatic
from elasticd.integrations.transformers import ElasticdCallback
from examples import hf_trainer, lightning_fit
from tests.examples.launching import REPOSITORY, Ran, Run
from tests.frameworks.jobs import Job
from tests.frameworks.test_loops import FRAMEWORKS, TRANSFORMERS, Framework
from tests.frameworks.test_refusals import trainer, with_loader

AUTO = ("--integrate", "auto")
LIGHTNING = FRAMEWORKS[2]
COLD = 'import os\nos.environ["TORCH_SHOW_CPP_STACKTRACES"] = "0"\n'
"""A variable that torch reads while it is imported."""


def plain(framework: Framework, folder: Path, before: str = "") -> Path:
    """The example without its lines of elasticd."""
    text = (REPOSITORY / "examples" / framework.script).read_text()
    text = re.sub(r"    if not elastic\.session\.should_stop:\n    ( +.*\n)", r"\1", text)
    text = text.replace("**elastic.arguments(),", "devices=2,")
    text = re.sub(r"elastic\.loader\((DataLoader\(.*?\))\)", r"\1", text)
    text = re.sub(r"^.*(from elasticd|elastic = |add_callback\(elastic).*\n", "", text, flags=re.MULTILINE)
    docstring, rest = text.split('"""\n\nfrom __future__ import annotations\n', 1)
    assert "lastic" not in rest
    path = folder / framework.script
    path.write_text(f'{docstring}"""\n\nfrom __future__ import annotations\n{before}{rest}')
    return path


def killed(job: Job) -> Ran:
    ran = job.start(2, options=AUTO)
    ran.until(lambda: job.saved(50))
    job.kill(1)
    assert ran.wait() == 0, ran.output
    assert len(job.events("resumed")) == 1, "the fault did not fire, or no state was attached"
    return ran


@pytest.mark.parametrize(
    ("framework", "before"), [(TRANSFORMERS, ""), (TRANSFORMERS, COLD), (LIGHTNING, "")], ids=["hf", "hf-cold", "pl"]
)
def test_killed_rank_costs_no_sample(framework: Framework, before: str, run: Run, tmp_path: Path) -> None:
    undisturbed = framework.job(run, tmp_path / "three lines")
    undisturbed.finish(2)
    expected = framework.weights(undisturbed)
    (tmp_path / "none").mkdir()
    job = Job(run, tmp_path / "none", plain(framework, tmp_path, before), framework.package)
    killed(job)
    assert [each["warm"] for each in job.events("group_started")] == [not before] * 2
    found = framework.weights(job)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize("framework", [TRANSFORMERS, LIGHTNING], ids=["hf", "pl"])
def test_stopped_script_does_not_save_its_result(framework: Framework, run: Run, tmp_path: Path) -> None:
    job = Job(run, tmp_path, plain(framework, tmp_path), framework.package)
    ran = job.start(2, options=AUTO)
    ran.until(lambda: job.saved(50))
    ran.process.send_signal(signal.SIGTERM)
    assert ran.wait() == 128 + signal.SIGTERM, ran.output
    assert "the script ends here, before it takes the model for finished" in ran.output
    assert not (job.folder / "output" / framework.final).exists()


def test_script_with_the_callback_gets_no_second_one(run: Run, tmp_path: Path) -> None:
    undisturbed = TRANSFORMERS.job(run, tmp_path / "alone")
    undisturbed.finish(2)
    job = TRANSFORMERS.job(run, tmp_path / "auto")
    killed(job)
    assert all(torch.equal(TRANSFORMERS.weights(job)[n], v) for n, v in TRANSFORMERS.weights(undisturbed).items())


def test_accelerate_is_left_alone(run: Run, tmp_path: Path) -> None:
    text = (REPOSITORY / "examples" / "accelerate_loop.py").read_text()
    text = re.sub(r"^.*(from elasticd|loader = Elastic).*\n", "", text, flags=re.MULTILINE)
    text = text.replace("loader.epochs(", "range(").replace("if not loader.session.should_stop:", "if True:")
    (tmp_path / "loop.py").write_text(text)
    ran = Job(run, tmp_path, tmp_path / "loop.py", "accelerate").start(2, "--epochs", 1, options=AUTO)
    assert ran.wait() == 0, ran.output
    assert ran.output.count("Accelerate is left alone: its loop is the script's") == 1


def test_script_without_a_framework_pays_nothing(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "none.py"
    script.write_text("import sys, torch\nprint([name for name in sys.modules if 'elasticd' in name])\n")
    options = ("--nproc-per-node", 1, "--checkpoint-dir", tmp_path / "c", *AUTO)
    ran = run("-m", "elasticd_agent", "run", *options, script)
    assert ran.wait() == 0, ran.output
    assert "[]" in ran.output


@pytest.fixture
def method() -> Iterator[None]:
    before = transformers.trainer.Trainer.train
    automatic.say_once.cache_clear()
    yield
    transformers.trainer.Trainer.train = before
    for elastic in automatic.ended_trainings:
        elastic.session.close()
    automatic.ended_trainings.clear()


@pytest.mark.usefixtures("method")
def test_unknown_version_is_left_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = transformers.trainer.Trainer.train
    monkeypatch.setattr(automatic, "version", lambda _: "6.0.1")
    automatic.integrate(transformers.trainer)
    assert transformers.trainer.Trainer.train is before
    assert "transformers 6.0.1 is left alone: only version 5 is tested" in capsys.readouterr().err


@pytest.mark.usefixtures("method")
@pytest.mark.filterwarnings("default")
def test_second_training_does_not_continue_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for each part of a cross-validation."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    monkeypatch.setenv("ELASTICD_CHECKPOINT_DIR", str(tmp_path / "own"))
    automatic.integrate(transformers.trainer)
    steps: list[int] = []
    for part in range(2):
        one = trainer(tmp_path / f"{part}", save_strategy="no")
        one.compute_loss = lambda *given, known=one.compute_loss, **options: steps.append(1) or known(*given, **options)
        one.train()
        if not part:
            one.train()
    assert len(steps) == 6
    assert "Trainer is left alone: this process has trained already" in capsys.readouterr().err


@pytest.mark.usefixtures("method")
@pytest.mark.filterwarnings("default")
def test_second_fit_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same module, by the same trainer and by another one."""
    monkeypatch.setattr(lightning.Trainer, "fit", lightning.Trainer.fit)
    monkeypatch.setenv("ELASTICD_CHECKPOINT_DIR", str(tmp_path / "own"))
    automatic.integrate(lightning.pytorch)
    module, x = lightning_fit.Regression(), torch.randn(8, 8)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    for _ in range(2):
        trainer = lightning.Trainer(max_epochs=1, **quiet)
        for epochs in (1, 2):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(module, DataLoader(TensorDataset(x, x), batch_size=4))
        assert trainer.global_step == 4
    assert len(automatic.ended_trainings) == 1


@pytest.mark.usefixtures("method")
@pytest.mark.filterwarnings("default")
def test_loader_that_the_callback_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer trains as without elasticd."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    monkeypatch.setenv("ELASTICD_CHECKPOINT_DIR", str(tmp_path / "own"))
    automatic.integrate(transformers.trainer)
    one = with_loader(DataLoader(hf_trainer.Counting(8), batch_size=4), tmp_path)
    assert one.train().global_step == 2
    assert "Trainer is left alone: ElasticdCallback: Own takes batches of 4 samples" in capsys.readouterr().err


@pytest.mark.usefixtures("method")
@pytest.mark.filterwarnings("default")
def test_subclass_that_prepares_its_loader_is_no_loop_of_accelerate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Trainer's own documentation shows."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    monkeypatch.setenv("ELASTICD_CHECKPOINT_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(accelerate.Accelerator, "prepare", accelerate.Accelerator.prepare)
    automatic.integrate(accelerate)
    automatic.integrate(transformers.trainer)
    one = with_loader(DataLoader(hf_trainer.Counting(8), batch_size=2), tmp_path, prepares=True)
    one.train()
    assert len(automatic.ended_trainings) == 1
    assert "left alone" not in capsys.readouterr().err


@pytest.mark.usefixtures("method")
@pytest.mark.filterwarnings("default")
def test_subclass_begins_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose own `train` does something and then calls Trainer's."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    monkeypatch.setenv("ELASTICD_CHECKPOINT_DIR", str(tmp_path / "own"))
    automatic.integrate(transformers.trainer)
    begun: list[int] = []

    class Own(transformers.Trainer):
        def train(self, *args: Any, **options: Any) -> Any:
            begun.append(1)
            return super().train(*args, **options)

    one = trainer(tmp_path)
    one.__class__ = Own
    one.train()
    assert begun == [1]
    (elastic,) = [each for each in one.callback_handler.callbacks if isinstance(each, ElasticdCallback)]
    assert elastic.session.steps == one.state.global_step == 2
    elastic.session.close()
