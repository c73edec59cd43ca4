"""rank-R.stacks.json -> RankStacks, and the frames of a thread that a person wants to see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticd_agent.hangs.explain.json_values import count, items, text
from elasticd_agent.hangs.stacks import Frame, ProcessStacks, RankStacks, ThreadStack

MOST_PROCESSES = 64
MOST_THREADS = 256
MOST_FRAMES = 512


def decode(data: Mapping[str, Any]) -> RankStacks | None:
    """The stacks in the file's object; None without a thread of the rank's own process."""
    processes = [
        ProcessStacks(count(one.get("pid")), text(one.get("comm")), tuple(_threads(one)))
        for one in items(data.get("processes"), MOST_PROCESSES)
    ]
    if not processes or not processes[0].threads:
        return None
    return RankStacks(text(data.get("source")), tuple(process for process in processes if process.threads))


def _threads(process: Mapping[str, Any]) -> list[ThreadStack]:
    return [
        ThreadStack(
            text(one.get("name")),
            text(one.get("tid")),
            tuple(
                Frame(text(frame.get("function")), text(frame.get("file")), max(0, count(frame.get("line"))))
                for frame in items(one.get("frames"), MOST_FRAMES)
            ),
            text(one.get("state")),
        )
        for one in items(process.get("threads"), MOST_THREADS)
    ]


@dataclass(frozen=True, slots=True)
class FoldedFrames:
    """Library frames between or below those that matter."""

    count: int
    libraries: tuple[str, ...]


def fold_frames(thread: ThreadStack, most: int = 12) -> list[Frame | FoldedFrames]:
    """What to show of the thread: its innermost call, the script's own calls, and of libraries only how many."""
    shown: list[Frame | FoldedFrames] = []
    hidden: list[Frame] = []
    left = most
    for index, frame in enumerate(thread.frames):
        if index == 0 or (not frame.library and left > 0):
            # A single frame takes no more room than the line that says there is one.
            shown += hidden if len(hidden) < 2 else [_fold(hidden)]
            shown.append(frame)
            hidden, left = [], left - 1
        else:
            hidden.append(frame)
    return [*shown, _fold(hidden)] if hidden else shown


def _fold(frames: Sequence[Frame]) -> FoldedFrames:
    return FoldedFrames(len(frames), tuple(dict.fromkeys(frame.library or "the script" for frame in frames)))
