"""Where the agent is (Phase), what happened (Event), what to do (Action): closed unions of frozen dataclasses.

They exist so that `core.step` can be pure and a story can be written down and replayed. Events are in the past tense,
actions are imperatives. Every `at` is in seconds of the agent's own monotonic clock. Nothing here does anything.
"""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass
from typing import Literal

from elasticd_agent.model.records import Failure, Round


@dataclass(frozen=True, slots=True)
class StepRules:
    """What `core.step` must know that never changes: which node it runs on, and the policy's numbers it uses."""

    node: str
    user_error_wait_s: float = 0.5
    stop_grace_s: float = 30.0
    incarnation: str | None = None
    multi_node: bool = False
    """True when other nodes may take part, so that much must be told to them."""
    leave_grace_s: float | None = None
    """How long it may take until the others' next round, or the checkpoint; None: `stop_grace_s`."""
    leave_on_stop: bool = False
    """True where a stop is this node's leaving: the planner hears of it, and can hold the group at a checkpoint."""

    @property
    def stop_limit_s(self) -> float:
        """From being asked to stop until what is left is killed, at the latest."""
        return self.stop_grace_s if self.leave_grace_s is None or not self.leave_on_stop else self.leave_grace_s


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended: by itself with `code`, or by signal number `signal`. Exactly one of them is not None."""

    code: int | None
    signal: int | None = None

    @classmethod
    def of(cls, returncode: int) -> ExitStatus:
        """From subprocess's convention: a negative return code is a signal."""
        return cls(returncode) if returncode >= 0 else cls(None, -returncode)

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def text(self) -> str:
        """Goes after "rank 3": "exited with code 1", "was killed by SIGKILL"."""
        if self.signal is None:
            return f"exited with code {self.code}"
        try:
            return f"was killed by {signals.Signals(self.signal).name}"
        except ValueError:  # real-time signals have no name
            return f"was killed by signal {self.signal}"


@dataclass(frozen=True, slots=True)
class WorkerExitReport:
    """What a Python worker left behind when it ended by itself: an uncaught exception, or sys.exit.

    `type` is the class's qualified name without "builtins."; `bases` are those of its base classes, if known.
    """

    kind: Literal["exception", "exit"]
    type: str
    message: str
    traceback: str
    bases: tuple[str, ...] = ()


# ---- events


@dataclass(frozen=True, slots=True)
class RoundPublished:
    """The store holds this Round now; may arrive any number of times."""

    round: Round


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker of round `number` has ended and was reaped."""

    number: int
    rank: int
    local_rank: int
    slot: int
    status: ExitStatus
    exit_report: WorkerExitReport | None
    at: float


@dataclass(frozen=True, slots=True)
class StoreExited:
    """The process hosting the workers' store of round `number` has ended; `why` goes after "the workers' store"."""

    number: int
    why: str
    at: float
    status: ExitStatus | None = None


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The group of round `number` could not be started, or only in part. GroupGone follows once it is killed."""

    number: int
    why: str
    at: float


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """Every process of round `number`'s group has been reaped; so has its store, unless other nodes may need it."""

    number: int


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first optimizer step of round `number` was seen."""

    number: int
    at: float


@dataclass(frozen=True, slots=True)
class StoreAbandoned:
    """The store has been away for so long that waiting for it makes no sense; `why` is a whole sentence."""

    why: str
    at: float


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Someone asked the agent to stop: `signal` by name ("SIGTERM"), `exit_code` 128 + its number.

    `why`: what whoever sent it had to say, "" where that was nothing.
    """

    signal: str
    exit_code: int
    at: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class StopForced:
    """Someone asked again and does not want to wait any more."""

    signal: str
    exit_code: int
    at: float


@dataclass(frozen=True, slots=True)
class TimerExpired:
    """A time asked for by Wake has come; `at` is the time now, never before the time asked for."""

    at: float


Event = (
    RoundPublished
    | WorkerExited
    | StoreExited
    | StartFailed
    | GroupEnded
    | FirstStep
    | StoreAbandoned
    | StopRequested
    | StopForced
    | TimerExpired
)


# ---- phases


@dataclass(frozen=True, slots=True)
class PendingStop:
    """A stop someone asked for; rides in the phases until the agent leaves."""

    signal: str
    exit_code: int
    until: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Joining:
    """No group runs here; waits for a Round numbered above `past`."""

    past: int = 0
    stop: PendingStop | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """This node's group of `round` was started. `exits` are its workers that have ended, all with code 0.

    `stop`: someone asked this agent to leave; a Round without its node is awaited.
    """

    round: Round
    exits: tuple[WorkerExited, ...] = ()
    first_step: bool = False
    stop: PendingStop | None = None


@dataclass(frozen=True, slots=True)
class Settling:
    """A worker failed; until `until` the others may show why.

    It failed by itself before the first step, and perhaps all do; or it lost a peer, which has not been heard of yet.
    """

    round: Round
    exits: tuple[WorkerExited, ...]
    until: float


@dataclass(frozen=True, slots=True)
class Stopping:
    """The group of `round` ends or is being ended; GroupGone must come. `then` is what to turn to after it."""

    round: Round
    then: Round | None = None
    stop: PendingStop | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The agent leaves; nothing that happens now matters. `round` is the last one it knew, 0 if none."""

    round: int
    exit_code: int


Phase = Joining | Running | Settling | Stopping | Ended


# ---- actions


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Start this node's workers of `round`, and its store if rank 0 is here."""

    round: Round


@dataclass(frozen=True, slots=True)
class KillGroup:
    """SIGKILL every process of round `number`'s group, all at once, without grace. GroupGone follows."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class StopGroup:
    """Ask the group to stop by `signal`, SIGKILL what is left after `grace_s`. GroupGone follows."""

    number: int
    why: str
    grace_s: float
    signal: str


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Put `failure` where the planner sees it. Whoever performs this fills in `high_water` and `checkpoint`."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class ReportDone:
    """Say that all of this node's workers of round `number` have ended with code 0."""

    number: int


@dataclass(frozen=True, slots=True)
class ReportLeaving:
    """Ask for a Round without this node, because of `why`; if all nodes ask so, the job ends with `exit_code`."""

    why: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Put TimeCame into the inbox at monotonic time `at` or soon after."""

    at: float


@dataclass(frozen=True, slots=True)
class Leave:
    """The agent's work is over: exit with `exit_code`, say `why`."""

    exit_code: int
    why: str


Action = StartGroup | KillGroup | StopGroup | ReportFailure | ReportDone | ReportLeaving | SetTimer | Leave
