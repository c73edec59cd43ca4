"""Random histories of rounds, zombies, retention, damage and resumes over a real directory, held to three promises.

What a zombie wrote after its successor had re-linked is never loaded; what the lineage offers descends from one another
without a gap; retention never deletes the last good checkpoint, nor another round's before it may.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elasticd.checkpointing.storage.checkpoint_files import relink
from elasticd.checkpointing.storage.lineage import Entry, highest_round, lineage
from elasticd.checkpointing.storage.retention import retain
from elasticd.errors import CheckpointCorrupt
from tests.library import checkpoints
from tests.library.checkpoints import verified_lineage

COMMON = {"world_size": 1, "job": "j", "run": "r"}


@dataclass
class Writer:
    """Rank 0 of a round, alive for ever. `past`: the saves its state descends from, newest last."""

    round: int
    step: int
    parent: tuple[int, int] | None
    past: list[int]
    superseded: bool = False
    saved_steps: list[int] = field(default_factory=list)


class Directory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="elasticd-histories-"))
        self.writers: list[Writer] = []
        self.past: dict[int, list[int]] = {}  # of each save: those it descends from, itself last
        self.forbidden: set[int] = set()
        self.damaged = False

    def teardown(self) -> None:
        shutil.rmtree(self.path)

    # What happens.

    @rule()
    def a_new_round_resumes(self) -> None:
        number = 1 + max(highest_round(self.path), *(each.round for each in self.writers), 0)
        for entry in lineage(self.path)[0]:
            try:
                save = checkpoints.load(entry)["save"]
            except CheckpointCorrupt:
                continue
            assert save not in self.forbidden, "a zombie's checkpoint was loaded"
            relink(self.path, entry, number)
            for each in self.writers:
                each.superseded = True
            found = entry.manifest
            self.writers.append(Writer(number, found.step, (found.round, found.step), list(self.past[save])))
            return
        self.writers.append(Writer(number, 0, None, []))

    @precondition(lambda self: self.writers)
    @rule(who=st.integers(0, 3), steps=st.integers(1, 3), times=st.integers(1, 3))
    def somebody_trains_and_saves(self, who: int, steps: int, times: int) -> None:
        writer = self.writers[-1 - who % len(self.writers)]
        for _ in range(times):
            writer.step += steps
            self._save(writer)

    @precondition(lambda self: self.writers and self.writers[-1].saved_steps)
    @rule()
    def the_newest_saves_its_step_again(self) -> None:
        writer = self.writers[-1]
        if writer.saved_steps[-1] == writer.step:
            self._save(writer)

    def _save(self, writer: Writer) -> None:
        save = len(self.past) + 1
        writer.past.append(save)
        writer.saved_steps.append(writer.step)
        self.past[save] = list(writer.past)
        if writer.superseded:
            self.forbidden.add(save)
        checkpoints.save(
            self.path, round=writer.round, step=writer.step, parent=writer.parent, state={"save": save}, **COMMON
        )

    @precondition(lambda self: self.writers)
    @rule(who=st.integers(0, 3), keep=st.integers(1, 4))
    def somebody_cleans(self, who: int, keep: int) -> None:
        writer = self.writers[-1 - who % len(self.writers)]
        before, good = set(self._names()), self._good()
        own_is_good = any(e.manifest.round == writer.round and not e.manifest.relinked for e in good)
        deleted = {path.name for path in retain(self.path, writer.round, keep)}
        after, still = set(self._names()), self._good()
        assert before - after == deleted
        rounds = {int(name[1:].split("-")[0]) for name in deleted}
        assert all(round <= writer.round for round in rounds), "somebody deleted a newer round's checkpoint"
        assert rounds <= {writer.round} or own_is_good, "older rounds were cleaned too early"
        assert still[:1] == good[:1], "the newest good checkpoint was deleted"
        steps = list(dict.fromkeys(e.manifest.step for e in good))
        assert [e.manifest.step for e in still if e.manifest.step in steps[:1]] or not good
        if not self.damaged:
            kept = list(dict.fromkeys(e.manifest.step for e in still))
            assert kept[:keep] == steps[:keep], "retention broke the lineage, or deleted what it should keep"

    @precondition(lambda self: self._names())
    @rule(which=st.integers(0, 1000), how=st.sampled_from(["flip", "cut", "no state", "no manifest", "no JSON", "2.0"]))
    def something_is_damaged(self, which: int, how: str) -> None:
        names = self._names()
        path = self.path / names[which % len(names)]
        state, manifest = path / "state.pt", path / "manifest.json"
        if how in ("no manifest", "no JSON", "2.0") and not self._round_is_still_known_without(path):
            return
        self.damaged = True
        if how == "no state":
            state.unlink(missing_ok=True)
        elif how in ("flip", "cut") and state.exists() and state.stat().st_size:
            data = bytearray(state.read_bytes())
            data[len(data) // 2] ^= 4
            state.write_bytes(data if how == "flip" else data[:-1])
        elif how == "no manifest":
            manifest.unlink(missing_ok=True)
        elif how == "no JSON":
            manifest.write_text("{")
        elif how == "2.0":
            manifest.write_text(json.dumps({"version": "2.0"}))

    def _round_is_still_known_without(self, path: Path) -> bool:
        """The promises end where no manifest is left to say where a round came from (docs/on-disk.md)."""
        round = path.name.split("-")[0]
        others = [self.path / name for name in self._names() if name.startswith(f"{round}-")]
        return any(self._is_sealed(each) for each in others if each != path)

    @staticmethod
    def _is_sealed(path: Path) -> bool:
        try:
            return "seal" in json.loads((path / "manifest.json").read_text())
        except (OSError, ValueError):
            return False

    # What always holds.

    @invariant()
    def what_is_offered_descends_from_one_another(self) -> None:
        saves = [checkpoints.load(entry)["save"] for entry in self._good()]
        assert not self.forbidden.intersection(saves), "the lineage offers what a zombie wrote"
        for newer, older in itertools.pairwise(saves):
            assert older in self.past[newer], f"save {newer} does not descend from save {older}"
        if not self.damaged and self.writers and self.writers[-1].past:
            assert saves[0] == self.writers[-1].past[-1], "the newest checkpoint of the newest round is not offered"

    @invariant()
    def nothing_half_done_is_left(self) -> None:
        assert not [name for name in os.listdir(self.path) if name.startswith(".")]

    def _good(self) -> list[Entry]:
        return verified_lineage(self.path)[0]

    def _names(self) -> list[str]:
        return sorted(name for name in os.listdir(self.path) if not name.startswith("."))


Directory.TestCase.settings = settings(
    max_examples=int(os.environ.get("HISTORIES", "15")),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestDirectory = Directory.TestCase
