"""Workers that keep their process from one round to the next, with a real owner and a template without torch."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticd_agent.model.messages import GroupEnded, PeerLost, WorkerExited
from elasticd_agent.model.records import Member, Round
from elasticd_agent.system.processes import procfs
from elasticd_agent.workers.events import GroupStarted, NewcomerEnded, NewcomerReady, StartModeKnown
from elasticd_agent.workers.groups import KeepRequest, KeptWorker
from elasticd_agent.workers.launcher import messages
from elasticd_agent.workers.launcher.owner_client import OwnerLost
from elasticd_agent.workers.launcher.requests import PreloadPlan, WorkerSpec
from elasticd_agent.workers.warm_launcher import FORK_DEADLINE_S
from tests.library.conftest import wait_for
from tests.workers.test_manager import NO_STORE, Node, StartNode, node

__all__ = ["node"]
SCRIPT = Path(__file__).parent / "scripts" / "entering.py"
ALL = KeepRequest((0, 1, 2), 20.0, "rank 1 was killed")


class Job:
    """Three workers of one node, which have entered unless `different` says otherwise."""

    def __init__(self, work: Path, node: StartNode, **different: list[int]) -> None:
        self.work, self.sentences = work, list[str]()
        script, args = SCRIPT, (str(work), json.dumps(different))
        self.node: Node = node("a", *args, entrypoint=script, preload=PreloadPlan())
        self.node.workers.set_listener(self)
        self.enters = [rank for rank in range(3) if rank not in different.get("plain", []) + different.get("foul", [])]
        self.pids = self.start(1, 0, 1, 2).pids
        self.node.wait(lambda: len(self.reported(messages.Entered)) == len(self.enters) or None, "Entered")

    def log(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def on(self, event: StartModeKnown, now: float) -> None:
        pass

    def reported(self, kind: type) -> list[Any]:
        return [report for report in self.node.reports if isinstance(report, kind)]

    def start(self, number: int, *slots: int) -> GroupStarted:
        """Start a round on these slots; its workers run when this returns."""
        round = Round(number, (Member("a", "a", slots),))
        self.node.start(round, NO_STORE)
        started = self.node.until(GroupStarted)
        for rank, pid in enumerate(started.pids):
            wait_for(lambda rank=rank: self.written(number, rank), f"rank {rank} in round {number}")  # type: ignore[misc]
            assert self.written(number, rank) == str(pid)
        self.node.workers.park(3, with_store=False)
        return started

    def written(self, number: int, rank: int) -> str:
        """By a rank that has begun the round: its process."""
        path = self.work / f"entered-{number}-{rank}"
        return path.read_text() if path.exists() else ""

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], signal.SIGKILL)
        self.node.until(WorkerExited)

    def end(self, keep: KeepRequest = ALL, number: int = 1) -> GroupEnded:
        assert self.node.workers.signal(number, signal.SIGKILL, save=True, keep=keep) == []
        return self.node.until(GroupEnded)

    def begin_ahead(self, slot: int) -> int:
        """The pid of a newcomer, which waits for the file `come` before its entry."""
        spec = self.node.group(Round(9, (Member("a", "a", (slot,)),)))[0]
        self.node.workers.release_ahead({slot: replace(spec, env={**spec.env, "ELASTICD_NEWCOMER": "1"})})
        assert self.node.workers.newcomer_slots == {slot}
        self.node.report(messages.ReleasedAhead)
        wait_for(lambda: (self.work / "newcomer").exists() and (self.work / "newcomer").read_text(), "its start")
        return int((self.work / "newcomer").read_text())

    def exits(self) -> dict[int, str]:
        return {exit.rank: exit.status.text for exit in self.node.received if isinstance(exit, WorkerExited)}


StartJob = Callable[..., Job]


@pytest.fixture
def job(node: StartNode, tmp_path: Path) -> StartJob:
    return lambda **different: Job(tmp_path, node, **different)


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def is_alive(pid: int) -> bool:
    """False for one that is not reaped yet."""
    return procfs.state(pid) not in ("", "Z")


def test_survivors_keep_their_process_in_round_after_round(job: StartJob) -> None:
    """One slot less, so that a rank changes, and then all three again."""
    three = job()
    three.kill(1)
    assert three.end() == GroupEnded(1, (0, 2))
    assert (three.work / "why").read_text() == ALL.why
    assert three.exits() == {1: "was killed by SIGKILL"}
    second = three.start(2, 0, 2)
    assert second.pids == [three.pids[0], three.pids[2]] and second.kept_ranks == (0, 1)
    assert three.end(number=2) == GroupEnded(2, (0, 1))
    third = three.start(3, 0, 1, 2)
    assert third.kept_ranks == (0, 2)
    assert [pid in three.pids for pid in third.pids] == [True, False, True]
    assert three.sentences[1:] == []  # the first is of the launcher


def test_worker_that_has_not_entered_gets_a_new_process_at_once(job: StartJob) -> None:
    three = job(plain=[0], foul=[2])
    asked = time.monotonic()
    assert three.end() == GroupEnded(1, (1,))
    assert time.monotonic() - asked < ALL.park_s, "nobody was waited for"
    started = three.start(2, 0, 1, 2)
    assert started.kept_ranks == (1,)


def test_worker_whose_training_is_over_is_not_waited_for(job: StartJob) -> None:
    """It has said so before it was asked to leave, or the two messages crossed."""
    three = job(done=[0], **{"just done": [2]})
    three.node.report(messages.Left)
    assert three.node.workers.keepable_and_other_slots(1, ALL) == ([1, 2], [0])
    asked = time.monotonic()
    assert three.end() == GroupEnded(1, (1,))
    assert time.monotonic() - asked < ALL.park_s
    assert three.exits() == {0: "was killed by SIGKILL", 2: "was killed by SIGKILL"}
    assert three.sentences[-1].startswith("round 1: train had ended on ranks 0 and 2, by a result or an error: a new")


def test_group_that_no_rank_has_entered_ends_as_before(job: StartJob) -> None:
    three = job(plain=[0, 1, 2])
    assert three.end() == GroupEnded(1)
    assert three.exits() == dict.fromkeys(range(3), "was killed by SIGKILL")
    assert three.start(2, 0, 1, 2).kept_ranks == ()


def test_lost_peer_is_reported_and_the_worker_stays(job: StartJob) -> None:
    three = job(lost=[2])
    lost = three.node.until(PeerLost).exit
    assert (lost.rank, lost.slot, lost.still_runs) == (2, 2, True)
    assert lost.exit_report is not None and lost.exit_report.message == "closed by peer"
    assert three.end() == GroupEnded(1, (0, 1, 2))


def test_worker_that_has_lost_no_peer_is_told_so(job: StartJob) -> None:
    """It would wait for the end of a round that has no fault. Where another one ends, that is waited for."""
    three = job(lost=[2], doubted=[2])
    three.node.until(PeerLost)
    wait_for(lambda: (three.work / "answer").exists() and (three.work / "answer").read_text(), "the answer")
    assert json.loads((three.work / "answer").read_text()) == {"type": "NoFault"}
    assert three.end() == GroupEnded(1, (0, 1, 2))


def test_late_worker_is_killed_and_replaced(job: StartJob) -> None:
    three = job(late=[1])
    assert three.end(KeepRequest((0, 1), 4.0, "a fault")) == GroupEnded(1, (0,))
    assert three.exits() == {1: "was killed by SIGKILL", 2: "was killed by SIGKILL"}
    (late,) = three.reported(messages.NotParked)
    assert late.ranks == [1] and late.seconds >= 4.0
    assert re.search(r"round 1: rank 1 did not leave it within \d+\.\d s: ", three.sentences[-1])
    assert three.start(2, 0, 1, 2).kept_ranks == (0,)


def test_worker_that_dies_while_it_is_waited_for(job: StartJob) -> None:
    three = job(late=[1])
    assert three.node.workers.signal(1, signal.SIGKILL, keep=ALL) == []
    wait_for((three.work / "why").exists, "the request to leave")
    os.kill(three.pids[1], signal.SIGTERM)
    assert three.node.until(GroupEnded) == GroupEnded(1, (0, 2))
    assert three.exits() == {1: "was killed by SIGTERM"}
    why = "round 1: rank 1 was killed by SIGTERM while it left the round: a new process follows"
    assert three.sentences.count(why) == 1


def test_kill_without_grace_reaches_those_that_leave_and_those_that_have_left(job: StartJob) -> None:
    three = job(late=[1])
    three.node.workers.signal(1, signal.SIGKILL, keep=ALL)
    wait_for((three.work / "why").exists, "the request to leave")
    assert three.end(KeepRequest()) == GroupEnded(1)
    for pid in three.pids:
        wait_for(lambda pid=pid: is_gone(pid), "its end")  # type: ignore[misc]


def test_kept_process_that_dies_gets_a_new_one(job: StartJob) -> None:
    three = job()
    three.end()
    os.kill(three.pids[2], signal.SIGTERM)
    three.node.report(messages.KeptExited)
    assert three.sentences[-1] == (
        "rank 2 was killed by SIGTERM while it waited for the next round: a new process follows"
    )
    os.kill(three.pids[0], signal.SIGKILL)  # whoever hears of it first: the agent or the owner
    wait_for(lambda: not is_alive(three.pids[0]), "its end")
    started = three.start(2, 0, 1, 2)
    assert started.kept_ranks == (1,)


def test_kept_processes_that_no_round_needs_end_with_what_they_have_started(job: StartJob) -> None:
    """Until then what one of them has left behind runs on: its script may need it."""
    three = job(parent=[2])
    orphan = int((three.work / "orphan").read_text())
    three.end()
    three.start(2, 0, 2)
    wait_for(lambda: is_gone(three.pids[1]), "the end of rank 1's")
    three.end(number=2)
    assert not is_gone(orphan)
    three.start(3, 0, 1)
    for pid in (three.pids[2], orphan):
        wait_for(lambda pid=pid: is_gone(pid), "its end")  # type: ignore[misc]
    three.end(number=3)
    three.node.workers.end_kept()
    wait_for(lambda: is_gone(three.pids[0]), "the end of rank 0's")


def test_cold_start_ends_kept_processes(job: StartJob) -> None:
    """The forked group has died, and the template does not fork another one in time."""
    three = job()
    three.end()
    parked = three.node.wait(lambda: next(iter(three.reported(messages.Parked)[1:]), None), "a parked group")
    os.kill(template_of(three.node), signal.SIGSTOP)
    os.kill(parked.pids[0], signal.SIGKILL)
    three.node.report(messages.Refused)
    three.node.start(Round(2, (Member("a", "a", (0, 1, 2)),)), NO_STORE)
    three.node.workers.tick(time.monotonic() + FORK_DEADLINE_S + 1)
    started = three.node.until(GroupStarted)
    assert not started.warm and started.kept_ranks == ()
    for pid in three.pids:
        wait_for(lambda pid=pid: is_gone(pid), "its end")  # type: ignore[misc]


def template_of(node: Node) -> int:
    owner = node.owner.pid
    children = map(int, Path(f"/proc/{owner}/task/{owner}/children").read_text().split())
    return next(pid for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == "elasticd-templ")


def test_process_is_kept_on_its_own_device_only() -> None:
    def worker(**env: str) -> WorkerSpec:
        return WorkerSpec(env, None, None, "")

    on_gpu = KeptWorker(7, 1, worker(LOCAL_RANK="1", CUDA_VISIBLE_DEVICES="0,1", RANK="1"))
    assert on_gpu.can_become(worker(LOCAL_RANK="1", CUDA_VISIBLE_DEVICES="0,1", RANK="3"))
    assert not on_gpu.can_become(worker(LOCAL_RANK="0", CUDA_VISIBLE_DEVICES="0,1"))
    assert not on_gpu.can_become(worker(LOCAL_RANK="1", CUDA_VISIBLE_DEVICES="1,2"))
    assert KeptWorker(7, 1, worker(LOCAL_RANK="1")).can_become(worker(LOCAL_RANK="0"))


@pytest.mark.parametrize("dies", ["owner", "agent"])
def test_nothing_is_left_when_owner_or_agent_dies_meanwhile(job: StartJob, dies: str) -> None:
    """One is at its entry, and one is waited for."""
    three = job(late=[1])
    three.node.workers.signal(1, signal.SIGKILL, keep=ALL)
    wait_for((three.work / "why").exists, "the request to leave")
    if dies == "owner":
        os.kill(three.node.owner.pid, signal.SIGKILL)
        wait_for(lambda: isinstance(three.node.inbox.get(), OwnerLost), "the loss")
    three.node.workers.close()
    assert all(map(is_gone, three.pids))


# ---- workers that are released ahead of their round


def test_newcomer_waits_at_its_entry_for_a_round_with_its_slot(job: StartJob) -> None:
    """Rounds without the slot leave it alone, on its way and at its entry."""
    three = job()
    three.kill(1)
    three.end()
    three.start(2, 0, 2)
    newcomer = three.begin_ahead(1)
    three.end(number=2)
    three.start(3, 0, 2)
    (three.work / "come").touch()
    assert three.node.until(NewcomerReady) == NewcomerReady(1)
    assert three.node.workers.newcomer_slots == set()
    three.end(number=3)
    assert three.start(4, 0, 2).kept_ranks == (0, 1)
    three.end(number=4)
    started = three.start(5, 0, 1, 2)
    assert started.pids == [three.pids[0], newcomer, three.pids[2]] and started.kept_ranks == (0, 1, 2)
    assert three.end(number=5) == GroupEnded(5, (0, 1, 2)), "it can be kept, as any other"


def test_newcomer_on_its_way_ends_where_a_round_needs_its_slot(job: StartJob) -> None:
    three = job()
    three.kill(1)
    three.end()
    three.start(2, 0, 2)
    newcomer = three.begin_ahead(1)
    three.end(number=2)
    started = three.start(3, 0, 1, 2)
    assert started.kept_ranks == (0, 2)
    assert three.node.until(NewcomerEnded) == NewcomerEnded(1, "")
    wait_for(lambda: is_gone(newcomer), "its end")


def test_newcomer_that_dies_is_reported(job: StartJob) -> None:
    three = job()
    os.kill(three.begin_ahead(3), signal.SIGTERM)
    assert three.node.until(NewcomerEnded) == NewcomerEnded(3, "was killed by SIGTERM before session.run")
    assert three.node.workers.newcomer_slots == set()
    three.end()
    assert three.start(2, 0, 1, 2).kept_ranks == (0, 1, 2)


def test_newcomer_that_hangs_ends_and_is_reported(job: StartJob) -> None:
    """What is kept beside it stays."""
    three = job()
    three.kill(1)
    three.end()
    newcomer = three.begin_ahead(1)
    three.node.workers.tick(time.monotonic() + 300)
    assert not is_gone(newcomer)
    three.node.workers.tick(time.monotonic() + 601)
    late = NewcomerEnded(1, "did not come to session.run within 600 s", is_late=True)
    assert three.node.until(NewcomerEnded) == late
    assert three.start(2, 0, 1, 2).kept_ranks == (0, 2)


def test_newcomers_end_with_the_processes_that_are_kept(job: StartJob) -> None:
    three = job()
    newcomer = three.begin_ahead(3)
    three.node.workers.end_kept(newcomers=False)
    three.kill(1)
    assert not is_gone(newcomer)
    three.node.workers.end_kept()
    assert three.node.until(NewcomerEnded) == NewcomerEnded(3, "")
    wait_for(lambda: is_gone(newcomer), "its end")
    assert [is_gone(pid) for pid in three.pids] == [False, True, False]
