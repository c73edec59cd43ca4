"""The state that rank 0 chooses: the newest one, in memory or in the directory; never a superseded or refused one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticd.checkpointing.at_fault import step_files
from elasticd.checkpointing.choice import Choice, Chooser, OpenState, StateSource
from elasticd.checkpointing.context import SaveContext
from elasticd.checkpointing.memory.buffers import Snapshot
from elasticd.checkpointing.memory.held_states import HeldState, newest_first_key
from elasticd.checkpointing.storage.manifest import NO_CHECKSUM, Manifest
from elasticd.heartbeat.worker_events import WorkerEventWriter
from tests.library import checkpoints

State = tuple[int, int]
"""Round and step."""


def chooser(directory: Path, round: int, in_memory: list[State], opened: OpenState | None = None) -> Chooser:
    unused: Any = None
    environment: Any = SimpleNamespace(round=round, restarts_without_progress=0)
    context = SaveContext(environment, unused, unused, WorkerEventWriter(None, round, 0), unused)
    made = Chooser(context, directory, None, opened or OpenState())
    drafts = [Manifest(saved_in, step, None, 1, 8, NO_CHECKSUM, "job", "1", None, 0.0) for saved_in, step in in_memory]
    made.states = [HeldState(Snapshot(draft, draft.step, None)) for draft in drafts]
    return made


def save(directory: Path, state: State) -> None:
    checkpoints.save(
        directory,
        round=state[0],
        step=state[1],
        parent=None,
        world_size=1,
        job="job",
        run="1",
        state={"step": state[1]},
    )


def chosen(made: Chooser) -> tuple[StateSource, int, int] | None:
    choice = made.choose()
    return None if choice is None else (choice.source, choice.manifest.round, choice.step)


@pytest.mark.parametrize(
    ("in_memory", "on_disk", "expected"),
    [
        ([], [], None),
        ([(1, 10)], [], (StateSource.MEMORY, 1, 10)),
        ([(1, 10)], [(1, 5)], (StateSource.MEMORY, 1, 10)),
        ([(1, 10)], [(1, 10)], (StateSource.MEMORY, 1, 10)),
        ([(1, 10)], [(1, 15)], (StateSource.DISK, 1, 15)),
        ([(1, 10)], [(2, 5)], (StateSource.DISK, 2, 5)),  # a round that has left anything has superseded older ones
        ([(2, 10), (1, 15)], [(1, 15)], (StateSource.MEMORY, 2, 10)),
    ],
)
def test_newest_state(
    tmp_path: Path, in_memory: list[State], on_disk: list[State], expected: tuple[StateSource, int, int] | None
) -> None:
    for state in on_disk:
        save(tmp_path, state)
    opened = OpenState()
    assert chosen(chooser(tmp_path, 3, in_memory, opened)) == expected
    assert (opened.fd >= 0) == (expected is not None and expected[0] is StateSource.DISK)
    opened.close()


@pytest.mark.parametrize(
    ("held", "in_memory", "on_disk", "expected"),
    [
        ((1, 10), [], [], (StateSource.PROCESS, 1, 10)),
        ((1, 10), [(1, 10)], [(1, 10)], (StateSource.PROCESS, 1, 10)),
        ((1, 10), [(1, 11)], [], (StateSource.MEMORY, 1, 11)),
        ((1, 10), [(2, 5)], [], (StateSource.MEMORY, 2, 5)),
        ((1, 10), [(1, 5)], [(1, 15)], (StateSource.DISK, 1, 15)),
    ],
)
def test_newest_state_where_processes_hold_one(
    tmp_path: Path, held: State, in_memory: list[State], on_disk: list[State], expected: tuple[StateSource, int, int]
) -> None:
    for state in on_disk:
        save(tmp_path, state)
    opened = OpenState()
    made = chooser(tmp_path, 3, [held, *in_memory], opened)
    made.states[0].holder_ranks += [0, 2]
    made.states.sort(key=newest_first_key)
    assert chosen(made) == expected
    opened.close()


@pytest.mark.parametrize(
    ("failed", "others", "expected"),
    [
        ([], [2], (False, [0])),
        ([1], [2], (True, [2])),  # it holds none
        ([0, 1, 2], [2], (True, [2])),
        ([2], [2], (False, [0])),  # it holds another one
        ([1], [], (False, [0])),
    ],
)
def test_state_that_has_no_place_in_a_rank(
    tmp_path: Path, failed: list[int], others: list[int], expected: tuple[bool, list[int]]
) -> None:
    made = chooser(tmp_path, 3, [(1, 10), (1, 10), (1, 5)])
    made.states[0].holder_ranks, made.states[1].holder_ranks = [0], others
    words = [{"why": "no place" * (rank in failed), "holds": rank in (0, *others)} for rank in range(3)]
    verdict = made.judge_places(made.choose(), words)
    assert bool(verdict["why"]) == bool(failed)
    assert (verdict["rejected"], made.choose().holder_ranks) == expected


def test_state_that_a_round_has_refused_is_not_chosen_by_the_rounds_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round that refuses it begins anew, and dies before its first save: nothing else supersedes the state."""
    for round in (2, 3, 4):
        (tmp_path / f"round-{round}").mkdir()
        monkeypatch.setenv("ELASTICD_HEARTBEAT", str(tmp_path / f"round-{round}" / "heartbeat-0"))
        step_files.refuse_states(step_files.refused_states(round - 1))
        made = chooser(tmp_path, round, [(1, 10)])
        if round == 2:
            choice = made.choose()
            made.reject_held(choice, "rank 1 draws random numbers", below=choice.step)
            step_files.refuse_states([(choice.manifest.round, choice.save_number)])
        assert made.choose() is None
    assert chosen(chooser(tmp_path, 4, [(1, 10), (1, 9)])) == (StateSource.MEMORY, 1, 9), "an older one was not refused"


def test_choice_survives_its_way_to_the_other_ranks() -> None:
    draft = Manifest(2, 10, (1, 5), 2, 8, NO_CHECKSUM, "job", "1", {"seed": 1}, 1.5)
    in_shards = {"file_holders": {"a": [0, 1]}, "servers": {0: ("host", 1)}, "copy_only_files": ["a"]}
    for choice in (
        Choice(StateSource.DISK, draft, "r2-s10.again"),
        Choice(StateSource.MEMORY, draft, "r2-s10", save_number=3, key=(2, 3), has_alike=True, step_on_disk=5),
        Choice(StateSource.PROCESS, draft, "r2-s10", save_number=3, key=(2, 3), holder_ranks=[0, 2]),
        Choice(StateSource.MEMORY, draft, "r2-s10", save_number=3, key=(2, 3), **in_shards),  # type: ignore[arg-type]
    ):
        assert Choice.from_message(choice.to_message()) == choice
