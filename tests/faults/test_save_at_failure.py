"""A rank that survives a fault saves the state of its last step: no step is trained again, and no bit differs."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import SCRIPTS, Fault, Job, comm_of, descendants, until
from tests.faults.nodes import Nodes
from tests.library.checkpoints import verified_lineage


def digests(run: Job, what: str, rank: int = 0) -> list[tuple[int, int, str]]:
    """(round, step, digest of the state) in order."""
    path = run.work / f"{what}-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(round_), int(step), found) for round_, step, found in (line.split() for line in lines)]


def assert_undisturbed(run: Job, whole: Job, rank: int) -> None:
    """The run has trained each step of the whole one, and each state that it had or resumed from is that one's."""
    expected = {(step, found) for _, step, found in digests(whole, "steps", rank)}
    noted = {(step, found) for what in ("steps", "restored") for _, step, found in digests(run, what, rank)}
    assert noted == expected


def assert_no_step_twice(run: Job, rank: int = 0, since: int = 1) -> None:
    """`since`: the first round that counts."""
    trained = [step for round_, step, _ in digests(run, "steps", rank) if round_ >= since]
    assert trained == sorted(set(trained)), "a step was trained twice"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The run without a fault."""
    run = Job(tmp_path_factory.mktemp("whole"), "donor.py", "--steps", "60", flags=["--checkpoint-dir", "checkpoints"])
    try:
        assert run.wait() == 0
    finally:
        run.end()
    return run


def test_state_saved_at_a_fault_equals_that_of_an_undisturbed_run(job: StartJob, whole: Job) -> None:
    """One fault after the other: a rank is killed, again one step later, rank 0 is killed, each is killed before it has
    finished a step that the other one has finished, one exits, one raises, rank 0 is killed when it has finished a
    step that the other one has not finished.
    """
    faults = [Fault(1, 13, "SIGKILL"), Fault(1, 14, "SIGKILL", 2), Fault(0, 27, "SIGKILL"), Fault(1, 45, "exit 3")]
    faults += [Fault(0, 57, "SIGKILL")]
    saved = [(12, 0), (13, 0), (26, 1), (33, 0), (38, 1), (44, 0), (51, None), (56, 1)]
    flags = ["--checkpoint-dir", "checkpoints"]
    behind = ["--die-behind", "1,33", "0,38"]
    run = job("donor.py", "--steps", "60", "--fail-at", "7,1,52", "--lag", "1,56", *behind, faults=faults, flags=flags)
    assert run.wait() == 0
    found = run.events("resumed")
    for (step, rank), event in zip(saved, found, strict=True):
        assert event["step"] == step
        assert f"from step {step} of round" in event["reason"]
        assert "after the fault" in event["reason"]
        assert rank is None or f"saved by rank {rank} " in event["reason"]
    for rank in (0, 1):
        assert_undisturbed(run, whole, rank)
        assert [step for _, step, _ in digests(run, "restored", rank)] == [step for step, _ in saved]
        assert_no_step_twice(run, rank)


@pytest.mark.system
def test_state_from_which_no_restart_progresses_is_left_for_an_older_one(job: StartJob) -> None:
    """The state that was saved at the fault may be the fault: with NaN in it, say."""
    flags = ["--checkpoint-dir", "checkpoints"]
    run = job("donor.py", "--steps", "40", "--every", "10", "--fail-at", "1,1,13", "--poisoned", "12", flags=flags)
    assert run.wait() == 0
    steps = [event["step"] for event in run.events("resumed")]
    assert steps == [12, 10]


@pytest.mark.system
def test_state_that_was_no_cause_is_what_the_next_run_resumes_from(job: StartJob, tmp_path: Path) -> None:
    """No restart can train, as the data are away for a moment, say: neither from the newest state nor from an older."""
    flags = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    faults = [Fault(1, step, "exit 3", number) for number, step in enumerate((23, 21, 16, 16), start=1)]
    run = job("resume.py", "--steps", "30", faults=faults, flags=flags)
    assert run.wait() == 1
    assert [event["step"] for event in run.events("resumed")] == [20, 15, 15]
    again = job("resume.py", "--steps", "30", flags=flags)
    assert again.wait() == 0
    assert again.event("resumed")["step"] == 20


@pytest.mark.system
def test_ranks_save_at_a_fault_after_the_writer_has_died(job: StartJob) -> None:
    """Its successor is started by the ranks themselves."""
    run = job("donor.py", "--steps", "100000", flags=["--checkpoint-dir", "checkpoints"])
    run.step(5)
    first = run.helper("writer")
    os.kill(first, signal.SIGKILL)
    until(lambda: writers(run) - {first}, "its successor")
    run.step(digests(run, "steps")[-1][1] + 5)
    run.kill(1, round=1)
    resumed = run.event("resumed", round=2)
    assert "after the fault" in resumed["reason"]
    run.step(resumed["step"] + 5, round=2)
    noted = {step: found for _, step, found in digests(run, "steps")}
    assert [noted[step] == found for _, step, found in digests(run, "restored")] == [True]
    assert_no_step_twice(run)
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM


def writers(run: Job) -> set[int]:
    return {pid for pid in descendants(run.pid) if comm_of(pid) == "elasticd-writer"}


IMPATIENT: dict[str, Any] = {"command": [str(SCRIPTS / "impatient.py")]}
HANGS = ["--hang-floor", "1500ms", "--evidence-timeout", "1s"]


@pytest.mark.system
@pytest.mark.parametrize(
    ("faults", "args", "flags", "workers", "saved"),
    [
        pytest.param([Fault(1, 13, "stop")], [], HANGS, "2", 12, id="hang"),
        pytest.param([Fault(0, 13, "SIGSTOP")], [], HANGS, "2", 12, id="stopped"),
        pytest.param([Fault(3, 13, "SIGKILL")], [], [], "4", 12, id="one-of-four"),
        pytest.param([Fault(0, 13, "SIGKILL"), Fault(2, 13, "SIGKILL")], [], [], "4", 12, id="two-of-four-at-once"),
        pytest.param([Fault(1, 13, "SIGKILL")], ["--die-in-copy=-1,12"], [], "3", 12, id="donor-killed-in-the-copy"),
        pytest.param([], ["--die-in-copy", "0,10"], [], "2", 10, id="rank-0-killed-in-the-copy-of-a-save"),
        pytest.param([], ["--die-in-copy", "1,10"], [], "2", 10, id="rank-1-killed-in-the-copy-of-a-save"),
        pytest.param([Fault(1, 13, "SIGKILL")], ["--slow-copy", "0,12"], [], "2", 12, id="donor-copies-slowly"),
        pytest.param([Fault(0, 13, "SIGKILL"), Fault(1, 13, "SIGKILL")], [], [], "2", None, id="all"),
        pytest.param([Fault(0, 13, "gil"), Fault(1, 13, "SIGKILL")], [], [], "2", None, id="survivor-holds-the-GIL"),
        pytest.param([Fault(0, 13, "SIGSTOP"), Fault(1, 13, "SIGKILL")], [], [], "2", None, id="survivor-is-stopped"),
    ],
)
def test_any_survivor_saves_and_without_one_the_last_save_is_used(
    job: StartJob, whole: Job, faults: list[Fault], args: list[str], flags: list[str], workers: str, saved: int | None
) -> None:
    how = {"faults": faults, "workers": workers, "flags": ["--checkpoint-dir", "checkpoints", *flags]}
    run = job("donor.py", "--steps", "30", "--every", "5", *args, **how, **(IMPATIENT if flags else {}))
    assert run.wait() == 0
    if args:
        assert (run.work / "in_copy").exists()
    (resumed,) = run.events("resumed")
    if saved is None:
        assert (resumed["step"], "after the fault" in resumed["reason"]) == (10, False)
    else:
        assert (resumed["step"], "after the fault" in resumed["reason"]) == (saved, True), run.err
    for rank in range(int(workers)):
        reference = digests(whole if workers == "2" else run, "steps", rank)
        noted = {step: found for round_, step, found in reference if round_ == 1}
        ((_, step, found),) = digests(run, "restored", rank)
        assert noted[step] == found
        if saved is not None:
            assert_no_step_twice(run, rank)


@pytest.mark.system
def test_random_state_of_another_node_outlives_two_faults(
    nodes: Callable[[str], Nodes], tmp_path: Path, whole: Job
) -> None:
    """The state that the other node's rank saves lacks it. In the second round none is saved: no step is done."""
    both = nodes("2:2")
    how: dict[str, Any] = {"flags": ["--checkpoint-dir", str(tmp_path / "checkpoints")], "warm": True}
    how["env"] = {"OMP_NUM_THREADS": "1"}  # as with two workers on these cores
    faults = [Fault(1, 13, "SIGKILL", times=2)]
    agents = [both.agent("a", "donor.py", "--steps", "20", **how)]
    agents[0].event("waiting")  # it has rank 0 then
    agents.append(both.agent("b", "donor.py", "--steps", "20", **how, faults=faults))
    assert [agent.wait(within=120) for agent in agents] == [0, 0]
    resumed = agents[0].events("resumed")
    assert [(event["step"], event["from_round"]) for event in resumed] == [(12, 1), (12, 2)]
    for rank, agent in enumerate(agents):
        expected = {step: found for _, step, found in digests(whole, "steps", rank) if step <= 20}
        for what in ("steps", "restored"):
            noted = digests(agent, what, rank)
            assert noted == [(round_, step, expected[step]) for round_, step, _ in noted]


@pytest.mark.system
def test_lost_node_costs_no_step(nodes: Callable[[str], Nodes], tmp_path: Path) -> None:
    three = nodes("2:3")
    shared = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    for node in "abc":
        three.agent(node, "donor.py", "--steps", "200", flags=shared, warm=True)
    first = three.agents[0]
    whole = until(lambda: first.events("round_published", world_size=3), "three nodes")[0]
    first.event("first_step", round=whole["round"])
    lost = next(agent for agent, node in zip(three.agents, "abc", strict=True) if node == whole["nodes"][-1])
    for pid in [lost.pid, *lost.processes()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    left = [agent for agent in three.agents if agent is not lost]
    rank0 = three.agents["abc".index(whole["nodes"][0])]
    # The others may meet once more with the lost node, before its agent is known to be lost as well.
    resumed = until(
        lambda: [event for event in rank0.events("resumed") if event["round"] > whole["round"]],
        lambda: f"the next round after {whole}; {rank0.err}",
    )[0]
    assert "after the fault" in resumed["reason"]
    assert [agent.wait(within=120) for agent in left] == [0, 0]
    for agent in left:
        for rank in (0, 1):
            assert_no_step_twice(agent, rank, since=whole["round"])
    noted = {step: found for _, step, found in digests(rank0, "steps", 0)}
    restored = {step: found for round_, step, found in digests(rank0, "restored", 0) if round_ > whole["round"]}
    assert all(noted[step] == found for step, found in restored.items())


@pytest.mark.system
@pytest.mark.parametrize("position", [0, -1], ids=["of rank 0", "of the last rank"])
def test_drained_node_costs_no_step(nodes: Callable[[str], Nodes], tmp_path: Path, position: int) -> None:
    """It leaves at a pause: nothing is lost, and no rank has to save its state after the fault."""
    three = nodes("2:3")
    shared = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    agents = {node: three.agent(node, "donor.py", "--steps", "400", flags=shared, warm=True) for node in "abc"}
    first = three.agents[0]
    whole = until(lambda: first.events("round_published", world_size=3), "three nodes")[0]
    first.event("first_step", round=whole["round"])
    drained = agents[whole["nodes"][position]]
    drained.process.send_signal(signal.SIGTERM)
    left = [agent for agent in three.agents if agent is not drained]
    assert drained.wait(within=60) == 128 + signal.SIGTERM
    assert [agent.wait(within=120) for agent in left] == [0, 0]
    noted = [digests(agent, "steps", rank) for agent in three.agents for rank in range(3)]
    for rank in range(3):
        trained = sorted(step for each in noted[rank::3] for round_, step, _ in each if round_ >= whole["round"])
        assert trained == sorted(set(trained)), "a step was trained twice"


@pytest.mark.system
def test_eviction_that_ends_in_a_kill_costs_no_step(job: StartJob, tmp_path: Path, whole: Job) -> None:
    """A rank hangs, so that no rank can stop. The others' last step becomes a checkpoint before they are killed."""
    directory = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    hangs = {"faults": [Fault(1, 13, "stop")], "flags": [*directory, "--shutdown-timeout", "1"]}
    evicted = job("donor.py", "--steps", "60", "--every", "5", **hangs)
    until(lambda: (evicted.work / "fired").exists(), "the hang")
    until(lambda: digests(evicted, "steps", 0)[-1][1] == 12, "the last step")
    evicted.process.terminate()
    assert evicted.wait() == 128 + signal.SIGTERM
    assert "did not stop in time" in evicted.err
    assert evicted.event("job_ended")["reason"] == "stopped by SIGTERM; the next run resumes from step 12"
    again = job("donor.py", "--steps", "20", flags=directory)
    assert again.wait() == 0
    (resumed,) = again.events("resumed")
    assert resumed["step"] == 12
    expected = {step: found for _, step, found in digests(whole, "steps") if step <= 20}
    assert all(expected[step] == found for _, step, found in digests(again, "steps"))


@pytest.mark.system
def test_script_that_does_not_stop_trains_no_step_that_is_lost(job: StartJob, tmp_path: Path) -> None:
    """It is saved when its time is over, and killed a moment later."""
    directory = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    deaf = job("donor.py", "--steps", "100000", flags=[*directory, "--shutdown-timeout", "1"])
    until(lambda: digests(deaf, "steps", 0)[-1:] and digests(deaf, "steps", 0)[-1][1] >= 20, "some steps")
    deaf.process.terminate()
    assert deaf.wait() == 128 + signal.SIGTERM
    last = max(digests(deaf, "steps", rank)[-1][1] for rank in (0, 1))
    assert f"not saved step {last}" not in deaf.err
    again = job("donor.py", "--steps", str(last + 3), flags=directory)
    assert again.wait() == 0
    assert [event["step"] for event in again.events("resumed")] == [last]


def test_stop_right_after_a_fault_names_the_step_that_it_has_saved(job: StartJob, tmp_path: Path) -> None:
    """The state that the ranks have resumed from is written beside it, and may be complete after it."""
    flags = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    run = job("donor.py", "--steps", "100000", "--every", "10", faults=[Fault(1, 13, "SIGKILL")], flags=flags)
    until(lambda: run.events("resumed"), "the second round")
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM
    last = max(int(path.name.rpartition("-s")[2]) for path in (tmp_path / "checkpoints").glob("r*-s*"))
    assert run.event("job_ended")["reason"].endswith(f"; the next run resumes from step {last}")


@pytest.mark.system
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_stop_without_a_checkpoint_costs_no_step(job: StartJob, tmp_path: Path, signum: signal.Signals) -> None:
    """By Ctrl-C every rank gets a KeyboardInterrupt, or loses a peer to one; SIGHUP ends all of them at once."""
    directory = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    stopped = job("donor.py", "--steps", "60", "--every", "5", faults=[Fault(1, 13, "stop")], flags=directory)
    until(lambda: (stopped.work / "fired").exists(), "the step before which rank 1 waits")
    until(lambda: digests(stopped, "steps", 0)[-1][1] == 12, "the last step")
    stopped.process.send_signal(signum)
    assert stopped.wait() == 128 + signum
    assert stopped.event("job_ended")["reason"].endswith("; the next run resumes from step 12")
    again = job("donor.py", "--steps", "20", flags=directory)
    assert again.wait() == 0
    assert [event["step"] for event in again.events("resumed")] == [12]


@pytest.mark.system
@pytest.mark.parametrize(
    ("faults", "args", "flags", "last"),
    [
        pytest.param([Fault(1, 13, "SIGKILL")], [], ["--max-restarts", "0"], 12, id="killed"),
        pytest.param([Fault(0, 13, "SIGKILL")], [], ["--max-restarts", "0"], 12, id="rank-0-killed"),
        pytest.param([], ["--fail-at", "1,1,13"], ["--max-restarts", "0"], 12, id="raised"),
        pytest.param([Fault(1, 13, "stop")], [], ["--max-restarts", "0", *HANGS], 12, id="hang"),
        pytest.param([Fault(0, 13, "SIGKILL"), Fault(1, 13, "SIGKILL")], [], ["--max-restarts", "0"], 10, id="all"),
    ],
)
def test_last_step_of_a_job_that_gives_up_is_a_checkpoint(
    job: StartJob, tmp_path: Path, whole: Job, faults: list[Fault], args: list[str], flags: list[str], last: int
) -> None:
    directory = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    how: dict[str, Any] = IMPATIENT if HANGS[0] in flags else {}
    run = job("donor.py", "--steps", "60", "--every", "5", *args, faults=faults, flags=[*directory, *flags], **how)
    assert run.wait() == 1
    ended = run.event("job_ended", outcome="failed")
    assert ended["reason"].endswith(f"; the next run resumes from step {last}")
    again = job("donor.py", "--steps", "20", flags=directory)
    assert again.wait() == 0
    assert [event["step"] for event in again.events("resumed")] == [last]
    expected = {step: found for _, step, found in digests(whole, "steps") if step <= 20}
    assert all(expected[step] == found for _, step, found in digests(again, "steps"))


@pytest.mark.system
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_stop_of_ranks_that_train_costs_no_step(
    job: StartJob, tmp_path: Path, signum: signal.Signals, workers: str
) -> None:
    """SIGHUP ends a rank where it is: from its save on it trains no further."""
    for _ in range(3):
        run = job("donor.py", "--steps", "100000", workers=workers, flags=["--checkpoint-dir", str(tmp_path)])
        start = max((entry.manifest.step for entry in verified_lineage(tmp_path)[0]), default=0)
        until(lambda run=run, start=start: digests(run, "steps") and digests(run, "steps")[-1][1] > start + 20, "steps")
        run.process.send_signal(signum)
        assert run.wait() == 128 + signum
        last = max(digests(run, "steps", rank)[-1][1] for rank in range(int(workers)))
        assert max(entry.manifest.step for entry in verified_lineage(tmp_path)[0]) in (last, last + 1)


@pytest.mark.parametrize(
    ("args", "faults", "signum"),
    [
        pytest.param([], [Fault(0, 13, "stop")], signal.SIGINT, id="Ctrl-C"),
        pytest.param(["--plain"], [Fault(0, 13, "stop")], signal.SIGTERM, id="deaf", marks=pytest.mark.system),
        pytest.param(["--plain", "--fail-at", "1,0,13"], [], None, id="exception", marks=pytest.mark.system),
    ],
)
def test_rank_alone_saves_its_last_step(
    job: StartJob, tmp_path: Path, args: list[str], faults: list[Fault], signum: signal.Signals | None
) -> None:
    """Nobody else has its state, with or without DistributedDataParallel."""
    how: dict[str, Any] = {"workers": "1", "flags": ["--checkpoint-dir", str(tmp_path), "--shutdown-timeout", "1"]}
    first = run = job("donor.py", "--steps", "20", *args, faults=faults, **how)
    if signum is not None:
        first.file("fired")
        first.process.send_signal(signum)
        assert first.wait() == 128 + signum
        run = job("donor.py", "--steps", "20", *args[:1], **how)
    assert run.wait() == 0
    (resumed,) = run.events("resumed")
    assert resumed["step"] == 12
    assert digests(run, "restored")[0][2] == next(found for _, step, found in digests(first, "steps") if step == 12)


@pytest.mark.system
def test_node_alone_saves_its_last_step_where_it_leaves_without_a_store(
    nodes: Callable[[str], Nodes], tmp_path: Path
) -> None:
    """As where the store's host has left before it: nobody publishes the end."""
    group = nodes("1:2")
    how: dict[str, Any] = {"flags": ["--checkpoint-dir", str(tmp_path), "--shutdown-timeout", "2"], "warm": True}
    run = group.agent("a", "donor.py", "--steps", "100000", **how)
    run.step(13)
    group.etcd.stop()
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM
    (last,) = [step for _, step, _ in digests(run, "steps")][-1:]
    assert max(entry.manifest.step for entry in verified_lineage(tmp_path)[0]) == last
    group.etcd.cont()


@pytest.mark.system
@pytest.mark.parametrize("ends", ["with", "close", "sys.exit"])
def test_way_a_script_ends_after_an_exception_costs_no_step(job: StartJob, ends: str) -> None:
    """The one of a rank, and those of its peers in consequence."""
    args = ["--steps", "30", "--every", "5", "--ends", ends, "--fail-at", "1,1,13"]
    run = job("donor.py", *args, flags=["--checkpoint-dir", "checkpoints"])
    assert run.wait() == 0
    (resumed,) = run.events("resumed")
    assert (resumed["step"], "after the fault" in resumed["reason"]) == (12, True), run.err


@pytest.mark.system
@pytest.mark.parametrize("names", ["ab", "abc"])
@pytest.mark.parametrize("dies", [0, 1])
def test_last_step_of_several_nodes_is_a_checkpoint(
    nodes: Callable[[str], Nodes], tmp_path: Path, names: str, dies: int
) -> None:
    """On rank 0's node or on another one: whichever has it."""
    every = nodes(f"{len(names)}:{len(names)}")
    flags = ["--checkpoint-dir", str(tmp_path / "checkpoints"), "--max-restarts", "0"]
    how: dict[str, Any] = {"flags": flags, "warm": True}
    agents = []
    for rank, node in enumerate(names):
        faults = [Fault(rank, 13, "SIGKILL")] if rank == dies else []
        agents.append(every.agent(node, "donor.py", "--steps", "60", "--every", "5", faults=faults, **how))
        if rank < len(names) - 1:
            until(lambda node=node: every.registered(node), f"{node} is registered")  # ranks follow this order
    assert [agent.wait(within=120) for agent in agents] == [1] * len(names)
    for agent in agents:
        assert agent.event("job_ended")["reason"].endswith("; the next run resumes from step 12")
    assert {entry.manifest.step for entry in verified_lineage(tmp_path / "checkpoints")[0]} == {12, 10, 5}


@pytest.mark.system
def test_last_step_outlives_the_loss_of_rank_0s_node(
    nodes: Callable[[str], Nodes], job: StartJob, tmp_path: Path
) -> None:
    flags = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    lose_rank_0s_node(nodes("2:2"), {"flags": flags}, {"flags": flags})
    again = job("donor.py", "--steps", "20", flags=flags)
    assert again.wait() == 0
    assert [event["step"] for event in again.events("resumed")] == [12]


def lose_rank_0s_node(both: Nodes, first: dict[str, Any], other: dict[str, Any]) -> None:
    """All its processes are killed at once, and the other node is stopped while it waits for another one."""
    how: dict[str, Any] = {"warm": True, "faults": [Fault(0, 13, "stop")]}
    agents = [both.agent("a", "donor.py", "--steps", "60", "--every", "5", **how, **first)]
    agents[0].event("waiting")
    agents.append(both.agent("b", "donor.py", "--steps", "60", "--every", "5", warm=True, **other))
    until(lambda: (agents[0].work / "fired").exists(), "the fault", within=60)
    for pid in agents[0].processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agents[0].end()
    agents[1].event("group_ended")
    agents[1].process.terminate()
    assert agents[1].wait() == 128 + signal.SIGTERM


@pytest.mark.system
def test_evicted_node_that_is_killed_costs_the_others_no_step(nodes: Callable[[str], Nodes], tmp_path: Path) -> None:
    three = nodes("2:3")
    flags = ["--checkpoint-dir", str(tmp_path / "checkpoints"), "--shutdown-timeout", "1"]
    faults = [Fault(2, 200, "stop")]
    for node in "abc":
        three.agent(node, "donor.py", "--steps", "240", flags=flags, faults=faults, warm=True)
    whole = until(lambda: three.agents[0].events("round_published", world_size=3), "three nodes")[0]
    evicted = three.agents["abc".index(whole["nodes"][2])]
    until(lambda: (evicted.work / "fired").exists(), "the hang", within=120)
    evicted.process.terminate()
    assert evicted.wait(within=60) == 128 + signal.SIGTERM
    assert "the next run" not in evicted.event("job_ended", outcome="left")["reason"]  # this one goes on
    left = [agent for agent in three.agents if agent is not evicted]
    for agent in left:
        agent.faults = ()  # only the node of rank 2 has it
    assert [agent.wait(within=120) for agent in left] == [0, 0]
    reasons = [event["reason"] for agent in left for event in agent.events("resumed", step=199)]
    assert len(reasons) == 1 and "after the fault" in reasons[0]
    for agent in left:
        for rank in (0, 1):
            assert_no_step_twice(agent, rank)
