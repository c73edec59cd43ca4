"""The demo shows what it promises, says so when it does not, and writes nothing but its folder and its picture."""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.examples.launching import REPOSITORY, Run

DEMO = REPOSITORY / "examples" / "demo.py"
TINY = ("--", "--width", 16, "--blocks", 1, "--heads", 2, "--context", 16, "--global-batch", 8, "--megabytes", 0.1)


def test_demo_kills_recovers_and_draws(run: Run, tmp_path: Path) -> None:
    ran = run(DEMO, "--workers", 2, "--steps", 60, "--checkpoint-every", 5, "--seed", 1, *TINY)
    assert ran.wait() == 0, ran.output
    assert "SIGKILL to rank" in ran.output
    assert re.search(r"recovered in \d+\.\d{3} s", ran.output)
    assert re.search(
        r"(\d+) steps after the last checkpoint were trained again, \1 with the very same loss", ran.output
    )
    folder = tmp_path / "run0"
    assert sorted(path.name for path in folder.iterdir()) == ["demo-run", "demo.png"]
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.system
def test_demo_fails_with_its_job(run: Run, tmp_path: Path) -> None:
    ran = run(DEMO, "--workers", 2, "--steps", 60, *TINY, "--text", tmp_path / "no such file")
    assert ran.wait() == 1, ran.output
    assert "demo: FAILED: the job ended with exit code 1 before step" in ran.output


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DEMO.parent))
    return importlib.import_module("demo")


class Follow:
    """A job that runs, whose event log has another line now and then."""

    def __init__(self, demo: ModuleType, folder: Path, deadline_s: float, events: int) -> None:
        self.log = folder / "events.jsonl"
        self.log.touch()
        self.watch = demo.DemoLogs(self.log, folder / "loss.jsonl")
        self.job = demo.DemoJob(self, deadline_s)
        self.events, self.polls, self.now = events, 0, 0.0
        self.watch.moved_at = 0.0

    def poll(self) -> None:
        """A minute passes, and an event comes until there are enough of them."""
        self.polls += 1
        self.now += 60.0
        if self.polls <= self.events:
            self.log.write_text(self.log.read_text() + json.dumps({"kind": "launcher_ready"}) + "\n")


@pytest.mark.parametrize(("load", "gives_up_at"), [(1.0, 35.0), (20 * (os.cpu_count() or 1), 320.0)])
def test_demo_on_a_busy_machine(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    load: float,
    gives_up_at: float,
) -> None:
    """It says what it waits for, and gives up after 15 minutes without an event, or longer where the machine has more
    to do."""
    follow = Follow(demo, tmp_path, 900.0, events=20)
    monkeypatch.setattr("time.monotonic", lambda: follow.now)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    with pytest.raises(demo.DemoFailed, match="step 80 did not come, nor any other step or event in the last"):
        follow.watch.until(lambda: False, follow.job, "step 80")
    assert follow.now == pytest.approx(60.0 * (gives_up_at + 1))
    said = capsys.readouterr().out.splitlines()
    assert "demo: waiting for step 80 for 120 s, the last event is launcher_ready" in said


def test_demo_refuses_foreign_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    ran = run(DEMO, "--folder", tmp_path / "mine")
    assert ran.wait() == 1
    assert "not from an earlier demo" in ran.output
    assert (tmp_path / "mine" / "thesis.tex").exists()
