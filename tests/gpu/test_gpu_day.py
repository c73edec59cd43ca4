"""The day with a GPU: a check that fails or hangs costs only itself, and the next call continues."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_day
from benchmarks.gpu_day import Check, report, run


def check(source: str, limit_s: int = 20) -> Check:
    return Check("one", "something", limit_s, (sys.executable, "-c", source))


@pytest.mark.parametrize(
    ("given", "ok", "measured"),
    [
        (check("print('3 passed')"), True, "3 passed"),
        (check("print('1 failed'); raise SystemExit(1)"), False, "1 failed"),
        (check("import time; time.sleep(600)", 1), False, "no end within 1 s"),
    ],
    ids=["passes", "fails", "hangs"],
)
def test_check_is_bounded(tmp_path: Path, given: Check, ok: bool, measured: str) -> None:
    found = run(1, given, "fake", tmp_path / "log")
    assert (found["ok"], found["measured"]) == (ok, measured)
    assert found["seconds"] < 20


def test_checks_of_the_script_on_fakes(tmp_path: Path) -> None:
    by_name = {one.name: one for one in gpu_day.CHECKS}
    assert len(by_name) == 23
    found = run(1, by_name["facts"], "fake", tmp_path / "log")
    assert found["ok"] is True
    assert "schedstat True" in found["measured"]
    broken = run(2, Check("no_such_check", "", 20), "fake", tmp_path / "log")
    assert broken["ok"] is False
    assert "KeyError" in broken["measured"]
    assert "| 2 | no_such_check | fake |" in report({"a": found, "b": broken})


@pytest.mark.system
@pytest.mark.timeout(1300)
def test_whole_day_on_fakes(tmp_path: Path) -> None:
    """All checks in one call: the day must not be spent on mending them."""
    command = [sys.executable, str(Path(gpu_day.__file__)), "--on", "fake", "--directory", str(tmp_path)]
    done = subprocess.run([*command, "--seconds", "1200"], capture_output=True, text=True, timeout=1250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    has_both = (gpu_day.installed_version("torch", sys.executable, {}) or (0, 0)) >= (2, 14)
    assert list(results) == [check.name for check in gpu_day.CHECKS if has_both or not check.nccl2]
    assert {name: one["measured"] for name, one in results.items() if one["ok"] is False} == {}


@pytest.mark.parametrize("name", ["pipe", "nvml"])
def test_quick_checks_on_fakes(tmp_path: Path, name: str) -> None:
    by_name = {one.name: one for one in gpu_day.CHECKS}
    found = run(1, by_name[name], "fake", tmp_path / "log")
    assert found["ok"] is not False, found["measured"]


def test_next_call_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    checks = (check("print(1)", 50), Check("two", "", 50, (sys.executable, "-c", "print(2)")))
    monkeypatch.setattr(gpu_day, "CHECKS", checks)
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "--on", "fake", "--seconds", "50", "--directory", str(tmp_path)])
    assert gpu_day.main() == 75, "the second one might take too long"
    assert "two may take 50 s" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--seconds", "500"])
    assert gpu_day.main() == 0
    assert "one" not in capsys.readouterr().out, "it is known"
    kept = json.loads((tmp_path / "results.json").read_text())
    assert [kept[name]["measured"] for name in ("one", "two")] == ["1", "2"]
    assert "| 2 | two |" in (tmp_path / "report.md").read_text()
