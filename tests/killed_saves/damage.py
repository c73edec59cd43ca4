"""Checkpoints of which a bit is flipped, or a file cut short: what is restored then, and what is said about it.

Only the newest checkpoint is damaged. Either it is restored all the same, bit for bit (a space in a manifest), or the
one before it, and then a sentence names the checkpoint and the file.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from elasticd.heartbeat.worker_events import WorkerEventReader
from tests.killed_saves.situations import Place, Script, Situation, Tell, bodies, three_saves
from tests.killed_saves.tracer import run

_NEWEST = "r1-s3"
_HEADER_BYTES = 64
"""At the beginning and at the end of a file, where zip and DCP have what the rest is read by."""
_BATCH = 500
KINDS = {"one file": 1, "sharded": 2}


def damages(name: str, content: bytes, share: float, draw: random.Random) -> Iterator[bytes]:
    """Contents of a file with one damage each; `share` of those that there are in manifests and headers."""
    bits = len(content) * 8
    header = 8 * (len(content) if name == "manifest.json" else _HEADER_BYTES)
    first = sorted({*range(min(header, bits)), *range(max(bits - header, 0), bits)})
    cuts = range(len(content)) if name == "manifest.json" else draw.sample(range(len(content)), 200)
    for bit in draw.sample(first, round(share * len(first))) + draw.sample(range(bits), round(share * 1500)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)
    for size in draw.sample(cuts, round(share * len(cuts))):
        yield content[:size]


def check(kind: str, base: Path, share: float) -> dict[str, object]:
    """Damage every file of a checkpoint, restore each time; returns the row of the table."""
    base.mkdir()
    directory = base / "d"
    situation = Situation(kind, three_saves, ranks=KINDS[kind])
    run(bodies(situation, directory, 1, three_saves))
    draw = random.Random(1)
    every = [
        (path.name, damaged)
        for path in sorted((directory / _NEWEST).iterdir())
        for damaged in damages(path.name, path.read_bytes(), share, draw)
    ]
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    for start in range(0, len(every), _BATCH):
        batch = every[start : start + _BATCH]
        (told,) = run([lambda tell, batch=batch: _restore_each(directory, batch, tell)])
        for outcome in map(json.loads, told.splitlines()):
            outcomes[outcome["is"]] += 1
            wrong += [outcome["why"]] if outcome["is"] == "wrong" else []
    shutil.rmtree(base)
    counted = {"damages": len(every), "files": len({name for name, _ in every})}
    return {"name": kind, **counted, **outcomes, "wrong": wrong[:20]}


def _restore_each(directory: Path, batch: list[tuple[str, bytes]], tell: Tell) -> None:
    """In one process: a single one restores a sharded checkpoint, too."""
    place = Place(directory, 2)
    place.events.unlink(missing_ok=True)  # the sentences of the batch before
    script = Script(place, tell)
    script.open()
    newest = directory / _NEWEST
    reader = WorkerEventReader(place.events)

    def restore() -> tuple[int, str, list[str]]:
        """The step, the digest and the sentences about skipped checkpoints."""
        resumed = script.session.restore()
        for own in directory.glob("r2-*"):
            shutil.rmtree(own)
        skipped = [each.reason for each in reader.read()[0] if each.kind == "checkpoint_skipped"]
        return resumed.step if resumed else 0, script.digest(), skipped

    whole = restore()
    newest.rename(aside := directory / "other")
    before = restore()
    aside.rename(newest)
    assert (whole[0], before[0], whole[2] + before[2]) == (3, 2, []), (whole, before)
    for name, damaged in batch:
        path = newest / name
        content = path.read_bytes()
        path.write_bytes(damaged)
        try:
            step, digest, skipped = restore()
            is_named = len(skipped) == 1 and _NEWEST in skipped[0] and name in skipped[0]
            if (step, digest) == whole[:2] and not skipped:
                outcome = "restored"
            elif (step, digest) == before[:2] and is_named:
                outcome = "older one, with a sentence"
            else:
                outcome = "wrong"
            why = f"{name}: step {step}, {skipped}"
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            outcome, why = "wrong", f"{name}: {type(error).__name__}: {error}"
        path.write_bytes(content)
        tell(json.dumps({"is": outcome, "why": why}) + "\n")
    os._exit(0)
