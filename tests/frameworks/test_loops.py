"""Each framework's own loop: killed, stopped and on another number of ranks, it ends where an undisturbed run ends."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.examples.launching import REPOSITORY, Run, json_lines
from tests.frameworks.jobs import Job

HERE = Path(__file__).parent
STEPS = 3 * 63
"""3 epochs of 1000 samples, 16 a step."""


@dataclass(frozen=True)
class Framework:
    script: str
    package: str
    final: str
    """What a finished run leaves, in its output."""
    same_numbers: tuple[str, ...] = ()
    """Arguments without which two numbers of ranks draw different random numbers."""

    def job(self, run: Run, folder: Path) -> Job:
        folder.mkdir()
        return Job(run, folder, REPOSITORY / "examples" / self.script, self.package)

    def weights(self, job: Job) -> dict[str, torch.Tensor]:
        path = job.folder / "output" / self.final
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["state_dict"]
        return loaded


TRANSFORMERS = Framework("hf_trainer.py", "transformers", "final/model.safetensors", ("--dropout", "0"))
FRAMEWORKS = [
    TRANSFORMERS,
    Framework("accelerate_loop.py", "accelerate", "model.safetensors"),
    Framework("lightning_fit.py", "lightning", "final.ckpt"),
]
every_framework = pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda each: each.package)


@every_framework
def test_example_has_five_lines_of_elasticd(framework: Framework) -> None:
    code = (REPOSITORY / "examples" / framework.script).read_text().split('"""')[2:]
    lines = [line for line in '"""'.join(code).splitlines() if any(word in line for word in WORDS)]
    assert 0 < len(lines) <= 5, lines


WORDS = ("elastic", "Elastic", ".epochs(", "session")


@every_framework
def test_killed_ranks_cost_no_sample(framework: Framework, run: Run, tmp_path: Path) -> None:
    undisturbed = framework.job(run, tmp_path / "undisturbed")
    undisturbed.finish(2)
    expected = framework.weights(undisturbed)
    job = framework.job(run, tmp_path / "killed")
    ran = job.start(2)
    for step, rank in ((60, 1), (120, 0)):
        ran.until(lambda step=step: job.saved(step))
        job.kill(rank)
    assert ran.wait() == 0, ran.output
    assert len(job.events("group_started")) == 3, "a fault did not fire"
    assert [each["step"] >= step for each, step in zip(job.events("resumed"), (60, 120), strict=True)] == [True] * 2
    found = framework.weights(job)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == [], ran.output


def test_fault_at_the_end_of_an_epoch_and_one_in_the_next_epoch(run: Run, tmp_path: Path) -> None:
    """Lightning counts the epoch that begins after the first one, or the second resume would end it too early."""
    lightning = FRAMEWORKS[2]
    undisturbed = lightning.job(run, tmp_path / "undisturbed")
    undisturbed.finish(2)
    job = lightning.job(run, tmp_path / "killed")
    job.script = HERE / "scripts" / "lightning_epoch_end.py"
    ran = job.finish(2)
    assert [each["step"] for each in job.events("resumed")] == [63, 100], "a fault did not fire"
    found = lightning.weights(job)
    assert [k for k, v in lightning.weights(undisturbed).items() if not torch.equal(found[k], v)] == [], ran.output


@every_framework
def test_sigterm_saves_and_stops_all_ranks(framework: Framework, run: Run, tmp_path: Path) -> None:
    """The next run goes on with another number of ranks."""
    undisturbed = framework.job(run, tmp_path / "undisturbed")
    undisturbed.finish(2, *framework.same_numbers)
    expected = framework.weights(undisturbed)
    job = framework.job(run, tmp_path / "stopped")
    ran = job.start(2, *framework.same_numbers)
    ran.until(lambda: job.saved(60))
    ran.process.send_signal(signal.SIGTERM)
    assert ran.wait() == 128 + signal.SIGTERM, ran.output
    assert not (job.folder / "output" / framework.final).exists(), "it went on after the stop"
    step = job.checkpoint()["elasticd"]["step"]
    assert 60 <= step < STEPS
    ran = job.finish(3, *framework.same_numbers)
    assert [each["step"] for each in job.events("resumed")] == [step]
    found = framework.weights(job)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=f"{name}\n{ran.output}")


@every_framework
def test_gradient_is_that_of_the_global_batch_however_it_divides(
    framework: Framework, run: Run, tmp_path: Path
) -> None:
    """The last step has one sample, so that two of three ranks have none of their own."""
    found = []
    for workers in (1, 3):
        job = framework.job(run, tmp_path / f"{workers}")
        ran = job.finish(workers, "--samples", 161, "--epochs", 1, *framework.same_numbers)
        found.append(framework.weights(job))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-5, msg=f"{name}\n{ran.output}")


@every_framework
def test_evaluation_and_save_of_rank_0_are_no_hang(
    framework: Framework, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = framework.job(run, tmp_path / "slow")
    own = framework is TRANSFORMERS
    job.script = HERE / "scripts" / ("hf_slow_evaluation.py" if own else "slow_evaluation.py")
    job.first = () if own else (framework.script.removesuffix(".py"),)
    monkeypatch.setenv("SLOW", "12")
    started = time.monotonic()
    ran = job.start(2, "--samples", 160, "--epochs", 1, options=("--hang-floor", "5s"))
    assert ran.wait() == 0, ran.output
    assert time.monotonic() - started > 24, "it was not slow"
    assert job.events("hang_detected") == []
    assert len(job.events("group_started")) == 1


def logged(job: Job) -> list[dict[str, float]]:
    return json_lines(job.folder / "checkpoints" / "log_history.jsonl")


def test_trainers_log_and_checkpoints_have_no_gap_and_no_step_twice(run: Run, tmp_path: Path) -> None:
    job = TRANSFORMERS.job(run, tmp_path / "killed")
    job.script = HERE / "scripts" / "hf_slow_evaluation.py"
    ran = job.start(2, "--every", 1)
    ran.until(lambda: ran.output.count("an evaluation begins") == 2)
    job.kill(1)
    assert ran.wait() == 0, ran.output
    assert [each["step"] for each in job.events("resumed")] == [126], "a step was lost"
    assert [line["step"] for line in logged(job) if "eval_loss" in line] == [63, 127, 189]
    assert [line["step"] for line in logged(job) if "loss" in line] == list(range(10, STEPS, 10))
    assert {path.name for path in (job.folder / "output").glob("checkpoint-*")} == {"checkpoint-100", "checkpoint-189"}


@pytest.mark.parametrize("framework", ["transformers", "accelerate", "lightning"])
def test_ranks_stay_in_their_processes(framework: str, run: Run, tmp_path: Path) -> None:
    """In `session.run`. With a range the job shrinks to one rank and grows again; with a fixed size no bit differs."""
    jobs = {name: Job(run, tmp_path / name, HERE / "scripts" / "stays.py", framework, (framework,)) for name in "abc"}
    for job in jobs.values():
        job.folder.mkdir()
    few = 3 if framework == "transformers" else 10
    jobs["a"].finish(2, "--epochs", few)
    fixed, elastic = jobs["b"], jobs["c"]
    for job, workers, epochs in ((fixed, "2", few), (elastic, "1:2", 4 * few)):
        ran = job.start(workers, "--epochs", epochs)
        ran.until(lambda job=job: job.saved(20))
        job.kill(1)
        if job is elastic:
            ran.until(lambda: len(elastic.events("group_started")) == 3)
        else:
            ran.until(lambda: len(fixed.events("first_step")) == 2)
            fixed.kill(0)
        assert ran.wait() == 0, ran.output
    lines = {name: json_lines(jobs[name].folder / "output" / "entered") for name in "bc"}
    b, c = ({(round, rank): pid for round, rank, _, pid in lines[name]} for name in "bc")
    assert b[2, 0] == b[1, 0] and b[3, 1] == b[2, 1], "a survivor did not stay"
    assert [world for _, rank, world, _ in lines["c"] if rank == 0] == [2, 1, 2]
    assert c[1, 0] == c[2, 0] == c[3, 0]
    assert elastic.events("group_started")[-1]["kept"] == 2
    whole, found = (torch.load(jobs[name].folder / "output" / "final.pt", weights_only=True) for name in "ab")
    assert [name for name, value in whole.items() if not torch.equal(found[name], value)] == [], ran.output
