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
STOPPED, ZOMBIE, PROVEN, GIL, WEAK, CEILING = "stopped", "zombie", "proven mismatch", "GIL held", "idle", "ceiling"
OUTSIDE = "by a scheduler"
"""Classes of evidence, from the strongest to the weakest; CEILING: as long as an option says; OUTSIDE: no kill."""
MISMATCH = ("mismatched_collectives", "missed_collective")


@dataclass(frozen=True, slots=True)
class Situation:
    """`what` is one of scripts/mishaps.py, done by `ranks`. `culprits` None: those ranks; (): no single rank.

    `causes`: a person would name the first; the others are right, too, and depend on timing. `at`: the step of the
    faults, -1 for any. `ceiling`: the option that brings the verdict soon. `evidence`: its class, which says how soon
    the verdict is due. `first`: an earlier fault, that ends the round before. `scripts`: those that can do it.
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
    evidence: str = WEAK
    first: str = ""
    scripts: tuple[str, ...] = (SESSION, PLAIN)

    @property
    def rounds(self) -> int:
        """The round that hangs, of a job of its own."""
        return 2 if self.first else 1

    @property
    def blamed(self) -> tuple[int, ...]:
        return self.ranks if self.culprits is None else self.culprits

    def flags(self, ceiling: str) -> list[str]:
        """With a ceiling of so long, as "3s"; it must be above the floor."""
        return [self.ceiling, ceiling] if self.ceiling else []

    def faults(self, step: int, round: int | None = None) -> list[Fault]:
        """At this step, once."""
        at = step if self.at < 0 else self.at
        if not self.what:
            return []
        first = [Fault(rank, step, self.first, 1) for rank in self.ranks] if self.first else []
        return first + [Fault(rank, at, self.what, 2 if self.first else round) for rank in self.ranks]


HUNG = (
    Situation("stopped", "stop", (1,), ("stopped",), evidence=STOPPED),
    Situation("stopped rank 0", "stop", (0,), ("stopped",), evidence=STOPPED),
    Situation("stopped of 4", "stop", (2,), ("stopped",), workers=4, evidence=STOPPED),
    Situation("stopped, 2 of 4", "stop", (1, 3), ("stopped",), workers=4, evidence=STOPPED),
    Situation("stopped, all", "stop", (0, 1), ("stopped",), evidence=OUTSIDE),
    Situation("zombie", "zombie", (1,), ("zombie",), evidence=ZOMBIE),
    Situation("skips a collective", "skip", (1,), MISMATCH, workers=3, evidence=PROVEN),
    Situation("another collective", "other", (1,), MISMATCH, workers=3, evidence=PROVEN),
    Situation("mismatched shapes", "shape", (1,), MISMATCH, workers=3, evidence=PROVEN),
    Situation("receives instead", "recv", (1,), MISMATCH, workers=3, evidence=PROVEN),
    Situation("receive from each other", "recv", (0, 1), MISMATCH, (), evidence=PROVEN),
    Situation("barrier of rank 0 only", "barrier", (0,), MISMATCH, workers=3, evidence=PROVEN),
    Situation("two groups crossed", "crossed", (1,), MISMATCH, workers=3, args=("--groups",), evidence=PROVEN),
    Situation("skips in a sub-group", "subgroup", (1,), MISMATCH, workers=3, args=("--groups",), evidence=PROVEN),
    Situation(
        "two groups crossed at their first use",
        "first-crossed",
        (0, 1),
        MISMATCH,
        (),
        workers=3,
        args=("--groups",),
        evidence=PROVEN,
    ),
    Situation(
        "skips the first one of a sub-group",
        "first-subgroup",
        (0,),
        MISMATCH,
        (1,),
        workers=3,
        args=("--groups",),
        evidence=PROVEN,
    ),
    Situation("other sources", "sources", (0, 1, 2), MISMATCH, (), workers=3),
    Situation("dead-locked, others in an unequal all_to_all", "unequal", (0, 1, 2), ("blocked",), (2,), workers=3),
    Situation("waits for a key", "key", (1,), ("blocked",), workers=3),
    Situation("holds the GIL", "gil", (0,), ("gil",), evidence=GIL),
    Situation("sleeps", "sleep", (0,), ("blocked",)),
    Situation("dead-locked DataLoader worker", "loader", (1,), ("blocked",), args=("--loaders", "1")),
    Situation("stopped DataLoader worker", "loader-stop", (1,), ("blocked", "stopped"), args=("--loaders", "1")),
    Situation("dead-locked", "deadlock", (1,), ("blocked",)),
    Situation("locks twice", "lock", (1,), ("blocked",)),
    Situation("native call without the GIL", "native", (1,), ("blocked",)),
    Situation("semaphore of a dead process", "semaphore", (0,), ("blocked",)),
    Situation("stale lock file", "lockfile", (1,), ("blocked",)),
    Situation("flock of another process", "flock", (1,), ("blocked",)),
    Situation("dead socket", "socket", (0,), ("blocked",)),
    Situation("reads its own pipe", "pipe", (1,), ("blocked",)),
    Situation("child that does not end", "child", (0,), ("blocked",)),
    Situation("stopped child", "stopped-child", (1,), ("blocked", "stopped")),
    Situation("hook in backward", "hook", (0,), ("blocked",)),
    Situation("thread that does not end", "thread", (0,), ("blocked",)),
    Situation("empty queue", "queue", (1,), ("blocked",)),
    Situation("asyncio", "asyncio", (0,), ("blocked",)),
    Situation("retry that steps", "retry", (0,), ("blocked", "spinning", "missed_collective")),
    Situation("blocked on a FIFO", "fifo", (1,), ("blocked",)),
    Situation("blocked, 2 of 4", "fifo", (1, 2), ("blocked",), workers=4),
    Situation("everyone blocked", "fifo", (0, 1), ("everyone",), ()),
    Situation("checkpoint", "save", (0,), ("blocked",)),
    Situation(
        *("restore", "restore", (1,), ("blocked",)),
        at=0,
        first="kill",
        scripts=(SESSION,),
        ceiling="--first-step-ceiling",
        evidence=CEILING,
    ),
    Situation("exit handler", "exit", (1,), ("exiting",), at=0, args=("--steps", "60")),
    Situation("infinite loop", "spin", (1,), ("spinning",), ceiling="--slow-ceiling", evidence=CEILING),
    Situation("regular expression", "regex", (1,), ("spinning", "gil"), ceiling="--slow-ceiling", evidence=CEILING),
    Situation("never joins", "absent", (1,), ("never_joined",), at=0, ceiling="--startup-ceiling", evidence=CEILING),
    Situation(
        "init_process_group", "mute-store", (1,), ("never_joined",), at=0, ceiling="--startup-ceiling", evidence=CEILING
    ),
    Situation("store stopped", "", (), ("store",), evidence=STOPPED),
    Situation("owner stopped", "", (), ()),
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
