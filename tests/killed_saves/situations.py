"""Lives of a job that are killed while they save or restore, and what a fresh process must find after that.

Each life is a whole session, as a script has it. What is right is known from the system calls that were made: the
rename of a staging directory to a checkpoint's name commits it, and a rename of such a name takes it away. After that
the newest one that is there must be restored, bit for bit, without a word about a skipped one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

import elasticd
from elasticd.heartbeat.worker_events import WorkerEventReader
from tests.killed_saves.tracer import Trace, mark, run
from tests.library.conftest import free_port

Tell = Callable[[str], None]
_NAME = re.compile(r"r(\d+)-s(\d+)(\.again)?")
_TOKEN = re.compile(r"\.[0-9a-f]+(?=\.(staging|trash))")
NO_WRITER = contextlib.nullcontext("")
_FOREIGN = re.compile(r"(ELASTICD|TORCHELASTIC)_.*|RANK|WORLD_SIZE|LOCAL_.*|GROUP_.*|MASTER_.*")


@dataclass(frozen=True)
class Place:
    """Where a life takes place, and as which rank."""

    directory: Path
    round: int
    rank: int = 0
    ranks: int = 1
    port: int = 0
    writer: str = ""  #: the socket of the launcher's writer

    @property
    def events(self) -> Path:
        return self.directory.with_name(f"events-{self.round}-{self.rank}")

    @property
    def errors(self) -> Path:
        return self.directory.with_name(f"errors-{self.round}-{self.rank}")


class Script:
    """What a training script does: it builds, attaches, restores, trains and saves."""

    def __init__(self, place: Place, tell: Tell, keep: int = 9) -> None:
        for name in list(os.environ):
            if _FOREIGN.fullmatch(name):
                del os.environ[name]
        ours = {"ROUND": place.round, "JOB": "job", "RUN": "run", "CHECKPOINT_DIR": place.directory}
        os.environ |= {f"ELASTICD_{name}": str(value) for name, value in ours.items()}
        os.environ["ELASTICD_WORKER_EVENTS"] = str(place.events)
        if place.writer:
            os.environ |= {"ELASTICD_WRITER": f"{place.rank}/{place.ranks}:{place.writer}", "GROUP_RANK": "0"}
        if place.ranks > 1:
            group = {"RANK": place.rank, "LOCAL_RANK": place.rank, "LOCAL_WORLD_SIZE": place.ranks}
            server = {"WORLD_SIZE": place.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": place.port}
            os.environ |= {name: str(value) for name, value in (group | server).items()}
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self.place, self.tell = place, tell
        errors = os.open(place.errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(errors, 2)
        os.close(errors)
        time.time = lambda: 1.7e9  # equal states have equal manifests
        torch.set_num_threads(1)
        random.seed(0)  # what a checkpoint has of random states
        numpy.random.seed(0)
        torch.manual_seed(0)
        self.session = elasticd.init()
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.LayerNorm(60))
        if place.ranks > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model, mesh=init_device_mesh("cpu", (place.ranks,)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.session.attach(model=self.model, optimizer=self.optimizer)
        self._keep, self._marks = keep, 0

    def open(self) -> None:
        self.session.checkpoint(every=1 << 30, keep=self._keep)

    def mark(self) -> None:
        """What is killed begins, or ends."""
        self._marks += 1
        mark()

    def train(self, seed: int = 0) -> None:
        torch.manual_seed(1000 * self.place.round + self.session.steps + 10 * self.place.rank + 100 * seed)
        self.model(torch.randn(8, 40)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.session.step()

    def save(self) -> None:
        """Says before it what is saved, and whether it is part of what is killed."""
        name = f"r{self.place.round}-s{self.session.steps}"
        self.tell(json.dumps({"name": name, "digest": self.digest(), "traced": self._marks == 1}) + "\n")
        assert self.session.save()

    def digest(self) -> str:
        """Of this rank's part of all that is restored: tensors, the step and the random state."""
        digest = hashlib.sha256(str(self.session.steps).encode())
        states = [self.optimizer.state[each] for each in self.model.parameters()]
        for values in (self.model.state_dict(), *states):
            for name, value in sorted(values.items()):
                own = value.to_local() if hasattr(value, "to_local") else value
                digest.update(name.encode() + own.detach().contiguous().numpy().tobytes())
        digest.update(torch.get_rng_state().numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Situation:
    """A life, and the directory in which it begins."""

    name: str
    life: Callable[[Script], None]
    before: Callable[[Script], None] | None = None  #: the life of round 1, which is not killed; None: there is none
    then: Callable[[Path], None] | None = None  #: changes the directory after that
    ranks: int = 1
    keep: int = 9
    damaged: tuple[str, ...] = ()  #: checkpoints that must be skipped, with a reason


def three_saves(script: Script) -> None:
    script.open()
    for _ in range(3):
        script.train()
        script.save()


def first_save(script: Script) -> None:
    script.train()
    script.mark()
    script.open()
    script.save()
    script.mark()


def next_save(script: Script) -> None:
    script.open()
    script.session.restore()
    script.train()
    script.mark()
    script.save()
    script.mark()


def same_step_again(script: Script) -> None:
    script.open()
    script.session.restore()
    script.train()
    script.save()
    with torch.no_grad():
        for parameter in script.model.parameters():
            parameter.mul_(2)
    script.mark()
    script.save()
    script.mark()


def restore(script: Script) -> None:
    script.mark()
    script.open()
    script.session.restore()
    script.mark()


def go_back(script: Script) -> None:
    script.mark()
    script.open()
    script.session.restore(step=1)
    script.mark()


def leftovers(directory: Path) -> None:
    """Of writers that were killed: a save of another step, a deletion, the same step saved again, three times."""
    shutil.copytree(directory / "r1-s2", directory / ".r1-s4.abcd.staging")
    (directory / ".r1-s4.abcd.staging/manifest.json").write_bytes(b"")
    (directory / ".r1-s5.abce.staging").mkdir()
    shutil.copytree(directory / "r1-s2", directory / ".r1-s1.abcf.trash")
    (directory / ".r1-s1.abcf.trash/manifest.json").unlink()
    shutil.copytree(directory / "r1-s3", directory / "r1-s3.again")


def damage_newest(directory: Path) -> None:
    path = directory / "r1-s3" / "state.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


SITUATIONS = [
    Situation("the first save of all", first_save),
    Situation("one more save", next_save, three_saves),
    Situation("a save that prunes", next_save, three_saves, keep=1),
    Situation("the same step again", same_step_again, three_saves),
    Situation("a restore", restore, three_saves),
    Situation("a restore over leftovers", restore, three_saves, leftovers),
    Situation("a restore past damage", restore, three_saves, damage_newest, damaged=("r1-s3",)),
    Situation("a restore of an older step", go_back, three_saves),
    Situation("sharded: the first save of all", first_save, ranks=2),
    Situation("sharded: one more save", next_save, three_saves, ranks=2),
    Situation("sharded: a save that prunes", next_save, three_saves, ranks=2, keep=1),
    Situation("sharded: the same step again", same_step_again, three_saves, ranks=2),
    Situation("sharded: a restore over leftovers", restore, three_saves, leftovers, ranks=2),
]


def places(directory: Path, round: int, ranks: int, writer: str = "") -> list[Place]:
    port = free_port() if ranks > 1 else 0
    return [Place(directory, round, rank, ranks, port, writer) for rank in range(ranks)]


def bodies(
    situation: Situation, directory: Path, round: int, life: Callable[[Script], None], writer: str = ""
) -> list[Any]:
    def body(place: Place, tell: Tell) -> None:
        script = Script(place, tell, situation.keep if round > 1 else 9)
        life(script)
        script.session.close()

    return [functools.partial(body, place) for place in places(directory, round, situation.ranks, writer)]


def content(directory: Path) -> str:
    """A digest of all names and bytes in the directory, without those that are drawn at random."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*"), key=lambda path: (_TOKEN.sub("", str(path)), str(path))):
        digest.update(_TOKEN.sub("", str(path.relative_to(directory))).encode() + b"\0")
        if path.is_file() and path.name != ".lock":
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


class Expected:
    """The checkpoints that are there, by the system calls that were made."""

    def __init__(self, present: dict[str, str]) -> None:
        self.present = dict(present)

    @property
    def digest(self) -> str:
        """Of the newest one; "" for none."""
        if not self.present:
            return ""
        return self.present[max(self.present, key=_order)]

    def after(self, trace: Trace) -> Expected:
        """What is there when the calls of this run have been made."""
        saved, after = digests(trace.told, traced=True), Expected(self.present | digests(trace.told, traced=False))
        for call in trace.changes:
            if call.name.startswith("rename") and call.result == 0:
                source, target = (os.path.basename(path) for path in call.paths)
                loaded = after.digest  # a restore commits what it has loaded
                moved = after.present.pop(source, None)
                if _NAME.fullmatch(target):
                    after.present[target] = moved or saved.get(target.removesuffix(".again"), loaded)
        return after


def digests(told: list[str], traced: bool) -> dict[str, str]:
    """What was saved under each name, as part of what is killed or before that: the digest of each rank."""
    found: dict[str, list[str]] = {}
    for rank, lines in enumerate(told):
        for line in map(json.loads, lines.splitlines()):
            if line["traced"] == traced:
                of_ranks = found.setdefault(line["name"], [""] * len(told))
                of_ranks[rank] = line["digest"]
    return {name: " ".join(of_ranks) for name, of_ranks in found.items()}


def prepare(situation: Situation, directory: Path) -> Expected:
    """Make the directory in which the life begins."""
    present: dict[str, str] = {}
    if situation.before is not None:
        present = digests(run(bodies(situation, directory, 1, situation.before)), traced=False)
    if situation.then is not None:
        situation.then(directory)
    return Expected({name: digest for name, digest in present.items() if name not in situation.damaged})


def judge(
    situation: Situation,
    directory: Path,
    expected: str,
    writer: contextlib.AbstractContextManager[str] = NO_WRITER,
) -> str:
    """What is wrong with what fresh processes restore and how they go on, "" if nothing is."""

    def life(script: Script) -> None:
        script.open()
        resumed = script.session.restore()
        script.tell(json.dumps({"restored": script.digest() if resumed else ""}) + "\n")
        script.train()
        script.save()

    base = situation if situation.damaged else Situation(situation.name, life, ranks=situation.ranks, keep=1)
    with writer as socket:
        told = run(bodies(base, directory, 3, life, socket))
    lines = [list(map(json.loads, each.splitlines())) for each in told]
    restored = " ".join(each[0]["restored"] for each in lines).strip()
    if restored != expected:
        return f"restored {restored[:12] or 'nothing'}, and not {expected[:12] or 'nothing'}"
    ranks = [Place(directory, 3, rank) for rank in range(situation.ranks)]
    if any("Traceback" in place.errors.read_text() for place in ranks):
        return f"a traceback: {ranks[0].errors.read_text()}"
    events = [each for place in ranks for each in WorkerEventReader(place.events).read()[0]]
    skipped = [each.reason for each in events if each.kind == "checkpoint_skipped"]
    wrong = [each for each in skipped if not any(name in each for name in situation.damaged)]
    if wrong:
        return f"skipped without a reason: {wrong[0]}"
    if left := [name for name in os.listdir(directory) if name.endswith((".staging", ".trash", ".again"))]:
        return f"left behind: {', '.join(left)}"
    return ""


def _order(name: str) -> tuple[int, int, bool]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2]), match[3] is not None
