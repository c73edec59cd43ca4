"""benchmarks/checker.py, held against a run that kept every promise and against forged ones, each with one broken."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checker import SoakLogs, breaches, main, read

SAMPLES, BATCH = 8, 2

Job = dict[str, Any]
"""`agents`: events by the name of an agent's directory; `record` and `faults`: lines."""


def a_good_run() -> Job:
    """Two nodes; node b is lost at step 6 of round 1, comes back under its id into round 3, and all finish step 8.

    Round 1 saves steps 2 and 4, round 2 resumes from 4 and saves 6, round 3 resumes from there.
    """
    a: list[dict[str, Any]] = []
    b: list[dict[str, Any]] = []
    again: list[dict[str, Any]] = []
    record: list[dict[str, Any]] = []
    for log in (a, b):
        log += [published(1, 1.0, "a b", 0, "first round: 2 workers on 2 nodes"), group(1, 1.1)]
    a += [saved(1, 2, 1.4), saved(1, 4, 1.7)]
    trained(record, 1, 1.2, "a b", None, range(1, 7))
    a += [published(2, 3.0, "a", 1, "b is lost: its lease has expired; restart with 1 worker on a"), gone(1, 3.1)]
    a += [group(2, 3.2), resumed(2, 1, 4, 3.3), saved(2, 6, 3.7)]
    trained(record, 2, 3.4, "a", (1, 4), range(5, 7))
    for log in (a, again):
        log += [published(3, 5.0, "a b", 2, "b joined; restart with 2 workers on 2 nodes")]
    a += [gone(2, 5.1)]
    for log in (a, again):
        log += [group(3, 5.2)]
    a += [resumed(3, 2, 6, 5.3)]
    trained(record, 3, 5.4, "a b", (2, 6), range(7, 9))
    record += [{**who, "ends": 8, "ledger": ledger(range(1, 9))} for who in ranks(3, 6.0, "a b")]
    for log in (a, again):
        log += [gone(3, 6.1), event("job_ended", 4, 6.2, "all is done", outcome="succeeded", exit_code=0)]
    faults = [{"what": "store restart", "number": 1, "from": 5.5, "to": 5.9}]
    return {"agents": {"agent-0-a": a, "agent-1-b": b, "agent-2-b": again}, "record": record, "faults": faults}


def event(kind: str, round: int, mono: float, reason: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "round": round, "mono": mono, "reason": reason, **more}


def published(round: int, mono: float, nodes: str, restarts: int, reason: str) -> dict[str, Any]:
    names = nodes.split()
    return event(
        "round_published", round, mono, reason, nodes=names, world_size=len(names), restarts=restarts, cause="resize"
    )


def group(round: int, mono: float) -> dict[str, Any]:
    return event("group_started", round, mono, "1 worker", ranks=[0], pids=[1])


def gone(round: int, mono: float) -> dict[str, Any]:
    return event("group_ended", round, mono, "nothing is left")


def saved(round: int, step: int, mono: float) -> dict[str, Any]:
    return event("checkpoint_saved", round, mono, "saved", step=step)


def resumed(round: int, parent: int, step: int, mono: float) -> dict[str, Any]:
    return event("resumed", round, mono, f"resumed from step {step} of round {parent}", from_round=parent, step=step)


def ranks(round: int, mono: float, nodes: str) -> list[dict[str, Any]]:
    names = nodes.split()
    return [
        {"node": node, "pid": 100 * round + rank, "mono": mono, "round": round, "rank": rank, "world": len(names)}
        for rank, node in enumerate(names)
    ]


def trained(
    record: list[dict[str, Any]], round: int, mono: float, nodes: str, begins: tuple[int, int] | None, steps: range
) -> None:
    """In order: step s is on samples 2s - 2 and 2s - 1 of the epochs one after the other."""
    record += [{**who, "begins": begins and list(begins)} for who in ranks(round, mono, nodes)]
    for step in steps:
        epoch, first = divmod((step - 1) * BATCH, SAMPLES)
        batch = list(range(first, first + BATCH))
        for who in ranks(round, mono + step / 100, nodes):
            share = batch[who["rank"] :: who["world"]]
            record.append({**who, "step": step, "epoch": epoch, "samples": share})


def ledger(steps: range) -> int:
    """What the state says of the samples it was made of, as tests/multihost/lineage.py keeps it."""
    found = 0
    for step in steps:
        first = (step - 1) * BATCH % SAMPLES
        found = (found * 1_000_003 + sum((sample + 1) ** 2 for sample in range(first, first + BATCH))) % (2**61 - 1)
    return found


def written(job: Job, work: Path) -> SoakLogs:
    work.mkdir()
    for name, events in job["agents"].items():
        (work / name).mkdir()
        lines(work / name / "events.jsonl", events)
    lines(work / "record", job["record"])
    lines(work / "faults.jsonl", job["faults"])
    return read(work, SAMPLES)


def lines(path: Path, values: list[dict[str, Any]]) -> None:
    # the last line of a process that was killed may be half of one
    path.write_text("".join(json.dumps(value) + "\n" for value in values) + '{"kind": "ro')


def find(lines: list[dict[str, Any]], **having: Any) -> dict[str, Any]:
    return next(line for line in lines if having.items() <= line.items())


# ---- forgeries: each changes the good run in one respect


def a_round_comes_twice(job: Job) -> None:
    job["agents"]["agent-0-a"].append(published(2, 9.0, "a", 1, "b is lost: its lease has expired; restart with a"))
    find(job["agents"]["agent-0-a"], kind="round_published", round=2)["reason"] = job["agents"]["agent-0-a"][-1][
        "reason"
    ]


def a_nodes_next_agent_is_in_an_older_round(job: Job) -> None:
    first = copy.deepcopy(job["agents"]["agent-1-b"][0])
    job["agents"]["agent-1-b"].append(copy.deepcopy(job["agents"]["agent-2-b"][0]))
    job["agents"]["agent-2-b"].insert(0, first)


def a_number_has_two_memberships(job: Job) -> None:
    find(job["agents"]["agent-2-b"], kind="round_published", round=3)["nodes"] = ["b", "a"]


def a_number_has_two_reasons(job: Job) -> None:
    find(job["agents"]["agent-2-b"], kind="round_published", round=3)["reason"] = "for fun; restart with 2 workers"


def a_restart_has_no_reason(job: Job) -> None:
    find(job["agents"]["agent-0-a"], kind="round_published", round=2)["reason"] = "; restart with 1 worker on a"


def a_restart_is_not_counted(job: Job) -> None:
    for name in ("agent-0-a", "agent-2-b"):
        find(job["agents"][name], kind="round_published", round=3)["restarts"] = 1
        find(job["agents"][name], kind="round_published", round=3)["reason"] = "b joined; restart with 2 workers"


def a_group_starts_before_the_last_one_is_gone(job: Job) -> None:
    events = job["agents"]["agent-0-a"]
    old, new = (find(events, kind=kind, round=r) for kind, r in (("group_ended", 2), ("group_started", 3)))
    i, j = events.index(old), events.index(new)
    events[i], events[j] = new, old


def a_node_starts_a_group_of_a_round_without_it(job: Job) -> None:
    job["agents"]["agent-1-b"] += [gone(1, 2.0), group(2, 3.2)]


def a_worker_of_an_older_round_trains_on(job: Job) -> None:
    late = copy.deepcopy(find(job["record"], round=1, step=6, node="b"))
    find(job["record"], round=1, step=6, node="b")["mono"] = 5.45
    assert late["mono"] < 5.0


def a_round_resumes_what_nobody_wrote(job: Job) -> None:
    for line in job["record"]:
        if line["round"] == 2 and "begins" in line:
            line["begins"] = [1, 7]
    find(job["agents"]["agent-0-a"], kind="resumed", round=2).update(step=7, reason="resumed from step 7 of round 1")
    job["agents"]["agent-0-a"].remove(find(job["agents"]["agent-0-a"], kind="checkpoint_saved", round=1, step=4))


def a_round_resumes_from_a_newer_one(job: Job) -> None:
    for line in job["record"]:
        if line["round"] == 2 and "begins" in line:
            line["begins"] = [3, 8]
    find(job["agents"]["agent-0-a"], kind="resumed", round=2).update(step=8, from_round=3)


def a_round_forgets_a_checkpoint(job: Job) -> None:
    """It goes back to step 2 although step 4 was there."""
    for line in list(job["record"]):
        if line["round"] == 2 and "begins" in line:
            line["begins"] = [1, 2]
            trained(job["record"], 2, 3.35, "a", (1, 2), range(3, 5))
    find(job["agents"]["agent-0-a"], kind="resumed", round=2).update(step=2)


def an_agent_and_its_rank_tell_different_resumes(job: Job) -> None:
    find(job["agents"]["agent-0-a"], kind="resumed", round=3)["step"] = 4


def a_round_resumes_twice(job: Job) -> None:
    job["agents"]["agent-0-a"].append(resumed(3, 1, 4, 9.0))


def a_loser_is_resumed_from(job: Job) -> None:
    """Round 3 continues from a checkpoint that a zombie of round 1 wrote after round 2 continued from step 4."""
    for line in job["record"]:
        if line["round"] == 3 and "begins" in line:
            line["begins"] = [1, 6]
    find(job["agents"]["agent-0-a"], kind="resumed", round=3).update(from_round=1)
    job["agents"]["agent-1-b"].append(saved(1, 6, 4.0))


def a_step_is_lost(job: Job) -> None:
    job["record"] = [line for line in job["record"] if (line["round"], line.get("step")) != (2, 6)]


def a_rank_misses_a_step(job: Job) -> None:
    job["record"].remove(find(job["record"], round=3, step=7, rank=1))


def a_rank_has_a_state_of_its_own(job: Job) -> None:
    find(job["record"], round=3, step=8, rank=1)["state"] = "another"


def a_step_is_made_twice(job: Job) -> None:
    job["record"].append(copy.deepcopy(find(job["record"], round=3, step=8, rank=1)))


def a_sample_is_repeated(job: Job) -> None:
    find(job["record"], round=3, step=8, rank=1)["samples"] = [0]


def a_sample_is_lost(job: Job) -> None:
    find(job["record"], round=1, step=3, rank=1)["samples"] = []


def the_lineage_begins_nowhere(job: Job) -> None:
    job["record"] = [line for line in job["record"] if line["round"] != 1]


def the_state_is_another_one(job: Job) -> None:
    """Round 3 logs a resume from step 6, and it has loaded step 4."""
    find(job["record"], round=3, ends=8, rank=1)["ledger"] = ledger(range(1, 5))
    find(job["record"], round=3, ends=8, rank=0)["ledger"] = ledger(range(1, 5))


def nobody_finishes(job: Job) -> None:
    job["record"] = [line for line in job["record"] if "ends" not in line]


def the_end_has_two_outcomes(job: Job) -> None:
    find(job["agents"]["agent-2-b"], kind="job_ended").update(outcome="failed", exit_code=1, reason="too bad")


def nobody_sees_the_end(job: Job) -> None:
    for events in job["agents"].values():
        events[:] = [event for event in events if event["kind"] != "job_ended"]


def a_store_fault_leads_to_a_round(job: Job) -> None:
    job["faults"][0].update({"from": 2.9, "to": 3.5})


FORGERIES: dict[Callable[[Job], None], str] = {
    a_round_comes_twice: "rounds only grow: agent-0-a saw round 2 after round 3",
    a_nodes_next_agent_is_in_an_older_round: "rounds only grow: agent-2-b saw round 1 after round 3",
    a_number_has_two_memberships: "rounds are agreed on: round 3 is not the same to all",
    a_number_has_two_reasons: "rounds are agreed on: round 3 is not the same to all",
    a_restart_has_no_reason: "restarts have reasons: round 2 is restart 1 and has no reason",
    a_restart_is_not_counted: "restarts have reasons: round 3 counts 1 restarts, round 2 1",
    a_group_starts_before_the_last_one_is_gone: "one group at a time: agent-0-a started its group of round 3 while",
    a_node_starts_a_group_of_a_round_without_it: "one group at a time: agent-1-b started a group of round 2, in which",
    a_worker_of_an_older_round_trains_on: "one group at a time: a worker (pid 101) of round 1 on b still trained",
    a_round_resumes_what_nobody_wrote: "resumes come from the chain: round 2 resumed from step 7 of round 1, which",
    a_round_resumes_from_a_newer_one: "resumes come from the chain: round 2 resumed from round 3, which is not older",
    a_round_forgets_a_checkpoint: "resumes come from the chain: round 2 resumed from step 2 of round 1, which had",
    an_agent_and_its_rank_tell_different_resumes: "resumes come from the chain: round 3 logs 'resumed from",
    a_round_resumes_twice: "resumes come from the chain: round 3 resumed twice",
    a_loser_is_resumed_from: "no loser is resumed from: round 3 goes back to [1], past round 2",
    a_rank_has_a_state_of_its_own: "ranks have one state: after step 8 of round 3 ranks differ",
    a_step_is_lost: "no sample lost or repeated: step 6 of round 2 was made by ranks [] of 0",
    a_rank_misses_a_step: "no sample lost or repeated: step 7 of round 3 was made by ranks [0] of 2",
    a_step_is_made_twice: "no sample lost or repeated: step 8 of round 3 was made by ranks [0, 1, 1] of 2",
    a_sample_is_repeated: "no sample lost or repeated: epoch 1: 1 samples were trained on more than once, as [0]",
    a_sample_is_lost: "no sample lost or repeated: epoch 0: 1 samples were never trained on, as [5]",
    the_lineage_begins_nowhere: "no sample lost or repeated: the chain of round 3 goes back to round 1, of which",
    the_state_is_another_one: "no sample lost or repeated: the last state has",
    nobody_finishes: "no sample lost or repeated: no rank came to the end of its training",
    the_end_has_two_outcomes: "the end is agreed on: the job ended in different ways",
    nobody_sees_the_end: "the end is agreed on: no agent saw the job's end",
    a_store_fault_leads_to_a_round: "the store restarts nobody: store restart (1) led to round 2: b is lost",
}


def test_good_run_has_no_breach(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert breaches(written(a_good_run(), tmp_path / "job")) == []
    assert main([str(tmp_path / "job"), str(SAMPLES)]) == 0
    assert capsys.readouterr().out == "every promise was kept\n"


def test_round_that_began_in_processes_and_has_saved_nothing_may_be_gone_back_past(tmp_path: Path) -> None:
    job = a_good_run()
    of_a = job["agents"]["agent-0-a"]
    find(of_a, kind="resumed", round=2)["in_processes"] = True
    of_a.remove(find(of_a, kind="checkpoint_saved", round=2))
    of_a[of_a.index(find(of_a, kind="resumed", round=3))] = resumed(3, 1, 4, 5.3)
    job["record"] = [line for line in job["record"] if line["round"] != 3]
    trained(job["record"], 3, 5.4, "a b", (1, 4), range(5, 9))
    job["record"] += [{**who, "ends": 8, "ledger": ledger(range(1, 9))} for who in ranks(3, 6.0, "a b")]
    assert breaches(written(job, tmp_path / "job")) == []


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_broken_promise_is_named(forge: Callable[[Job], None], tmp_path: Path) -> None:
    job = a_good_run()
    forge(job)
    found = breaches(written(job, tmp_path / "job"))
    assert any(breach.startswith(FORGERIES[forge]) for breach in found), found


def test_empty_log_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(SAMPLES)]) == 1
    assert "no agent saw the job's end" in capsys.readouterr().out
