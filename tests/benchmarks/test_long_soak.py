"""benchmarks/long_soak.py: what it makes of its minutes, and a run that is stopped and continued."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import long_soak
from tests.multihost.net import missing


def minutes(count: int, growth: float, segment: int = 1, **more: Any) -> list[dict[str, Any]]:
    """`growth` of an agent's 100 MB an hour, after a first hour in which it gets them; of another node anything."""
    found = []
    for minute in range(1, count + 1):
        resident = 1e8 * (min(minute, 60) / 60 + growth * max(0, minute - 60) / 60)
        processes = {"7": ["n1", "agent", resident, 20], "8": ["n2", "agent", 1e8 * minute, minute]}
        line = {"segment": segment, "minute": minute, "seconds": 60.0, "faults": {"drain": 2}, "jobs": 1, "steps": 10}
        found.append({**line, "lost": 0, "breaches": 0, "processes": processes, "disk": {"n1": 1e6, "n2": 5e6}, **more})
    return found


@pytest.mark.parametrize("growth", [0.0, 0.05])
def test_growth_is_that_after_the_first_hour(growth: float) -> None:
    middle, memory, descriptors = long_soak.growth(minutes(180, growth))["agent"]
    assert memory == pytest.approx(growth / (1 + growth), abs=0.002)
    assert (round(middle / 1e8, 1), descriptors) == (pytest.approx(1 + growth, abs=0.06), 0.0)


def test_table_sums_up_all_parts() -> None:
    told = long_soak.table([*minutes(90, 0.0), *minutes(30, 0.0, segment=2, breaches=1)])
    for row in ("hours | 2.0, in 2 parts", "faults | 240: 240 × drain", "jobs that ended | 120", "breaches | 30"):
        assert f"| {row} |" in told


def test_line_that_is_not_whole_is_dropped(tmp_path: Path) -> None:
    """The machine went down while it was written. What the next part adds is another line."""
    path = tmp_path / "minutes.jsonl"
    path.write_text('{"minute": 1}\n{"minu')
    long_soak.drop_torn_line(tmp_path)
    with path.open("a") as file:
        file.write('{"minute": 2}\n')
    assert [line["minute"] for line in long_soak.read(tmp_path)] == [1, 2]


def test_table_of_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert long_soak.main(["--table", "--directory", str(tmp_path / "soak")]) == 1
    assert "no soak has been recorded in" in capsys.readouterr().err
    assert not (tmp_path / "soak").exists()


@pytest.mark.system
@pytest.mark.timeout(600)  # twice: agents start, a fault, all jobs end
def test_stopped_run_is_continued(request: pytest.FixtureRequest) -> None:
    if why := missing():
        pytest.skip(why)
    directory = Path(tempfile.mkdtemp(prefix="soak-"))  # an agent's socket below it has a short path
    request.addfinalizer(lambda: shutil.rmtree(directory, ignore_errors=True))
    command = [sys.executable, "-m", "benchmarks.long_soak", "--directory", str(directory), "--seed", "1"]
    for part in (1, 2):
        with subprocess.Popen([*command, "--hours", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
            assert run.stderr is not None and run.stdout is not None
            said = []
            for line in run.stderr:
                said.append(line.decode())
                if line.split()[1:2] == [b"1"]:
                    run.send_signal(signal.SIGTERM)
            told = run.stdout.read().decode()
        assert run.returncode == 0, "".join(said) + told
        assert {line["segment"] for line in long_soak.read(directory)} == set(range(1, part + 1))
        assert f"in {part} parts" in told
    assert sorted(os.listdir(directory)) == ["minutes.jsonl", "soak.png"]
