"""`elasticd explain`: pages of recorded evidence, and what it makes of evidence that is missing, torn or hostile.

`pytest tests/cli/test_explain.py --rewrite-pages` writes the pages anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd_agent.hangs.collector.record import NodeEvidence
from elasticd_agent.hangs.explain import load as reading
from elasticd_agent.hangs.explain import locate as finding
from elasticd_agent.hangs.explain import summary_lines
from elasticd_agent.hangs.explain.json_report import document
from elasticd_agent.hangs.explain.model import Explanation, describe_ranks
from elasticd_agent.hangs.explain.text import page, summary
from elasticd_agent.model.reports import RecordedVerdict
from elasticd_agent.system.bounded_io import DeadlineExceeded, run_within
from tests.log_lines import raw_line

HERE = Path(__file__).parent / "explain"
RECORDED = sorted(path.name for path in HERE.iterdir() if path.is_dir())


def explain(*argv: str, cwd: Path = HERE) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "TZ": "UTC", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "elasticd_agent", "explain", *argv]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=60, check=False)


def explained(directory: Path, events: Path | None = None) -> Explanation:
    place = finding.choose_default_folder(finding.find_folders(directory))
    assert place is not None
    return reading.explain(place, events)


def recorded(evidence: Path) -> NodeEvidence:
    return NodeEvidence.from_json((evidence / "evidence-node-a.json").read_bytes())


def change(evidence: Path, **values: Any) -> None:
    """Write the record with other values."""
    (evidence / "evidence-node-a.json").write_bytes(replace(recorded(evidence), **values).to_json())


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    """A folder to break: a group of four of which rank 1 was stopped."""
    shutil.copytree(HERE / "stopped", tmp_path / "logs")
    return tmp_path / "logs" / "round-1" / "evidence"


# --- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDED)
def test_page_of_recorded_evidence(name: str, request: pytest.FixtureRequest) -> None:
    """Recorded evidence still gives the same page."""
    done = explain(name)
    assert (done.returncode, done.stderr) == (0, "")
    path = HERE / f"{name}.txt"
    if request.config.getoption("--rewrite-pages", default=False):
        path.write_text(done.stdout)
    else:
        assert done.stdout == path.read_text()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"action": "report"}, ("Round 1 may have hung", "only reported: no process was killed")),
        ({"culprits": []}, ("no single rank is at fault",)),
    ],
)
def test_page_of_other_verdicts(changes: dict[str, Any], words: Sequence[str], evidence: Path) -> None:
    path = evidence / "verdict.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    shown = " ".join(page(explained(evidence)).split())
    assert all(word in shown for word in words)


def test_json_object(evidence: Path) -> None:
    done = explain("--json", str(evidence))
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["version"] == "2.0"
    assert (found["kind"], found["round"], found["verdict"]["cause"]) == ("hang", 1, "stopped")
    assert [rank["culprit"] for rank in found["ranks"]] == [False, False, True, False]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_json_fields_are_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "hangs.md").read_text()
    schema = text[text.index("## `elasticd explain --json`") :]

    def names(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value) | {name for one in value.values() for name in names(one)}
        return {name for one in value for name in names(one)} if isinstance(value, list) else set()

    found = document(explained(HERE / "stopped"))
    found["gpus"], found["flight"] = [], []  # GPUs' facts are the driver's, and a recording's ranks are numbers
    assert not {name for name in names(found) if f"`{name}`" not in schema}


def test_documented_page_is_recorded() -> None:
    assert (HERE / "loader.txt").read_text() in (Path(__file__).parents[2] / "docs" / "hangs.md").read_text()


def test_summary_is_short(evidence: Path) -> None:
    lines = summary_lines(evidence)
    assert lines[0].startswith("Round 1 hung, and rank 2 is at fault")
    assert lines[-1] == f"  everything else: elasticd explain {evidence}"
    assert len(lines) <= 12
    assert summary_lines(evidence / "nothing") == []


def test_summary_with_unwritten_verdict(evidence: Path) -> None:
    """The verdict may not be on disk yet when the job ends."""
    said = summary_lines(evidence)
    verdict = RecordedVerdict.from_json((evidence / "verdict.json").read_text())
    (evidence / "verdict.json").unlink()
    assert summary_lines(evidence)[0].startswith("Round 1 was suspected of hanging")
    assert summary_lines(evidence, verdict)[:3] == said[:3]


def test_no_evidence_says_how_the_job_ended(tmp_path: Path) -> None:
    reason = "rank 1 raised ValueError: no such column"
    (tmp_path / "events.jsonl").write_text(raw_line("round_published", 1.0))
    assert explain(str(tmp_path)).stderr.endswith("no hang was suspected here\n")
    with open(tmp_path / "events.jsonl", "a") as log:
        log.write(raw_line("job_ended", 2.0, outcome="failed", reason=reason))
        log.write(raw_line("job_ended", 3.0, outcome="left", reason="another node's"))
    assert explain(str(tmp_path)).stderr.endswith(f"no hang was suspected here; the job has failed: {reason}\n")


@pytest.mark.parametrize(
    ("lines", "done"),
    [
        ([], "whether the group was killed is not known here: neither a verdict nor an event log is"),
        (["round_published 1", "hang_suspected 1"], "nothing so far, by the event log"),
        (["round_published 1", "round_published 2 a worker failed"],
         "no verdict is here; round 2 followed: a worker failed"),
        (["round_published 1", "job_ended 1 rank 1 hung"], "no verdict is here; the job has failed: rank 1 hung"),
    ],
)  # fmt: skip
def test_suspicion_never_claims_that_nothing_was_killed(lines: list[str], done: str, evidence: Path) -> None:
    (evidence / "verdict.json").unlink()
    log = evidence.parents[1] / "events.jsonl"
    log.unlink()
    taken_at = recorded(evidence).at_wall
    for line in lines:
        kind, number, reason = [*line.split(" ", 2), ""][:3]
        outcome = {"outcome": "failed"} if kind == "job_ended" else {}
        with open(log, "a") as file:
            file.write(raw_line(kind, taken_at, int(number), reason=reason, **outcome))
    text = explain(str(evidence)).stdout
    assert done in " ".join(text.split())
    assert "no group is killed" not in text


# --- which evidence ---------------------------------------------------------------------------------------------------


def test_log_dir_round_dir_and_evidence_dir_agree(evidence: Path) -> None:
    found = [
        json.loads(explain("--json", str(path)).stdout) for path in (evidence.parents[1], evidence.parent, evidence)
    ]
    assert found[0] == found[1] == found[2]
    assert found[0]["job"] == "llama"  # from the event log, that lies in the log directory


def test_newest_hung_round_is_shown(evidence: Path) -> None:
    """The other rounds are named."""
    logs = evidence.parents[1]
    for number, name in ((3, "evidence"), (7, "evidence"), (9, "dump")):
        shutil.copytree(evidence, logs / f"round-{number}" / name)
    (logs / "round-7" / "evidence" / "verdict.json").unlink()
    (logs / "round-9" / "dump" / "verdict.json").unlink()
    assert explained(logs).round == 3
    done = explain(str(logs))
    assert "other rounds, too: round 1 (hung), round 7 (suspected), round 9 (dumped)." in done.stdout
    assert json.loads(explain("--json", "--round", "7", str(logs)).stdout)["kind"] == "suspicion"
    listed = explain("--list", str(logs)).stdout.splitlines()
    assert [line.split()[:3] for line in listed] == [
        ["round", "1", "hung"],
        ["round", "3", "hung"],
        ["round", "7", "suspected"],
        ["round", "9", "dumped"],
    ]


@pytest.mark.parametrize(
    ("argv", "code", "line"),
    [
        (["{empty}"], 1, "elasticd explain: no evidence in "),
        (["{empty}", "--list"], 1, "elasticd explain: no evidence in "),
        (["{logs}", "--round", "12"], 1, "elasticd explain: no evidence of round 12 in "),
        (["{empty}/none"], 2, "elasticd explain: error: "),
        (["{logs}/events.jsonl"], 2, "elasticd explain: error: "),
        ([], 2, "elasticd explain: error: the following arguments are required: LOGDIR"),
        (["{logs}", "--round", "x"], 2, "elasticd explain: error: argument --round: invalid int value: 'x'"),
    ],
)
def test_errors_are_one_line(argv: list[str], code: int, line: str, evidence: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = explain(*(arg.format(empty=tmp_path / "empty", logs=evidence.parents[1]) for arg in argv))
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1


# --- evidence that is missing, torn or hostile ------------------------------------------------------------------------


def test_verdict_without_other_files(evidence: Path) -> None:
    for path in evidence.iterdir():
        if path.name != "verdict.json":
            path.unlink()
    text = page(explained(evidence))
    assert text.startswith("Round 1 hung, and rank 2 is at fault")


def test_node_without_verdict_uses_event_log(evidence: Path) -> None:
    (evidence / "verdict.json").unlink()
    log = evidence.parents[1] / "events.jsonl"
    judge = explained(evidence, log)
    assert judge.headline.startswith("round 1 hung, and rank 2 is at fault: rank 2 on node-a (step ")
    assert [rank.rank for rank in judge.blamed_ranks] == [2]
    log.write_text("".join(line for line in log.read_text().splitlines(True) if '"kind": "hang_detected"' not in line))
    other = explained(evidence, log)  # every node has the Round, only the planner's has the verdict
    assert (other.kind, other.aftermath.resumed) == ("hang", (1, 20))
    assert other.headline.startswith("round 1 hung: rank 2 on node-a (step ")
    assert "restart" not in other.headline
    assert other.troubles == ("the verdict, with all ranks' facts, is in the log directory of another node",)
    log.write_text(log.read_text().replace('"nodes": ["node-a"]', '"nodes": ["node-a", "node-b"]'))
    where = "the verdict, with all ranks' facts, is in the log directory of another node: node-b"
    assert explained(evidence, log).troubles == (where,)
    guessed = explained(evidence)
    assert guessed.kind == "suspicion"
    assert guessed.headline.startswith("round 1 was suspected of hanging (rank 2 on node-a (step ")
    assert guessed.headline.endswith("and no verdict is here: rank 2 is stopped")


def test_stacks_of_a_later_moment_are_said_to_be(evidence: Path) -> None:
    """A round of which a hang was only reported may be suspected again, hours later."""
    assert "later moment" not in page(explained(evidence))
    change(evidence, at_wall=recorded(evidence).at_wall + 3600)
    assert "\nbut        the stacks are of a later moment, 2026-11-" in page(explained(evidence))


@pytest.mark.parametrize(
    ("kept", "killed"),
    [
        (1, "the workers were killed (SIGKILL), except 1 worker here, which kept the process; round 2"),
        (3, "the workers were killed (SIGKILL), except 3 workers here, which kept the process; round 2"),
    ],
)
def test_workers_that_stay_were_not_killed(evidence: Path, kept: int, killed: str) -> None:
    log = evidence.parents[1] / "events.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    changes = {("group_started", 2): {"kept": kept}, ("resumed", 2): {"donor": 0}}
    log.write_text("".join(json.dumps(one | changes.get((one["kind"], one["round"]), {})) + "\n" for one in lines))
    text = " ".join(page(explained(evidence, log)).split())
    assert killed in text
    assert "from step 20 of round 1, saved by rank 0 after the fault (9 steps to train again)" in text


def test_event_log_of_several_runs(evidence: Path) -> None:
    """The last run that matches counts."""
    log = evidence.parents[1] / "events.jsonl"
    run = log.read_text().splitlines(keepends=True)
    end = raw_line("job_ended", 1.0, 9, job="llama", node="node-a", outcome="failed")
    before = [line.replace('"wall": 17', '"wall": 16').replace("r1-s20", "r1-s10") for line in run]
    after = [line.replace('"wall": 17', '"wall": 18') for line in run]
    log.write_text("".join([*before, end, '{"kind": "hang_detected", "round": 1}\n', "not JSON\n", *run, end, *after]))
    found = explained(evidence, log).aftermath
    assert found.ended.startswith("failed")
    assert found.resumed == (1, 20)


def test_folder_of_an_earlier_version(evidence: Path) -> None:
    """Its verdict is shown."""
    (evidence / "evidence-node-a.json").rename(evidence / "rank-0.json")
    found = explained(evidence)
    assert found.headline.startswith("round 1 hung, and rank 2 is at fault")
    assert "from an earlier version" in found.troubles[0]
    (evidence / "verdict.json").unlink()
    assert "from an earlier version" in page(explained(evidence))


def test_missing_ranks_are_named(evidence: Path) -> None:
    change(evidence, ranks=recorded(evidence).ranks[2:])
    found = explained(evidence)
    assert "no evidence of ranks 0 and 1 is here: look in the log directory on node-a" in found.troubles
    assert len(found.ranks) == 4


@pytest.mark.parametrize("kept", [0, 1, 40, 333])
def test_truncated_files(evidence: Path, kept: int) -> None:
    """A truncated file costs only its own content."""
    for path in evidence.iterdir():
        path.write_bytes(path.read_bytes()[:kept])
    found = explained(evidence)
    assert page(found)
    assert any("verdict.json" in trouble for trouble in found.troubles)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers(), max_size=2),
    st.just({}), st.just([{}]), st.just([[]]), st.just({"rank": [1]}), st.just("\udcff"), st.just(1e300), st.just(-1),
)  # fmt: skip


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_value_in_recorded_files(data: st.DataObject) -> None:
    """Of a recording, one value somewhere is another one."""
    with tempfile.TemporaryDirectory() as directory:
        logs = Path(shutil.copytree(HERE / "stopped", Path(directory) / "logs"))
        evidence = logs / "round-1" / "evidence"
        path = data.draw(st.sampled_from([logs / "events.jsonl", *sorted(evidence.glob("*.json*"))]))
        lines = (
            [json.loads(path.read_text())]
            if path.suffix == ".json"
            else [*map(json.loads, path.read_text().splitlines())]
        )
        at = where = data.draw(st.sampled_from(lines))
        key: Any = None
        while isinstance(at, (dict, list)) and at and (key is None or data.draw(st.integers(0, 4))):
            where, key = at, data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            at = where[key]
        where[key] = data.draw(JUNK)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = explained(logs, logs / "events.jsonl")
        assert page(found).endswith("\n")
        assert summary(found)
        json.dumps(document(found), allow_nan=False)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "9" * 400])
def test_numbers_out_of_range(number: str, tmp_path: Path) -> None:
    """Wherever a number is expected: a property test draws one of these in the one place that matters rarely."""
    logs = Path(shutil.copytree(HERE / "stopped", tmp_path / "logs"))
    evidence = logs / "round-1" / "evidence"
    for path in (logs / "events.jsonl", *evidence.glob("*.json*")):
        whole = path.read_text()
        for key in sorted(set(re.findall(r'"(\w+)": -?\d', whole))):
            path.write_text(re.sub(rf'"{key}": -?[\d.e+-]+', f'"{key}": {number}', whole))
            found = explained(logs, logs / "events.jsonl")
            assert page(found).endswith("\n")
            assert summary(found)
            json.dumps(document(found), allow_nan=False)
        path.write_text(whole)


def test_special_files_are_not_opened(evidence: Path, tmp_path: Path) -> None:
    """Pipes, links and directories are named."""
    (tmp_path / "secret").write_text("secret")
    (evidence / "verdict.json").unlink()
    os.mkfifo(evidence / "verdict.json")
    (evidence / "evidence-b.json").symlink_to(tmp_path / "secret")
    (evidence / "evidence-c.json").mkdir()
    done = explain(str(evidence))  # a read of the FIFO would never end
    assert done.returncode == 0
    assert "secret" not in done.stdout
    for line in ("verdict.json is not a plain", "evidence-b.json is a link", "evidence-c.json is not a plain file"):
        assert line in done.stdout


def test_huge_files_are_read_in_part(evidence: Path) -> None:
    for name in ("evidence-node-a.json", "reports-node-a.jsonl"):
        with open(evidence / name, "ab") as file:
            file.truncate(1 << 40)  # sparse: it takes no room
    found = explained(evidence)
    assert sum("is large" in trouble for trouble in found.troubles) == 2
    assert len(found.ranks) == 4, "by the verdict"


def test_closed_output_prints_no_traceback() -> None:
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    with os.fdopen(writing_end, "w") as out:
        command = [sys.executable, "-m", "elasticd_agent", "explain", str(HERE / "stopped")]
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_control_characters_are_made_visible(evidence: Path) -> None:
    ranks = recorded(evidence).ranks
    change(evidence, ranks=(*ranks[:2], replace(ranks[2], log=("\x1b[2J\x1b]0;owned\x07 \x9b1m last",)), ranks[3]))
    text = page(explained(evidence))
    assert "\\x1b[2J\\x1b]0;owned\\x07 \\x9b1m last" in text
    assert all(line.isprintable() for line in text.splitlines())


def test_dead_file_system_is_given_up() -> None:
    gone = threading.Event()
    with pytest.raises(DeadlineExceeded):
        run_within(0.05, gone.wait)
    gone.set()
    with pytest.raises(ZeroDivisionError):
        run_within(20.0, lambda: 1 // 0)


# --- parts ------------------------------------------------------------------------------------------------------------


def test_name_ranks() -> None:
    assert [describe_ranks(ranks) for ranks in ([], [3], [2, 1], [1, 2, 3], [0, 2, 3, 4, 7, 8])] == [
        "no rank",
        "rank 3",
        "ranks 1 and 2",
        "ranks 1-3",
        "ranks 0, 2-4, 7 and 8",
    ]


def test_thousand_ranks_fit_on_a_page(tmp_path: Path) -> None:
    evidence = tmp_path / "round-2" / "evidence"
    evidence.mkdir(parents=True)
    culprits = [{"node": "n77", "rank": 617, "slot": 1}]
    verdict = {"version": "1.0", "round": 2, "cause": "blocked", "culprits": culprits, "why": "rank 617 sleeps"}
    reports = [
        {"round": 2, "node": f"n{n}", "ranks": [facts(rank, behind=rank == 617) for rank in range(8 * n, 8 * n + 8)]}
        for n in range(128)
    ]
    (evidence / "verdict.json").write_text(
        json.dumps(verdict | {"action": "restart", "seen_after_s": 9.0, "reports": reports})
    )
    lines = page(explained(evidence)).splitlines()
    assert len(lines) < 40
    assert [line.split()[:4] for line in lines if line.startswith(" >")] == [[">", "617", "n77", "1"]]
    assert sum("0-616 and 618-1023  128 nodes" in line for line in lines) == 1


def facts(rank: int, behind: bool) -> dict[str, Any]:
    place = {"where": "elsewhere", "function": "read (data.py:7)"} if behind else {"where": "collective"}
    return {
        "rank": rank,
        "slot": rank % 8,
        "phase": "step",
        "step": 9,
        "collectives": 90 - behind,
        "state": "S",
        **place,
    }
