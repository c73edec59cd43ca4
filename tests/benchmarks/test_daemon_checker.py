"""benchmarks/daemon_checker.py, held against daemons that kept every promise and against forged ones.

Each forgery breaks one promise. The first job is test_checker.py's: node b's runner is killed at 2.9 and started again
at 4.9. The second one is cancelled before it has made a step; agent a is killed meanwhile, which nobody notices.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import daemon_checker
from benchmarks.attacker import ATTACKS
from tests.benchmarks import test_checker as one_job
from tests.benchmarks.test_checker import event, find, group, lines, published, ranks

Daemons = dict[str, Any]
"""`agents`: their own events by node; `jobs`: by JOB.NUMBER and node the runners'; `records`; `notes`: the journals."""


def good() -> Daemons:
    job = one_job.a_good_run()
    logs = job["agents"]
    b = [started("j1", 1, 0.9), runner("runner_ended", "j1", 1, 3.0, "was killed", outcome="lost")]
    b += [started("j1", 1, 4.9), runner("runner_ended", "j1", 1, 6.3, "succeeded", outcome="succeeded")]
    a = [started("j1", 1, 0.9), started("j2", 2, 2.1)]
    a += [
        runner("runner_stop_requested", "j2", 2, 4.0, "cancelled"),
        runner("runner_ended", "j2", 2, 4.2, "left", outcome="left"),
    ]
    notes: dict[str, list[dict[str, Any]]] = {
        "requests": [
            {"mono": 0.5, "do": "submit", "seq": 1, "job": "j1", "steps": 8, "number": 1, "code": 201},
            {"mono": 2.0, "do": "submit", "seq": 2, "job": "j2", "steps": 9, "number": 0, "code": 503},
            {"mono": 3.9, "do": "cancel", "seq": 2, "job": "j2", "code": 200, "answer": CANCELLED},
        ],
        "observed": [
            {"mono": 2.3, "what": "submission", "seq": 2, "job": "j2", "number": 2},
            {"mono": 4.1, "what": "ending", "job": "j2", "number": 2, "outcome": "cancelled", "reason": "cancelled"},
            {"mono": 6.4, "what": "ending", "job": "j1", "number": 1, "outcome": "succeeded", "reason": "done"},
        ],
        "faults": [{"mono": 2.5, "what": "kill agent", "number": 1, "detail": "a for 1.0 s"}],
        "signals": [{"mono": 2.9, "pid": 7, "signal": 9, "node": "b", "comm": "elasticd-job"}],
        "left": [{"mono": 7.0, "node": "a", "code": 0}, {"mono": 7.0, "node": "b", "code": 0}],
        "history": [{"mono": 6.5, "job": "j1", "number": 1, "rounds": [shown(1), shown(2), shown(3)]}],
        "end": [{"mono": 7.1, "left": []}],
    }
    return {
        "agents": {"a": a, "b": b},
        "jobs": {
            "j1.1": {"a": logs["agent-0-a"], "b": [*logs["agent-1-b"], *logs["agent-2-b"]]},
            "j2.2": {"a": [published(1, 2.5, "a", 0, "first round: 1 worker on a"), group(1, 2.6)]},
        },
        "records": {1: job["record"], 2: [{**who, "begins": None} for who in ranks(1, 2.7, "a")]},
        "notes": notes,
    }


CANCELLED = {"outcome": "cancelled", "number": 2}


def runner(kind: str, job: str, number: int, mono: float, reason: str, **more: Any) -> dict[str, Any]:
    return event(kind, 0, mono, reason, name=job, number=number, **more)


def started(job: str, number: int, mono: float) -> dict[str, Any]:
    return runner("runner_started", job, number, mono, "starts", pid=7)


def shown(number: int) -> dict[str, Any]:
    return {"round": number, "reason": "for a reason"}


def judged(daemons: Daemons, work: Path) -> list[str]:
    for node, events in daemons["agents"].items():
        (work / "nodes" / node / "state" / "logs").mkdir(parents=True)
        lines(work / "nodes" / node / "state" / "logs" / "events.jsonl", events)
    for job, nodes in daemons["jobs"].items():
        for node, events in nodes.items():
            (work / "nodes" / node / "state" / "jobs" / job).mkdir(parents=True)
            lines(work / "nodes" / node / "state" / "jobs" / job / "events.jsonl", events)
    for seq, record in daemons["records"].items():
        (work / "jobs" / str(seq)).mkdir(parents=True)
        lines(work / "jobs" / str(seq) / "record", record)
    for seq, attacks in daemons.get("attacks", {}).items():
        find(daemons["notes"]["requests"], seq=seq, do="submit")["hostile"] = True
        lines(work / "jobs" / str(seq) / "attacks.jsonl", attacks)
    for name, notes in daemons["notes"].items():
        (work / f"{name}.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes))
    return daemon_checker.breaches(daemon_checker.read(work, one_job.SAMPLES))


# ---- forgeries: each changes the good ones in one respect


def a_slot_is_two_runners(d: Daemons) -> None:
    d["notes"]["observed"].append({"mono": 3.0, "what": "slot", "node": "a", "slot": 1, "by": ["j1.1", "j2.2"]})


def a_node_trains_three_workers_in_two_slots(d: Daemons) -> None:
    d["records"][2] += [{**ranks(1, at, "a")[0], "pid": pid, "step": 1} for at in (2.8, 3.45) for pid in (701, 702)]


def a_job_that_was_taken_never_ends(d: Daemons) -> None:
    d["notes"]["observed"].remove(find(d["notes"]["observed"], what="ending", number=1))


def a_job_is_taken_twice(d: Daemons) -> None:
    d["notes"]["observed"].append({"mono": 2.4, "what": "submission", "seq": 2, "job": "j2", "number": 3})


def an_ending_changes(d: Daemons) -> None:
    d["notes"]["observed"].append({**find(d["notes"]["observed"], number=1, what="ending"), "outcome": "failed"})


def a_cancel_is_forgotten(d: Daemons) -> None:
    find(d["notes"]["observed"], number=2, what="ending")["outcome"] = "failed"


def a_job_fails_by_our_faults(d: Daemons) -> None:
    find(d["notes"]["observed"], number=1, what="ending")["outcome"] = "failed"


def nobody_has_cancelled_it(d: Daemons) -> None:
    find(d["notes"]["observed"], number=1, what="ending")["outcome"] = "cancelled"


def a_job_trains_after_it_has_succeeded(d: Daemons) -> None:
    d["records"][1].append({**ranks(3, 6.5, "a b")[1], "begins": [3, 6]})


def a_cancelled_job_trains_on(d: Daemons) -> None:
    d["records"][2].append({**ranks(1, 90.0, "a")[0], "step": 1, "samples": [], "epoch": 0})


def a_runner_is_lost_with_its_agent(d: Daemons) -> None:
    d["agents"]["a"].append(runner("runner_ended", "j1", 1, 3.5, "was killed", outcome="lost"))


def a_node_is_lost_with_its_agent(d: Daemons) -> None:
    find(d["jobs"]["j1.1"]["a"], kind="round_published", round=3)["lost"] = ["a"]


def a_runner_is_sent_away(d: Daemons) -> None:
    find(d["agents"]["a"], kind="runner_stop_requested")["reason"] = "job j2: stopping its runner: a has 0 slots now"


def a_round_is_not_shown(d: Daemons) -> None:
    d["notes"]["history"][0]["rounds"].remove(shown(2))


def a_cancelled_jobs_round_is_not_shown(d: Daemons) -> None:
    d["notes"]["history"].append({"mono": 6.5, "job": "j2", "number": 2, "rounds": []})


def a_round_is_shown_without_a_reason(d: Daemons) -> None:
    d["notes"]["history"][0]["rounds"][1]["reason"] = ""


def an_agent_leaves_badly(d: Daemons) -> None:
    d["notes"]["left"][1]["code"] = -9


def something_is_left(d: Daemons) -> None:
    d["notes"]["end"][0]["left"].append("a: process 7 elasticd-owner")


def nobody_has_looked_what_is_left(d: Daemons) -> None:
    d["notes"]["end"].clear()


def it_ends_too_early(d: Daemons) -> None:
    d["notes"]["requests"][0]["steps"] = 9


def a_sample_is_lost(d: Daemons) -> None:
    find(d["records"][1], round=1, step=3, rank=1)["samples"] = []


def an_attack_works(d: Daemons) -> None:
    d["attacks"] = {2: [*ATTEMPTS, {**ATTEMPTS[0], "on": "/token", "worked": True}]}


def no_attack_of_a_kind(d: Daemons) -> None:
    d["attacks"] = {2: ATTEMPTS[1:]}


def an_agent_is_large(d: Daemons) -> None:
    d["notes"]["observed"].append({"mono": 4.0, "what": "memory", "node": "a", "pid": 7, "bytes": 485_000_000})


def a_failure_exits_with_0(d: Daemons) -> None:
    ending = find(d["notes"]["observed"], number=2, what="ending")
    ending["exit_code"] = 0


def a_worker_dies_by_itself(d: Daemons) -> None:
    died = event("worker_exited", 2, 3.0, "rank 1 was killed by SIGKILL", pid=200, signal=9, requested=False)
    d["jobs"]["j1.1"]["a"].append(died)


def a_healthy_job_hangs(d: Daemons) -> None:
    d["jobs"]["j1.1"]["a"].append(event("hang_detected", 2, 3.0, "rank 1 sleeps"))


ATTEMPTS = [{"mono": 3.0, "what": what, "on": "x", "worked": False} for what in ATTACKS]

FORGERIES: dict[Callable[[Daemons], None], str] = {
    a_slot_is_two_runners: "no slot has two runners: slot 1 of a is j1.1 and j2.2's at once",
    a_node_trains_three_workers_in_two_slots: "no node trains more workers than slots: a has 2 slots",
    a_job_that_was_taken_never_ends: "no submission is lost: job j1 was submitted as number 1 and never ended",
    a_job_is_taken_twice: "no submission runs twice: submission 2 became numbers [2, 3]",
    an_ending_changes: "endings stay: j1.1 ended more than once: succeeded: done; then failed: done",
    a_cancel_is_forgotten: "a cancel wins: job j2 was cancelled, and has failed",
    a_job_fails_by_our_faults: "jobs succeed: j1.1 has failed",
    nobody_has_cancelled_it: "jobs succeed: j1.1 has cancelled",
    a_job_trains_after_it_has_succeeded: "nobody trains after the end: j1.1 has succeeded, and pid 301 on b trained",
    a_cancelled_job_trains_on: "nobody trains after the end: j2.2 has cancelled, and pid 100 on a trained in round 1",
    a_runner_is_lost_with_its_agent: "only the killed are lost: a: was killed, without a fault there",
    a_node_is_lost_with_its_agent: "only the killed are lost: j1.1 lost a in round 3, without a fault there",
    a_runner_is_sent_away: "nobody is sent away for nothing: a: job j2: stopping its runner: a has 0 slots now",
    a_round_is_not_shown: "histories are whole: j1.1 had rounds [2], which its history does not show",
    a_cancelled_jobs_round_is_not_shown: "histories are whole: j2.2 had rounds [1], which its history does not show",
    a_round_is_shown_without_a_reason: "histories are whole: j1.1: its history has no reason for round 2",
    an_agent_leaves_badly: "agents leave well: the agent of b was stopped and ended with -9",
    something_is_left: "nothing is left: a: process 7 elasticd-owner",
    nobody_has_looked_what_is_left: "nothing is left: the end was not recorded",
    it_ends_too_early: "j1.1: it should end after step 9, and ended after 8",
    a_failure_exits_with_0: "jobs succeed: j2.2 has cancelled with exit code 0",
    a_worker_dies_by_itself: "only the killed die: j1.1: rank 1 was killed by SIGKILL (pid 200 on a), without a fault",
    a_healthy_job_hangs: "only the stopped hang: j1.1: rank 1 sleeps, without a fault",
    an_attack_works: "attacks fail: hostile job 2 did what it must not: read file, /token",
    no_attack_of_a_kind: "attacks fail: no hostile job tried: read file",
    an_agent_is_large: "agents stay small: the agent of a had 485 MB",
    a_sample_is_lost: "j1.1: no sample lost or repeated: epoch 0: 1 samples were never trained on",
}


def test_good_fleet_has_no_breach(tmp_path: Path) -> None:
    assert judged(good(), tmp_path) == []


def test_hostile_job_may_harm_itself(tmp_path: Path) -> None:
    fleet = good()
    fleet["attacks"] = {1: ATTEMPTS}
    find(fleet["notes"]["observed"], number=1, what="ending")["outcome"] = "failed"
    assert judged(fleet, tmp_path) == []


def test_round_that_only_a_silent_node_knows_is_no_breach(tmp_path: Path) -> None:
    fleet = good()
    a_cancelled_jobs_round_is_not_shown(fleet)
    fleet["notes"]["history"][-1]["unreachable"] = ["a"]
    assert judged(fleet, tmp_path) == []


def test_worker_that_writes_one_line_has_ended(tmp_path: Path) -> None:
    fleet = good()
    fleet["records"][2] += [{**ranks(1, at, "a")[0], "pid": pid, "step": 1} for pid, at in ((701, 2.8), (702, 2.9))]
    assert not any("more workers than slots" in breach for breach in judged(fleet, tmp_path))


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_broken_promise_is_named(forge: Callable[[Daemons], None], tmp_path: Path) -> None:
    daemons = good()
    forge(daemons)
    found = judged(daemons, tmp_path)
    assert any(breach.startswith(FORGERIES[forge]) for breach in found), found


@pytest.mark.parametrize(
    ("node", "full_from", "excused"),
    [("b", 6.0, True), ("b", 2.7, True), ("a", 1.2, False), ("b", 6.5, False)],
    ids=["at-the-end", "when-a-runner-was-killed", "with-later-lines", "after-the-end"],
)
def test_full_disk_excuses_last_lines(node: str, full_from: float, excused: bool, tmp_path: Path) -> None:
    fleet = good()
    one_job.nobody_sees_the_end({"agents": fleet["jobs"]["j1.1"]})
    a_round_is_shown_without_a_reason(fleet)
    fault = {"mono": full_from, "what": "full disk", "number": 2, "detail": f"{node} for 0.5 s"}
    fleet["notes"]["faults"].append(fault)
    assert (judged(fleet, tmp_path) == []) is excused


@pytest.mark.parametrize(("full_from", "breaches"), [(4.8, 0), (4.4, 0), (2.0, 1)])
def test_runner_that_starts_on_a_full_disk_may_crash(full_from: float, breaches: int) -> None:
    ended = runner("runner_ended", "j1", 1, 5.2, "crashed", outcome="lost")
    fault = {"mono": full_from, "what": "full disk", "number": 2, "detail": "b for 0.6 s"}
    logs = daemon_checker.FleetLogs((), {"b": (started("j1", 1, 4.9), ended)}, {"faults": (fault,)})
    assert len([*daemon_checker.only_the_killed_are_lost(logs)]) == breaches
