"""The state machine's alphabet: Phase (where the agent is), Event (what happened), Action (what to do).

Closed unions of frozen dataclasses, so that the state machine is pure and a story can be written down and replayed.
Events are in the past tense, actions are imperatives. Every `at` is in seconds of the agent's own monotonic clock.

An event names the round that it is about, so that one which arrives late is recognised; an action that ends a group
carries the sentence for it. Nothing here has behaviour beyond words and sums: a new event is a class here, a case in
the state machine, and a line in its tests.
"""

from __future__ import annotations

import math
import signal as signals
from dataclasses import dataclass

from elasticd.heartbeat.exit_report import ExitReport
from elasticd_agent.model.records import Failure, Round
from elasticd_agent.model.reports import HangVerdict


@dataclass(frozen=True, slots=True)
class StateMachineRules:
    """The state machine's constants: its node, and the numbers of the policy it uses."""

    node: str
    user_error_wait_s: float
    shutdown_timeout_s: float
    incarnation: str | None = None
    multi_node: bool = False  #: other nodes may take part, so they need reports
    leave_grace_s: float | None = None  #: for the others' next round, or the checkpoint; None: `shutdown_timeout_s`
    leave_on_stop: bool = False  #: a stop makes this node leave: the leader knows, and can pause the group first

    @property
    def stop_limit_s(self) -> float:
        """Seconds from the request to stop until the rest is killed, at the latest."""
        return self.shutdown_timeout_s if self.leave_grace_s is None or not self.leave_on_stop else self.leave_grace_s


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """The end of a process: by itself with `code`, or by signal number `signal`. Exactly one of them is not None."""

    code: int | None
    signal: int | None = None
    out_of_memory: bool = False  #: the kernel has killed it for lack of memory

    @classmethod
    def from_returncode(cls, returncode: int) -> ExitStatus:
        """The status in subprocess's convention: a negative return code is a signal."""
        return cls(returncode) if returncode >= 0 else cls(None, -returncode)

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def text(self) -> str:
        """Continues "rank 3": "exited with code 1", "was killed by SIGKILL"."""
        if self.signal is None:
            return f"exited with code {self.code}"
        if self.out_of_memory:
            return "was killed by SIGKILL (out of memory)"
        try:
            return f"was killed by {signals.Signals(self.signal).name}"
        except ValueError:  # real-time signals have no name
            return f"was killed by signal {self.signal}"


# ---- events


@dataclass(frozen=True, slots=True)
class RoundPublished:
    """The store holds this Round now; may arrive any number of times."""

    round: Round


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker of the round has ended and was reaped."""

    round_number: int
    rank: int
    local_rank: int
    slot: int
    status: ExitStatus
    exit_report: ExitReport | None
    at: float
    ran_s: float = 0.0
    still_runs: bool = False  #: it has raised, but has not ended: see PeerLost
    stayed: bool = False  #: its process has been in another round before


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A worker has raised what the loss of a peer raises, and waits in its process to be asked to leave the round.

    `exit` is what another script would have ended by.
    """

    exit: WorkerExited


@dataclass(frozen=True, slots=True)
class StoreExited:
    """The process hosting the workers' store of the round has ended."""

    round_number: int
    why: str  #: continues "the workers' store"
    at: float
    status: ExitStatus | None = None


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The group of the round could not be started, or only in part. GroupEnded follows once it is killed."""

    round_number: int
    why: str
    at: float


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """Every process of the round's group has been reaped; so has its store, unless other nodes may need it.

    Workers with the `kept_local_ranks` have left the round instead, and wait for a release.
    """

    round_number: int
    kept_local_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first optimizer step of the round was seen."""

    round_number: int
    at: float


@dataclass(frozen=True, slots=True)
class StoreAbandoned:
    """The store has been unavailable for longer than this agent waits for it, or of no use; or no owner stays."""

    why: str  #: a whole sentence
    at: float
    group_stuck: bool = False  #: the group has not trained since, because members are lost


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The agent was asked to stop."""

    signal: str  #: by name, "SIGTERM"
    exit_code: int  #: 128 + its number
    at: float
    why: str = ""  #: the sender's reason, if it gave one


@dataclass(frozen=True, slots=True)
class StopForced:
    """The agent was asked to stop once more: stop without grace."""

    signal: str
    exit_code: int
    at: float


@dataclass(frozen=True, slots=True)
class FlushStarted:
    """The newest state in memory is being written; its size is known a moment after the request."""

    bytes: int
    at: float


@dataclass(frozen=True, slots=True)
class Flushed:
    """Nothing is left to write. `step` is that of the checkpoint that was written, None if there was no newer state."""

    step: int | None = None


@dataclass(frozen=True, slots=True)
class TimerExpired:
    """The time of a SetTimer has come."""

    at: float  #: now, never before the requested time


Event = (
    RoundPublished
    | WorkerExited
    | PeerLost
    | StoreExited
    | StartFailed
    | GroupEnded
    | FirstStep
    | StoreAbandoned
    | StopRequested
    | StopForced
    | FlushStarted
    | Flushed
    | TimerExpired
)


# ---- phases


@dataclass(frozen=True, slots=True)
class PendingStop:
    """A requested stop; the phases carry it until the agent leaves."""

    signal: str
    exit_code: int
    until: float
    why: str = ""
    report_soon_at: float = math.inf  #: then the leader hears that `until` is near


@dataclass(frozen=True, slots=True)
class Joining:
    """No group runs here; waits for a Round numbered above `past_round`."""

    past_round: int = 0
    stop: PendingStop | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """This node's group of `round` was started. `exits` are its workers that have ended, all with code 0.

    `stop`: this agent was asked to leave, and waits for a Round without its node.
    """

    round: Round
    exits: tuple[WorkerExited, ...] = ()
    has_stepped: bool = False
    stop: PendingStop | None = None


@dataclass(frozen=True, slots=True)
class Settling:
    """A worker failed; until `until` the other workers' exits may show the root cause.

    It failed by itself before the first step, and perhaps all do; or it lost a peer whose exit is not known yet.
    """

    round: Round
    exits: tuple[WorkerExited, ...]
    until: float


@dataclass(frozen=True, slots=True)
class Stopping:
    """The group of `round` ends or is being ended; GroupEnded must come. `next_round`: the Round to start after it."""

    round: Round
    next_round: Round | None = None
    stop: PendingStop | None = None


@dataclass(frozen=True, slots=True)
class Flushing:
    """The work on this job is over; the newest state in memory is being written, until `until` at the latest.

    `job_failed`: its last step is worth a longer wait than a stop allows.
    """

    round: int
    exit_code: int
    why: str
    job_failed: bool = False
    until: float = math.inf


@dataclass(frozen=True, slots=True)
class Ended:
    """The agent leaves; later events have no effect. `round` is the last one it knew, 0 if none."""

    round: int
    exit_code: int


Phase = Joining | Running | Settling | Stopping | Flushing | Ended


# ---- actions


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Start this node's workers of `round`, and its store if rank 0 is here."""

    round: Round


@dataclass(frozen=True, slots=True)
class KillGroup:
    """SIGKILL every process of the round's group, all at once, without grace. GroupEnded follows.

    With `keep` a worker whose script can leave the round and enter the next one keeps its process, except on
    `hung_slots`. GroupEnded follows all the same, when each worker is dead or waits for a release.
    """

    round_number: int
    why: str
    save: bool = True  #: workers that survive have a moment to save the state of their last step
    keep: bool = False
    hung_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StopGroup:
    """Send `signal` to the group, SIGKILL the rest after `grace_s`. GroupEnded follows."""

    round_number: int
    why: str
    grace_s: float
    signal: str


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Report `failure` to the leader. The performer fills in `high_water`, `checkpoint` and `step`."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class ReportDone:
    """Report that all of this node's workers of the round have ended with code 0."""

    round_number: int


@dataclass(frozen=True, slots=True)
class ReportLeaving:
    """Request a Round without this node, because of `why`; if all nodes do, the job ends with `exit_code`.

    `soon`: its time is nearly over. Where too few nodes would remain, the group is to pause at a checkpoint now.
    """

    why: str
    exit_code: int
    soon: bool = False


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Put TimerExpired into the inbox at monotonic time `at` or soon after."""

    at: float


@dataclass(frozen=True, slots=True)
class Flush:
    """Write the newest state in memory, if there is one that no round needs: FlushStarted and Flushed follow."""

    job_failed: bool


@dataclass(frozen=True, slots=True)
class Leave:
    """The agent's work is over: exit with `exit_code`, log `why`. `saved_step`: a Flush has written this step."""

    exit_code: int
    why: str
    saved_step: int | None = None


Action = StartGroup | KillGroup | StopGroup | ReportFailure | ReportDone | ReportLeaving | SetTimer | Flush | Leave


# ---- notices of the rendezvous to the deciding loop, beside Events: facts that the state machine does not need


@dataclass(frozen=True, slots=True)
class MasterKnown:
    """The workers' store of the round listens at this address."""

    round_number: int
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """The leader requests that the round pauses at a checkpoint (`on`), or withdraws the request.

    `all_stay`: no node leaves, so ranks that keep their process can hold the state in place of a checkpoint.
    """

    round_number: int
    on: bool
    all_stay: bool = False


@dataclass(frozen=True, slots=True)
class StartAheadRequested:
    """The leader requests that this node, which is not in the round, starts its workers ahead of the next one."""

    round_number: int


@dataclass(frozen=True, slots=True)
class HangReportRequested:
    """The leader requests every node's hang report of the round (`on`), or withdraws the request."""

    round_number: int
    on: bool


@dataclass(frozen=True, slots=True)
class StragglersFound:
    """The ranks of the round that the others wait for."""

    round_number: int
    ranks: tuple[tuple[int, float], ...]  #: (rank, how many times as long as the others' its own work takes)


@dataclass(frozen=True, slots=True)
class LeaderNotice:
    """Base of what only the leader's agent knows."""


@dataclass(frozen=True, slots=True)
class LeadershipChanged(LeaderNotice):
    """This agent leads the job from now on (`leads`), or does not any more."""

    leads: bool


@dataclass(frozen=True, slots=True)
class FaultDetected(LeaderNotice):
    """A fault has broken the round."""

    round_number: int
    cause: str  #: in one word
    culprit: str  #: the node at fault, "" where no single one is
    reported_at: float | None = None
    """When the leader read the failure that its node reports at once; None: lost or hung nodes report none."""


@dataclass(frozen=True, slots=True)
class StoreAvailability:
    """The store became unavailable, or available again after `seconds`."""

    unavailable: bool
    why: str
    seconds: float


@dataclass(frozen=True, slots=True)
class WaitingFor(LeaderNotice):
    """The job waits for something, usually while nothing runs."""

    why: str
    more_nodes: bool  #: it waits for more nodes


@dataclass(frozen=True, slots=True)
class JoinRejected:
    """This agent cannot take part in this job; `why` names the remedy."""

    why: str


@dataclass(frozen=True, slots=True)
class ProbeReceived:
    """Another agent has probed this one, as it does at any sign of trouble."""


Notice = (
    Event
    | ProbeReceived
    | MasterKnown
    | PauseRequested
    | StartAheadRequested
    | HangReportRequested
    | HangVerdict
    | StragglersFound
    | StoreAvailability
    | LeaderNotice
    | JoinRejected
)
