"""What agents tell each other of their ranks while a group is under suspicion: plain facts, no judgement.

It exists so that a hang can be judged on one value: `hang.judge` reads Reports, recordings of real hangs are files of
Reports, and `elasticd explain` shows them. All ages are attentive seconds of the agent that saw the rank: time in which
that agent did not look (the machine was suspended, the agent was starved) ages nobody. Nothing here reads anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elasticd_agent.model.codec import Document, Record

Where = Literal["", "collective", "device", "init", "barrier", "elsewhere"]
"""Where a rank's main thread was when its stack was taken: in (or waiting for) a collective, in a device
synchronisation, making the process group, in `session.barrier`, somewhere else. "": no stack has been taken."""


@dataclass(frozen=True, slots=True)
class RankReport(Record):
    """One rank, as its node's agent sees it.

    From its beat: `phase`, `step`, `collectives` issued by the default process group (-1: nobody could count them),
    `usual` of them during its last finished step (-1), `barrier`, the timeout `barrier_s` that the script gave that (0:
    none), the group's `timeout_s` (0: unknown). `idle_s`: since any of these last changed. `alive_s`: since its
    background thread last counted, which it cannot while the GIL is held (-1: it never has). `moved_s`: since that
    thread last saw the main thread's Python go from one place to another (-1: it never has). From /proc: `state` ("R",
    "S", "D", "T", "t", "Z", "X" ending, "" unknown), and for how long it has been "T"; `cpu_s` and `io_bytes` of its
    process tree over the last `window_s`. From its stack: `where`, the `function` that says so, and `stack`, the same
    for equal stacks. `evidence`: on disk. `exited`: ended with code 0.
    """

    rank: int
    slot: int
    phase: str = "starting"
    step: int = 0
    collectives: int = -1
    usual: int = -1
    barrier: str = ""
    barrier_s: float = 0.0
    timeout_s: float = 0.0
    idle_s: float = 0.0
    alive_s: float = -1.0
    moved_s: float = -1.0
    state: str = ""
    stopped_s: float = 0.0
    cpu_s: float = 0.0
    io_bytes: int = 0
    window_s: float = 0.0
    where: Where = ""
    function: str = ""
    stack: str = ""
    evidence: bool = False
    exited: bool = False


@dataclass(frozen=True, slots=True)
class HangReport(Document):
    """What one node's agent says of its ranks of `round` while it, or another, suspects a hang.

    `why`: its own suspicion, "" if it has none and was only asked. `deadline_s`: after how long without progress it
    became suspicious, by what it has learned. `gathered`: its evidence is on disk, or will never be. `store_state` and
    `store_stopped_s` are of the process that hosts the round's store, on rank 0's node. `turn` grows with every report.
    """

    round: int
    node: str
    ranks: tuple[RankReport, ...]
    why: str = ""
    deadline_s: float = 0.0
    gathered: bool = False
    store_state: str = ""
    store_stopped_s: float = 0.0
    turn: int = 0


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """A group was found hung: what the planner's agent knew, and what is done about it.

    `culprits` are (node, rank, slot), perhaps none; `cause` is one of verdict.py's; `hung_s` is for how long nobody had
    made progress. `restarts`: the group is ended for it; else it was only said (--on-hang report).
    """

    round: int
    culprits: tuple[tuple[str, int, int], ...]
    cause: str
    why: str
    hung_s: float
    restarts: bool
    reports: tuple[HangReport, ...]
