"""Situations of ranks that hang or are slow: the fault, its ranks, and the right verdict.

One table for tests, benchmark and recordings. Situations without a `what` are made from outside (a stopped store, a
partition, a suspended machine, a debugger) by the user of the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.faults.job import Fault

SCRIPTS = Path(__file__).parent / "scripts"
PLAIN, SESSION = "plain.py", "session.py"


@dataclass(frozen=True, slots=True)
class Situation:
    """`what` is one of scripts/mishaps.py, done by `ranks`. `culprits` None: those ranks; (): no single rank.

    `causes`: a person would name the first; the others are right, too, and depend on timing. `at`: the step of the
    faults, -1 for any. `ceiling`: the option that brings the verdict soon.
    """

    name: str
    what: str
    ranks: tuple[int, ...]
    causes: tuple[str, ...]
    culprits: tuple[int, ...] | None = None
    workers: int = 2
    at: int = -1
    args: tuple[str, ...] = ()
    ceiling: str = ""

    @property
    def blamed(self) -> tuple[int, ...]:
        return self.ranks if self.culprits is None else self.culprits

    def flags(self, ceiling: str) -> list[str]:
        """With a ceiling of so long, as "3s"; it must be above the floor."""
        return [self.ceiling, ceiling] if self.ceiling else []

    def faults(self, step: int, round: int | None = None) -> list[Fault]:
        """At this step, once."""
        at = step if self.at < 0 else self.at
        return [Fault(rank, at, self.what, round) for rank in self.ranks] if self.what else []


HUNG = (
    Situation("stopped", "stop", (1,), ("stopped",)),
    Situation("stopped rank 0", "stop", (0,), ("stopped",)),
    Situation("stopped of 4", "stop", (2,), ("stopped",), workers=4),
    Situation("sleeps", "sleep", (0,), ("blocked",)),
    Situation("dead-locked DataLoader worker", "loader", (1,), ("blocked",), args=("--loaders", "1")),
    Situation("infinite loop", "spin", (1,), ("spinning",), ceiling="--slow-ceiling"),
    Situation("dead-locked", "deadlock", (1,), ("blocked",)),
    Situation("holds the GIL", "gil", (0,), ("gil",)),
    Situation("zombie", "zombie", (1,), ("zombie",)),
    Situation("skips a collective", "skip", (1,), ("missed_collective",), workers=3),
    Situation("another collective", "other", (1,), ("mismatched_collectives", "missed_collective"), workers=3),
    Situation("mismatched shapes", "shape", (1,), ("mismatched_collectives", "missed_collective"), workers=3),
    Situation("never joins", "absent", (1,), ("never_joined",), at=0, ceiling="--startup-ceiling"),
    Situation("blocked on a FIFO", "fifo", (1,), ("blocked",)),
    Situation("everyone blocked", "fifo", (0, 1), ("everyone",), ()),
    Situation("checkpoint", "save", (0,), ("blocked",)),
    Situation("exit handler", "exit", (1,), ("exiting",), at=0, args=("--steps", "60")),
    Situation("store stopped", "", (), ("store",)),
    Situation("partition", "", (), ("network",)),
)
BY_NAME = {situation.name: situation for situation in HUNG}


def slow(scale: float = 1.0) -> dict[str, tuple[list[Fault], tuple[str, ...]]]:
    """Slow scripts, in full length times `scale`: faults and arguments by name.

    Steps are fewer than `--steps` asks for: the hundredth comes, and the growth is by ten.
    """
    return {
        "a long first step": ([Fault(rank, 1, f"compile {60 * scale:g}") for rank in (0, 1)], ("--steps", "30")),
        "a long evaluation": ([Fault(0, 30, f"evaluate {45 * scale:g}")], ("--steps", "60")),
        "a long checkpoint write": ([Fault(0, 30, f"write {40 * scale:g}")], ("--steps", "60")),
        "a step in a hundred 20 × slower": (
            [],
            ("--steps", "210", "--pause", f"{0.2 * scale:g}", "--hiccup", f"{4 * scale:g}"),
        ),
        "steps that grow 10 × slower": (
            [],
            ("--steps", "120", "--pause", f"{0.1 * scale:g}", "--growth", f"{0.0075 * scale:g}"),
        ),
        "50 micro-steps a step": ([], ("--steps", "10", "--pause", f"{0.2 * scale:g}", "--accumulate", "50")),
    }
