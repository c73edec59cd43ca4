"""The demo shows what it promises, says so when it does not, and writes nothing but its folder and its picture."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_demo_refuses_foreign_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    ran = run(DEMO, "--folder", tmp_path / "mine")
    assert ran.wait() == 1
    assert "not from an earlier demo" in ran.output
    assert (tmp_path / "mine" / "thesis.tex").exists()
