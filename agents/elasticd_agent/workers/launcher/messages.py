"""Messages of an agent and its owner: requests to the owner, and its reports.

Each travels as one message of elasticd/channel.py: its fields, and its name as "type". Both ends usually run from one
copy of the code (docs/adr/0007). Where none can be made, an upgrade may put a newer owner beside an older agent:
unknown fields are left out, an unknown request is refused, and an unknown report is ignored.

A group is known by a number that the agent gives it. A local rank is a worker's place in its group; the round's store
has STORE_RANK.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypedDict, get_args

from elasticd import channel

STORE_RANK = -1
"""The local rank of the round's store process."""


class WorkerFields(TypedDict):
    """A worker of a parked group: what its release adds to its environment, files for its output, None: ours, and the
    CPUs that it is bound to, none: ours."""

    env: dict[str, str]
    stdout: str | None
    stderr: str | None
    cpus: Sequence[int]


class ColdWorkerFields(WorkerFields):
    argv: list[str] | None  #: None: the group's


class UnkillableProcess(TypedDict):
    """A process that survives SIGKILL, and where it hangs in the kernel; a leftover has the rank of its session."""

    pid: int
    local_rank: int | None
    state: str
    wchan: str


# --- requests ---------------------------------------------------------------------------------------------------------


class HoldStates(NamedTuple):
    """Hold memory for saved states, and start the writer when a rank connects to its socket."""

    argv: list[str]
    env: dict[str, str]


class StartTemplate(NamedTuple):
    """Start the template; `launch` reaches its start-up hook through the environment."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    launch: channel.Message


class EndTemplate(NamedTuple):
    """Kill the template. Workers that it has forked run on."""


class Park(NamedTuple):
    """Fork a group that waits for its release. With a `store` there is one more process, which serves at once if the
    port is 0, otherwise from the release on."""

    group: int
    workers: int
    store: bool
    host: str
    port: int


class Release(NamedTuple):
    """Release a parked group; surplus processes end.

    Without a `store` the group uses one on another node, which is in its workers' `env` already. With `keep` the store
    outlives a group that succeeds, until the group is sent SIGKILL. `held_ranks`: local ranks of workers that wait for
    ReleaseHeld. `kept`: by local rank, the process at its entry that takes the place of the forked one, unless it has
    ended meanwhile; 0, or nothing: the forked one.
    """

    group: int
    store: bool
    keep: bool
    host: str
    port: int
    workers: list[WorkerFields]
    held_ranks: tuple[int, ...] = ()
    kept: Sequence[int] = ()


class ReleaseAhead(NamedTuple):
    """Release workers of a parked group ahead of their round: they run the script up to their entry, and wait there as
    those that are kept. The parked group is gone."""

    group: int
    workers: list[WorkerFields]


class EndKept(NamedTuple):
    """Kill processes at their entry, or on their way there ahead of their round: all but these, or `only` those."""

    except_pids: list[int]
    only: Sequence[int] = ()


class ReleaseHeld(NamedTuple):
    group: int
    ranks: list[int]


class Execute(NamedTuple):
    """Start a group cold; processes at their entry end. A worker's `env` is added to `workers_env`, and both to the
    common one; `store` is {argv} of the round's store, None where it is on another node; the other fields are as in
    Release.

    What all workers have is here once: the message has a bound, and a group may have hundreds of workers."""

    group: int
    store: dict[str, list[str]] | None
    keep: bool
    host: str
    port: int
    cwd: str
    env: dict[str, str]
    argv: list[str]
    workers_env: dict[str, str]
    workers: list[ColdWorkerFields]


class Signal(NamedTuple):
    """Signal a group; SIGKILL also reaches the store, and what the workers left behind. With `save`, the number of the
    round, workers first save the state of their last step, until a deadline.

    In place of SIGKILL the local ranks in `keep` that have Entered are asked to leave the round and wait at their
    entry, because of `why`. They get SIGKILL if they are not there after `park_s`. If any of them can hold the state in
    its process, nobody saves it, unless all that hold it get SIGKILL.
    """

    group: int
    signal: int
    save: int | None = None
    keep: Sequence[int] = ()
    park_s: float = 0.0
    why: str = ""


class Flush(NamedTuple):
    """No round follows: end processes at their entry, and have the writer write what it holds.

    Flushing follows and then Flushed, or Flushed alone if there is nothing to write. These processes may hold the state
    of round `held`, 0: none does; they first save it."""

    held: int = 0


Request = (
    HoldStates | StartTemplate | EndTemplate | Park | Release | ReleaseAhead | ReleaseHeld | EndKept | Execute | Signal
    | Flush
)  # fmt: skip


# --- between a worker and the owner, by the launch channel ------------------------------------------------------------


class LostPeer(NamedTuple):
    """The worker has raised `report`, an exit report as JSON, and waits for Unwind: a peer seems to be lost."""

    report: str


class NoFault(NamedTuple):
    """The answer to LostPeer where all workers of the group are well, and nobody has asked for its end since."""


class AtEntry(NamedTuple):
    """The worker has left its round, and waits for a release as a forked process does, or for the end of file.

    `holds`: the step of the state that its process holds, 0 for none.
    """

    step: int = 0
    holds: int = 0


class Unwind(NamedTuple):
    """The round is over because of `why`: leave it, and say AtEntry."""

    why: str


# --- reports ----------------------------------------------------------------------------------------------------------


class Preloading(NamedTuple):
    """The template begins to import this module."""

    module: str


class TemplateReady(NamedTuple):
    """The template can fork; or `cold` says why it must not."""

    cold: str | None
    seconds: float


class TemplateUnfit(NamedTuple):
    """The template ends; another one can fork if it leaves these modules out, each with its reason."""

    leave_out: dict[str, str]


class TemplateEnded(NamedTuple):
    why: str


class Parked(NamedTuple):
    """The group's processes wait for their release."""

    group: int
    pids: list[int]


class Refused(NamedTuple):
    """A request could not be carried out, and its group is none any more; or all of a parked group has ended."""

    why: str
    group: int | None = None


class StoreListens(NamedTuple):
    """The round's store accepts connections; its group's workers run later."""

    group: int
    port: int


class Started(NamedTuple):
    """The group's workers run, by local rank; `store` is the pid of the round's store, 0 where it is elsewhere."""

    group: int
    pids: list[int]
    store: int


class Released(NamedTuple):
    """Workers that were held run."""

    group: int
    ranks: list[int]


class Exited(NamedTuple):
    """A worker or the store was reaped at the monotonic time `at`; `status` is as from waitpid."""

    group: int
    local_rank: int
    pid: int
    status: int
    at: float


class Entered(NamedTuple):
    """This worker can be asked to leave the round and keep its process from now on."""

    group: int
    local_rank: int


class Left(NamedTuple):
    """This worker's call of `train` is over, by a result or an error: what follows is not entered again."""

    group: int
    local_rank: int


class RankLostPeer(NamedTuple):
    """LostPeer of a worker, at the monotonic time `at`."""

    group: int
    local_rank: int
    report: str
    at: float


class NotParked(NamedTuple):
    """These workers did not come to their entry within `seconds`, and get SIGKILL now."""

    group: int
    ranks: list[int]
    seconds: float


class Ended(NamedTuple):
    """No process of the group is left, except the store if it is kept, processes that survive SIGKILL, and the local
    ranks in `kept`: these wait at their entry for another release. `left_behind`: programs that ran on after a success,
    and got SIGTERM."""

    group: int
    unkillable: list[UnkillableProcess]
    kept: Sequence[int] = ()
    left_behind: Sequence[str] = ()


class ReleasedAhead(NamedTuple):
    group: int
    pids: list[int]


class Waits(NamedTuple):
    """A worker that was released ahead is at its entry."""

    pid: int


class KeptExited(NamedTuple):
    """A process that waited at its entry, or was on its way there, has ended."""

    pid: int
    status: int


class Reaped(NamedTuple):
    """A process that had survived SIGKILL has ended after all."""

    pid: int


class Unsaved(NamedTuple):
    """Workers of the group, as many as `ranks`, did not save their state within `seconds`, and are signalled now."""

    group: int
    ranks: int
    seconds: float


class Flushing(NamedTuple):
    """The largest state that is written has so many bytes."""

    bytes: int


class Flushed(NamedTuple):
    """Nothing is left to write: the newest checkpoint, and why a newer state is none."""

    step: int | None = None
    path: str = ""
    why: str = ""


class WithoutWriter(NamedTuple):
    """No states are held in memory any more."""

    why: str


Report = (
    Preloading | TemplateReady | TemplateUnfit | TemplateEnded | Parked | Refused | StoreListens | Started | Released
    | Entered | Left | RankLostPeer | Exited | NotParked | Ended | ReleasedAhead | Waits | KeptExited | Reaped | Unsaved
    | Flushing | Flushed | WithoutWriter
)  # fmt: skip
_REQUESTS = {kind.__name__: kind for kind in get_args(Request)}
_REPORTS = {kind.__name__: kind for kind in get_args(Report)}


def to_message(record: Request | Report | Unwind | NoFault) -> channel.Message:
    return {"type": type(record).__name__, **record._asdict()}


def decode_request(message: channel.Message) -> Request | None:
    """None for a request that only a newer agent sends."""
    kind: type[Request] | None = _REQUESTS.get(message["type"])
    return None if kind is None else channel.to_named_tuple(kind, message)


def decode_report(message: channel.Message) -> Report | None:
    """None for a report that only a newer owner sends."""
    kind: type[Report] | None = _REPORTS.get(message["type"])
    return None if kind is None else channel.to_named_tuple(kind, message)
