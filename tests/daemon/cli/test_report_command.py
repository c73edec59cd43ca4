"""`elasticd report`: the page of two recorded nodes, and what it makes of logs that are rotated, torn, or no logs.

`elasticd report tests/daemon/cli/report >tests/daemon/cli/report/page.txt` writes the page anew.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest

from elasticd_agent.cli.main import main
from tests.log_lines import raw_line

RECORDED = Path(__file__).parent / "report"
PAGE = RECORDED / "page.txt"


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    copy = tmp_path / "logs"
    shutil.copytree(RECORDED, copy)
    return copy


def json_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    assert main(["report", "--json", *argv]) == 0
    told: dict[str, object] = json.loads(capsys.readouterr().out)
    return {name: value for name, value in told.items() if name not in ("logs", "until")}


def test_page_of_two_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank of each node was killed; then node b left, and the job was stopped."""
    assert main(["report", str(RECORDED)]) == 0
    assert capsys.readouterr().out == PAGE.read_text()


def test_documented_page_is_that_page() -> None:
    assert PAGE.read_text() in (Path(__file__).parents[3] / "docs" / "report.md").read_text()


def test_costs_are_those_that_the_log_says(capsys: pytest.CaptureFixture[str]) -> None:
    """`work_recovered` has the seconds of each fault; each node had two workers."""
    told = json_of(capsys, str(RECORDED))
    lines = [json.loads(line) for log in RECORDED.glob("*/*.jsonl") for line in log.read_text().splitlines()]
    lost_s = sum(2 * line["seconds"] for line in lines if line["kind"] == "work_recovered")
    assert told["lost_seconds"] == pytest.approx(lost_s, abs=0.1)


def test_rotated_and_torn_logs_say_the_same(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = json_of(capsys, str(RECORDED))
    log = logs / "node-a" / "event-log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    (logs / "node-a" / "event-log.jsonl.2.gz").write_bytes(gzip.compress(b"".join(lines[:9])))
    (logs / "node-a" / "event-log.jsonl.1").write_bytes(b"".join(lines[9:30]) + lines[30][:40] + b"\n" + lines[30])
    log.write_bytes(b"\xff\x00 no JSON\n[]\n" + b"x" * (1 << 18) + b"\n" + b"".join(lines[31:]) + lines[3][:-20])
    assert json_of(capsys, str(logs), str(log)) == whole


def test_jobs_of_this_nodes_agent(tmp_path: Path, logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a PATH; an agent's own log has no job."""
    state = tmp_path / "state"
    for number, node in enumerate(("node-a", "node-b")):
        (state / "jobs" / f"llama.{number}").mkdir(parents=True)
        shutil.copy(logs / node / "event-log.jsonl", state / "jobs" / f"llama.{number}" / "events.jsonl")
    (state / "logs").mkdir()
    config = tmp_path / "agent.toml"
    config.write_text(f'state_dir = "{state}"\n')
    assert json_of(capsys, "--config", str(config)) == json_of(capsys, str(RECORDED))


def test_what_cannot_be_read_is_named(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (logs / "events.jsonl.1.gz").write_bytes(b"no gzip")
    os.mkfifo(logs / "events.jsonl")  # a pipe is no log
    assert main(["report", str(logs)]) == 0
    told = capsys.readouterr()
    assert "events.jsonl.1.gz" in told.err
    assert told.out == PAGE.read_text()


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--since", "a month"], "--since a month: give a time such as 30d or 12h"),
        (["--since=-3d"], "--since -3d: give a time"),
        (["/nonexistent"], "/nonexistent cannot be read: No such file or directory; give event logs"),
    ],
)
def test_misuse_is_one_sentence(argv: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *argv]) == 2
    assert why in capsys.readouterr().err


def test_nothing_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").write_text(raw_line("node_healthy", 1e9))
    assert main(["report", "--since", "1d", str(tmp_path)]) == 1
    assert "no event log of a job with events of the last 1 d" in capsys.readouterr().err


def test_names_of_jobs_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = raw_line("round_published", 1e9, job="\x1b[2J", node="a\nb", nodes=("a",), world_size=1, cause="\x1b[1m")
    (tmp_path / "events.jsonl").write_text(line)
    assert main(["report", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out
