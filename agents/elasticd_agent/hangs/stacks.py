"""Stacks as records: the collector's helper takes them, `explain` shows them.

The helper imports this module at its start, so it needs the standard library and the codec only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from elasticd_agent.model.codec import Record

PACKAGES_PATTERN = r"(?:site|dist)-packages/"
STDLIB_PATTERN = r"/lib(?:64)?/python3(?:\.\d+)?t?/(?!(?:site|dist)-packages/)"
_PACKAGES_PREFIX = re.compile(rf".*{PACKAGES_PATTERN}")
_STDLIB_PREFIX = re.compile(rf".*{STDLIB_PATTERN}|(?=<frozen )")
_CHECKOUT_PREFIX = re.compile(r"(?:.*/)?(?:pytorch/(?=torch/)|(?=elasticd_agent/)|(?=elasticd/[\w/]+\.py$))")
"""torch built from its source, and elasticd itself, which a developer does not install."""
_DEEP_PATH_PARTS = 4
RUNTIME_LIBRARIES = ("python", "torch", "elasticd", "elasticd_agent")
"""The libraries that run any script: their frames may be inside of a wait."""


@lru_cache(maxsize=4096)
def _split_library(file: str) -> tuple[str, str]:
    """The library that the file belongs to, "" for the script's own code, and the file's path below it."""
    if prefix := _PACKAGES_PREFIX.match(file):
        below = file[prefix.end() :]
        return below.partition("/")[0].removesuffix(".py"), below
    if prefix := _STDLIB_PREFIX.match(file):
        return "python", file[prefix.end() :]
    if prefix := _CHECKOUT_PREFIX.match(file):
        below = file[prefix.end() :]
        return below.partition("/")[0], below
    return "", file


@dataclass(frozen=True, slots=True)
class Frame(Record):
    """One call: the function as the source names it ("all_reduce", "Model.forward"), its file and line, 0 unknown."""

    function: str
    file: str
    line: int

    @property
    def bare_name(self) -> str:
        """Without its class or outer function: all that Python 3.10 and faulthandler know of it."""
        return self.function.rpartition(".")[2]

    @property
    def library(self) -> str:
        """ "torch", "python": the library that it belongs to; "" for the script's own code."""
        return _split_library(self.file)[0]

    @property
    def path_in_library(self) -> str:
        """The file without what says nothing: the directory of site-packages or of the standard library."""
        return _split_library(self.file)[1]

    @property
    def portable_file(self) -> str:
        """The file as it is called on any machine."""
        library, below = _split_library(self.file)
        return below if library else below.rpartition("/")[2]

    @property
    def path_and_line(self) -> str:
        """The frame's place, as short as a person needs: of a deep path the last two parts."""
        parts = self.path_in_library.split("/")
        deep = len(parts) > _DEEP_PATH_PARTS and self.path_in_library.startswith("/")
        path = "…/" + "/".join(parts[-2:]) if deep else self.path_in_library
        return f"{path}:{self.line}" if self.line else path

    @property
    def basename_and_line(self) -> str:
        """The frame's place without any directory."""
        return f"{self.file.rpartition('/')[2]}:{self.line}"


def script_library(frames: Sequence[Frame]) -> str:
    """The library of the script's code: "", or, where there is no other code than libraries', the outermost package. A
    script may be an installed one."""
    libraries = [frame.library for frame in reversed(frames)]
    return "" if "" in libraries else next((name for name in libraries if name not in RUNTIME_LIBRARIES), "")


@dataclass(frozen=True, slots=True)
class ThreadStack(Record):
    """One thread, innermost call first."""

    name: str
    tid: str
    frames: tuple[Frame, ...]
    state: str = ""  #: py-spy's: "idle", "active", "active+gil"

    @property
    def holds_gil(self) -> bool:
        return self.state.endswith("+gil")

    @property
    def label(self) -> str:
        return self.name or self.tid

    @property
    def script_frame(self) -> Frame | None:
        """The innermost call of the script's own code."""
        script = script_library(self.frames)
        return next((frame for frame in self.frames if frame.library == script), None)


@dataclass(frozen=True, slots=True)
class ProcessStacks(Record):
    """One process, its main thread first."""

    pid: int
    comm: str
    threads: tuple[ThreadStack, ...]

    def __str__(self) -> str:
        return f"{self.comm[:40] or 'process'} (pid {self.pid})"


def place_key(thread: ThreadStack) -> tuple[tuple[str, str, int], ...]:
    """The same for threads at the same place, on whatever node."""
    return tuple((frame.function, frame.path_in_library, frame.line) for frame in thread.frames)


def digest(frames: Sequence[Frame]) -> str:
    """The same for the same calls at the same lines, on whatever machine and from whichever source; "" for none."""
    if not frames:
        return ""
    text = "\n".join(f"{frame.portable_file}:{frame.line} {frame.bare_name}" for frame in frames)
    return hashlib.sha1(text.encode("utf-8", "replace"), usedforsecurity=False).hexdigest()[:12]
