"""Kill saves and restores at their system calls: python -m tests.killed_saves [--kills N] [NAME ...].

Prints a line of JSON for each situation: the points at which its processes were killed, and how many a fresh process
got wrong. The exit code is 1 if there is one, or a situation in which no kill came to its point.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.killed_saves.situations import Situation

PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.fsdp",
    "elasticd.session",
)


def copy(source: Path, target: Path) -> None:
    """A directory, with its hard links."""
    if not source.exists():
        return
    links: dict[int, Path] = {}
    for folder, _, names in os.walk(source):
        (target / Path(folder).relative_to(source)).mkdir(mode=0o700)
        for name in names:
            path, copied = Path(folder, name), target / Path(folder, name).relative_to(source)
            inode = path.stat().st_ino
            if inode in links:
                os.link(links[inode], copied)
            else:
                shutil.copy2(path, links.setdefault(inode, copied))


class Directories:
    """The directories that kills leave, each given once to a fresh process."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._judged: dict[tuple[str, str], str] = {}

    def __len__(self) -> int:
        return len(self._judged)

    def judge(self, directory: Path, expected: str) -> str:
        """What is wrong, "" if nothing is; deletes the directory."""
        from tests.killed_saves import situations

        case = (situations.content(directory), expected)
        if case not in self._judged:  # a restore depends on nothing else
            self._judged[case] = situations.judge(self._situation, directory, expected)
        shutil.rmtree(directory.parent)
        return self._judged[case]


def kill(situation: Situation, base: Path, real: int) -> dict[str, object]:
    """Judge what a kill would leave at each point of the life, and kill it at `real` of them; the row of the table."""
    from tests.killed_saves import durability, situations, tracer

    (base / "origin").mkdir()
    origin = base / "origin" / "d"
    present = situations.prepare(situation, origin)
    directories, left, wrong = Directories(situation), [], []

    def place() -> Path:
        (folder := Path(tempfile.mkdtemp(dir=base))).chmod(0o700)
        return folder / "d"

    def keep(call: tracer.Call | None) -> None:
        if call is not None and call.is_write(str(alive)) and call.result:
            copy(alive, half := place())
            torn = half / Path(call.paths[0]).relative_to(alive)
            os.truncate(torn, torn.stat().st_size - call.result // 2)
            left.append((half, len(whole.changes)))
        copy(alive, whole_copy := place())
        left.append((whole_copy, len(whole.changes)))

    alive, whole = place(), tracer.Trace()
    copy(origin, alive)
    whole = tracer.trace(situations.bodies(situation, alive, 2, situation.life), str(alive), on_change=keep, done=whole)
    assert whole.codes == [0] * situation.ranks, (whole.codes, (alive.parent / "errors-2-0").read_text())
    wrong += durability.breaches(whole, str(alive))
    points = whole.points(str(alive))
    for directory, changes in [*left, (alive, len(whole.changes))]:
        done = tracer.Trace(changes=whole.changes[:changes], told=whole.told)
        if why := directories.judge(directory, present.after(done).digest):
            wrong.append(f"after {done.changes[-1:]}: {why}")
    fired = 0
    for point in points[:: max(len(points) // real, 1)] if real else []:
        copy(origin, directory := place())
        trace = tracer.trace(situations.bodies(situation, directory, 2, situation.life), str(directory), point)
        fired += trace.fired
        if why := directories.judge(directory, present.after(trace).digest):
            wrong.append(f"killed at {point}, {trace.calls[-1:]}: {why}")
    shutil.rmtree(origin.parent)
    row = {"name": situation.name, "calls": len(whole.calls), "points": len(points), "directories": len(directories)}
    return row | {"killed": fired, "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.killed_saves", description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="points with a real kill in each situation; default: 10")
    parser.add_argument("--damage", type=float, default=1.0, help="share of the damages of files; default: 1, all")
    parser.add_argument("names", nargs="*", help="of rows; default: all")
    options = parser.parse_args()
    for name in PRELOADED:
        importlib.import_module(name)
    from tests.killed_saves.damage import KINDS, check
    from tests.killed_saves.situations import SITUATIONS
    from tests.killed_saves.writer import HANDOVERS
    from tests.killed_saves.writer import check as kill_writer

    with tempfile.TemporaryDirectory() as base:
        rows: dict[str, Callable[[], dict[str, object]]] = {
            each.name: partial(kill, each, Path(base), options.kills) for each in SITUATIONS
        }
        for handover in HANDOVERS:
            rows[f"writer: {handover.name}"] = partial(kill_writer, handover, Path(base, "writer"), options.kills)
        for kind in KINDS if options.damage else ():
            rows[f"damage: {kind}"] = partial(check, kind, Path(base, "damage"), options.damage)
        if unknown := set(options.names) - rows.keys():
            parser.error(f"no such row: {', '.join(sorted(unknown))}; there are: {', '.join(rows)}")
        failed = False
        for name in options.names or rows:
            row = rows[name]()
            failed |= bool(row["wrong"]) or (options.kills > 0 and row.get("killed") == 0)
            print(json.dumps(row | {"name": name}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # tidying up torch takes most of a second
