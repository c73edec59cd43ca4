"""Stacks as text -> threads and frames, and which frames a person wants to see.

It exists because eight ranks' dumps are a thousand lines of which three matter. It reads what py-spy and Python's
faulthandler write, and takes what is neither as text that nobody understood. Pure: no file is touched here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

MOST_THREADS = 256
MOST_FRAMES = 512
_DEEP = 4
_OUTERMOST = ("<module>", "_run_module_as_main")

_SPY_PROCESS = re.compile(r"Process (\d+): ?(.*)")
_SPY_THREAD = re.compile(r'Thread (\S+)(?: \(([a-z+]+)\))?(?:: "(.*)")?')
_SPY_FRAME = re.compile(r"\s+(.+?) \(([^()]*?)(?::(\d+))?\)")
_HANDLER_THREAD = re.compile(r"(Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):")
_HANDLER_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")
_STDLIB = re.compile(r".*/lib(?:64)?/python3(?:\.\d+)?t?/")
_OURS = ("elasticd", "elasticd_agent")
_KNOWN = frozenset(
    {"torch", "torchvision", "torchaudio", "torchdata", "numpy", "triton", "lightning", "pytorch_lightning", "datasets",
     "transformers", "accelerate", "deepspeed", "grpc", "google", "tqdm", "pandas", "PIL", "scipy", "sklearn"}
)  # fmt: skip
"""py-spy shortens paths; these are then no one's own code. Others' packages cannot be told from the script's."""


@dataclass(frozen=True, slots=True)
class ShownFrame:
    """One call. `file` is short where its start says nothing (site-packages, the standard library)."""

    function: str
    file: str
    line: int
    library: str = ""  # "torch", "python": not the script's own code; "" where it is

    @property
    def at(self) -> str:
        """Where it is, as short as a person needs: of a deep path its last two parts."""
        parts = self.file.split("/")
        file = self.file if len(parts) <= _DEEP or not self.file.startswith("/") else "…/" + "/".join(parts[-2:])
        return f"{file}:{self.line}" if self.line else file

    @property
    def name(self) -> str:
        """The same without any directory."""
        return f"{self.file.rpartition('/')[2]}:{self.line}"


@dataclass(frozen=True, slots=True)
class ShownThread:
    """One thread, innermost call first."""

    name: str
    frames: tuple[ShownFrame, ...]
    main: bool = False
    state: str = ""  # py-spy's: idle, active, active+gil
    process: int = 0
    below: str = ""  # "pt_data_worker (pid 71)" where it is another process's, below the rank's

    @property
    def holds_gil(self) -> bool:
        return self.state.endswith("+gil")

    @property
    def own(self) -> ShownFrame | None:
        """The innermost call of the script's own code."""
        return next((frame for frame in self.frames if not frame.library), None)


@dataclass(frozen=True, slots=True)
class RankStacks:
    """One rank's threads, its own process first; `source` is who wrote them."""

    source: str
    threads: tuple[ShownThread, ...]

    @property
    def main(self) -> ShownThread | None:
        return next((thread for thread in self.threads if thread.main), None)

    @property
    def key(self) -> tuple[tuple[str, str, int], ...]:
        """The same for ranks whose main threads are at the same place."""
        thread = self.main
        return tuple((f.function, f.file, f.line) for f in thread.frames) if thread is not None else ()


def parse(text: str) -> RankStacks | None:
    """The stacks in `text`; None when there are none."""
    threads = _parsed(text.splitlines())
    if not threads:
        return None
    source = "py-spy" if any(thread.process for thread in threads) else "faulthandler"
    return RankStacks(source, tuple(_with_main(threads)))


def _parsed(lines: Sequence[str]) -> list[ShownThread]:
    threads: list[ShownThread] = []
    frames: list[ShownFrame] = []
    process, below = 0, ""
    for line in lines:
        frame = None
        if found := _SPY_PROCESS.fullmatch(line):
            # The rank's own process comes first, those below it after it.
            below = f"{found[2][:40] or 'process'} (pid {found[1]})" if threads else ""
            process = int(found[1])
        elif found := _HANDLER_THREAD.fullmatch(line):
            frames = []
            threads.append(ShownThread(found[3] or f"0x{found[2].lstrip('0')}", (), found[1] == "Current thread"))
        elif found := _HANDLER_FRAME.fullmatch(line):
            number = int(found[2]) if found[2].isdecimal() else 0
            frame = _frame(found[3], found[1], number)
        elif process and (found := _SPY_THREAD.fullmatch(line)):
            frames = []
            own = found[1] == str(process)
            threads.append(ShownThread(found[3] or found[1], (), own, found[2] or "", process, below))
        elif process and (found := _SPY_FRAME.fullmatch(line)):
            frame = _frame(found[1], found[2], int(found[3] or 0))
        if frame is not None and threads and len(frames) < MOST_FRAMES:
            frames.append(frame)
            threads[-1] = replace(threads[-1], frames=tuple(frames))
        if len(threads) > MOST_THREADS:
            break
    return threads


def _with_main(threads: list[ShownThread]) -> list[ShownThread]:
    """Exactly one main thread, first. faulthandler's "current" is whichever thread ran the signal's handler."""
    own = [i for i, thread in enumerate(threads) if not thread.below]
    spied = [i for i in own if threads[i].process and threads[i].main]
    based = [i for i in own if threads[i].frames and threads[i].frames[-1].function in _OUTERMOST]
    first = (spied or based or [i for i in own if threads[i].main] or own[-1:] or [0])[0]
    marked = [replace(thread, main=i == first) for i, thread in enumerate(threads)]
    return sorted(marked, key=lambda thread: (not thread.main, bool(thread.below)))


def _frame(function: str, file: str, line: int) -> ShownFrame:
    short, library = shorten(file)
    return ShownFrame(function, short, line, library)


def shorten(file: str) -> tuple[str, str]:
    """The file's name as a person reads it, and the library it belongs to ("" for the script's own code)."""
    if found := _PACKAGES.match(file):
        short = file[found.end() :]
        return short, _top(short)
    if (found := _STDLIB.match(file)) or file.startswith("<frozen "):
        return (file[found.end() :] if found else file), "python"
    top = _top(file)
    if not file.startswith("/"):
        if top in _OURS or top in _KNOWN:
            return file, top
        if top in sys.stdlib_module_names:
            return file, "python"
    for ours in _OURS:
        if (at := file.rfind(f"/{ours}/")) >= 0:
            return file[at + 1 :], ours
    if re.search(r"\.so(\.[\d.]+)?$", file):
        return file.rpartition("/")[2], "native code"
    return file, ""


def _top(short: str) -> str:
    return short.partition("/")[0].removesuffix(".py")


@dataclass(frozen=True, slots=True)
class FoldedFrames:
    """Frames nobody needs to see, between or below those that matter."""

    count: int
    libraries: tuple[str, ...]


def fold_frames(thread: ShownThread, most: int = 12) -> list[ShownFrame | FoldedFrames]:
    """What to show of the thread: where it is now, the script's own calls, and of libraries only how many."""
    shown: list[ShownFrame | FoldedFrames] = []
    hidden: list[ShownFrame] = []
    left = most
    for index, frame in enumerate(thread.frames):
        if index == 0 or (not frame.library and left > 0):
            # A single frame takes no more room than to say that there is one.
            shown += hidden if len(hidden) < 2 else [_fold(hidden)]
            shown.append(frame)
            hidden, left = [], left - 1
        else:
            hidden.append(frame)
    return [*shown, _fold(hidden)] if hidden else shown


def _fold(frames: Sequence[ShownFrame]) -> FoldedFrames:
    return FoldedFrames(len(frames), tuple(dict.fromkeys(frame.library or "the script" for frame in frames)))
