"""A job: its command and size (JobSpec), its rules (Policy), and the agent's own output (RunnerSettings).

Everything a person can choose is in three frozen values, checked when they are made: a contradiction is one sentence at
the start instead of a surprise at the first failure.

A time that only makes sense relative to another one is checked against it (`_TIMES_THAT_FIT`), and the sentence does
the arithmetic: which sum it must exceed, by how much to raise it. All defaults fit together; a test derives the table
of docs/jobs.md from them.

The values do not change while a job runs, and nothing here reads the machine: whether a script exists or a port is free
is `preflight`'s question. The exit codes are what the program that started a job acts on.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, IntFlag
from pathlib import Path
from typing import Literal

from elasticd.errors import UsageError
from elasticd_agent.model.records import MAX_NAME_BYTES

REQUEUE_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: the job itself is fine, a scheduler should start it again."""
INTERRUPTED_EXIT_CODE = 128 + 2
"""Ended by SIGINT, as a shell reports it."""
TERMINATED_EXIT_CODE = 128 + 15
"""Ended by SIGTERM, as a shell reports it: the job was cancelled, or its nodes were stopped."""


EVIDENCE_TIMEOUT_S = 3.0
"""The most time that taking the evidence of a hang may cost."""


class EntrypointMode(str, Enum):
    """The way from the entrypoint to a worker's command line; the names follow the Python interpreter's own."""

    SCRIPT = "script"  # python -u train.py args
    MODULE = "module"  # python -u -m pkg.train args
    EXEC = "exec"  # the entrypoint itself, no Python (--no-python)


class Streams(IntFlag):
    """A selection of a worker's standard streams; the numbers are those of torchrun's --redirects and --tee."""

    NONE = 0
    OUT = 1
    ERR = 2
    BOTH = 3


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files for TLS to a store. `cert` and `key` come together: the client certificate (mTLS)."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            given, missing = ("key", "cert") if self.cert is None else ("cert", "key")
            raise UsageError(f"TLS: {given} without {missing}; a client certificate is both, or neither")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The store in which the agents of one job meet, and the number of nodes."""

    backend: Literal["memory", "c10d", "etcd"] = "memory"  #: "memory": one node, without a store on the network
    endpoints: tuple[tuple[str, int], ...] = ()  #: (host, port)
    tls: Tls | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    is_host: bool | None = None  #: None: c10d's host is the agent whose machine has the endpoint's address
    local_addr: str | None = None  #: None: the address that `local_address` finds
    node: str | None = None  #: None: the machine's host name
    node_rank: int | None = None  #: its place among the nodes while all are there; None: they are in order of arrival
    min_nodes: int = 1
    max_nodes: int = 1

    def __post_init__(self) -> None:
        if self.min_nodes < 1:
            raise UsageError(f"a job needs at least 1 node, not {self.min_nodes}")
        if self.min_nodes > self.max_nodes:
            raise UsageError(
                f"at least {self.min_nodes} nodes but at most {self.max_nodes} is impossible; "
                f"write {self.max_nodes}:{self.min_nodes}"
            )
        if self.backend == "memory":
            if self.max_nodes > 1:
                raise UsageError(f"{self.max_nodes} nodes cannot meet in the memory of one; use c10d or etcd")
        elif not self.endpoints:
            raise UsageError(f"{self.backend} needs an endpoint, HOST:PORT")
        if self.backend == "c10d" and len(self.endpoints) != 1:
            raise UsageError(f"c10d has one endpoint, not {len(self.endpoints)}; several are etcd's")
        for host, port in self.endpoints:
            _check_port(f"the store on {host}", port, lowest=1)
        if (self.user is None) != (self.password is None):
            raise UsageError(
                f"the store's user {self.user!r} needs a password" if self.user else "the store's password needs a user"
            )
        if self.node is not None:
            check_identifier("node id", self.node)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One node's part of a job: what to run, how many workers side by side, and where its files go."""

    python: str
    mode: EntrypointMode
    entrypoint: str
    args: tuple[str, ...]
    cwd: Path
    job_id: str
    run: str  #: tells two runs of the same job apart
    role: str = "default"
    min_workers: int = 1
    max_workers: int = 1
    spares: int = 0  #: nodes beyond the most that stand by; of a job on one node, slots
    devices: tuple[str, ...] = ()  #: a GPU for each slot, as in CUDA_VISIBLE_DEVICES; empty: not one GPU per worker
    checkpoint_dir: Path | None = None
    preload: tuple[str, ...] = ()
    integrate: bool = False  #: frameworks get their callback without a line in the script
    log_dir: Path | None = None  #: /dev/null: no log files are kept
    redirects: Mapping[int, Streams] = field(default_factory=dict)  #: by local rank; a rank without an entry has none
    tee: Mapping[int, Streams] = field(default_factory=dict)  #: the same
    local_ranks_filter: frozenset[int] | None = None
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    master_addr: str = "localhost"
    master_port: int | None = None
    virtual_local_rank: bool = False
    numa_binding: str | None = None  #: node, socket, exclusive or core-complex
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    rendezvous: Rendezvous = Rendezvous()
    environment: Mapping[str, str] | None = field(default=None, repr=False)  #: workers inherit it; None: the agent's

    def __post_init__(self) -> None:
        """Raise UsageError for numbers, names and ranks that contradict each other."""
        if self.min_workers < 1:
            raise UsageError(f"a job needs at least 1 worker, not {self.min_workers}")
        if self.min_workers > self.max_workers:
            raise UsageError(
                f"at least {self.min_workers} workers but at most {self.max_workers} is impossible; "
                f"write {self.max_workers}:{self.min_workers}"
            )
        if self.spares < 0:
            raise UsageError(f"--spares {self.spares}: it is a number of spares, 0 or more")
        check_identifier("job id", self.job_id)
        check_identifier("run token", self.run)
        for name, streams in (("redirects", self.redirects), ("tee", self.tee)):
            self._check_ranks_exist(name, streams)
        if self.local_ranks_filter is not None:
            self._check_ranks_exist("the local ranks filter", dict.fromkeys(self.local_ranks_filter))
        if self.master_port is not None:
            _check_port("the workers' store", self.master_port, lowest=1)
        for name in self.signals:
            _check_catchable(name)

    @property
    def slots(self) -> int:
        """The number of this node's slots: one for each worker, and the spare ones of a job on one node."""
        return self.max_workers + (self.spares if self.rendezvous.max_nodes == 1 else 0)

    def base_environment(self, agent_environment: Mapping[str, str]) -> Mapping[str, str]:
        """The environment of the job's processes before anything is added; `agent_environment` is the agent's."""
        return agent_environment if self.environment is None else self.environment

    def _check_ranks_exist(self, what: str, ranks: Mapping[int, object]) -> None:
        # One command shared by machines of different sizes may name missing ranks; naming no existing one is a mistake.
        if ranks and min(ranks) >= self.max_workers:
            named = ", ".join(map(str, sorted(ranks)))
            raise UsageError(
                f"{what} names local rank {named}, but {self.max_workers} worker(s) have local ranks "
                f"0 to {self.max_workers - 1}"
            )


@dataclass(frozen=True, slots=True)
class Policy:
    """The numbers every decision is made by. All times are seconds; docs/jobs.md has the keys that set them."""

    max_restarts: int | None = None  #: a hard total; None: only restarts without progress and per hour are limited
    max_restarts_per_hour: int = 60  #: without effect where `max_restarts` is given
    no_progress_limit: int = 3  #: restarts in a row without progress between them
    backoff_s: tuple[float, ...] = (0, 1, 2, 4, 8, 16, 32, 60)  #: before each of them; the last one repeats
    shutdown_timeout_s: float = 30.0  #: from a stop's signal to SIGKILL
    user_error_wait_s: float = 0.5  #: how long the same error of the other ranks is waited for
    startup_ceiling_s: float = 600.0  #: without progress, before the process group exists
    first_step_ceiling_s: float = 1800.0  #: without progress, from then to the first step
    progress_ceiling_s: float = 1800.0  #: without progress, while nothing is learned of a phase
    hang_floor_s: float | None = None  #: None: by the strength of the evidence (docs/hangs.md)
    hang_factor: float = 5.0  #: the deadline of a step, in longest recent steps
    stopped_after_s: float = 2.5  #: how long a process is stopped (state T) before it is hung
    slow_ceiling_s: float | None = None  #: None: the process group's own timeout, or 1800 s
    slow_factor: float = 1.5  #: a straggler's own work, relative to its peers'
    evidence_timeout_s: float = EVIDENCE_TIMEOUT_S  #: for the evidence of a hang, before the group is killed
    on_hang: Literal["restart", "report"] = "restart"
    slot_strikes: int = 2  #: failures without progress before a slot is quarantined
    slot_cooloff_s: float = 60.0  #: of its first quarantine; see `slot_quarantine_s`
    lease_s: float = 3.0  #: how long a node is registered after its last renewal
    renewal_s: float = 1.0  #: between two renewals
    store_timeout_s: float = 0.9  #: of one request to the store
    seen_timeout_s: float = 1.0  #: for a member to acknowledge a new Round
    last_call_timeout_s: float = 5.0  #: for more nodes, once the minimum has joined
    join_timeout_s: float = 600.0  #: for the minimum of nodes at the start
    replace_timeout_s: float = 600.0  #: for the minimum of nodes later
    adopt_timeout_s: float = 60.0  #: a member without a lease is kept, while its workers may train
    hold_timeout_s: float = 30.0  #: how long workers pause at a checkpoint for the next round
    grow: Literal["auto", "always", "never"] = "auto"  #: when a running job takes joiners; docs/torchrun.md
    grow_debounce_s: float = 1.0  #: how long a joiner waits for others
    node_cooloff_s: float = 5.0  #: of a node that was lost twice; it doubles each time
    store_away_s: float = 300.0  #: how long a job continues while the store is unavailable

    def __post_init__(self) -> None:
        """Raise UsageError for a rule that cannot be followed, or that another one makes meaningless."""
        if self.max_restarts is not None and self.max_restarts < 0:
            raise UsageError(f"max_restarts {self.max_restarts}: restarts cannot be negative; 0 means none")
        for name, least in (("max_restarts_per_hour", 1), ("no_progress_limit", 1), ("slot_strikes", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{option_name(name)} {getattr(self, name)} must be at least {least}")
        if not self.backoff_s or self.backoff_s[0] < 0 or list(self.backoff_s) != sorted(self.backoff_s):
            raise UsageError(f"backoff_s {self.backoff_s} must be a growing list of seconds, not empty, not negative")
        if self.slot_strikes > self.no_progress_limit:
            raise UsageError(
                f"slot_strikes {self.slot_strikes} must not exceed no_progress_limit {self.no_progress_limit}, or the "
                f"job ends before a slot is quarantined; lower it by {self.slot_strikes - self.no_progress_limit}"
            )
        self._check_hang_times()
        self._check_times()

    @property
    def least_deadline_s(self) -> float:
        """The time without progress before which nothing is suspected, however short the steps are."""
        return MIN_DEADLINE_S if self.hang_floor_s is None else self.hang_floor_s

    def _check_times(self) -> None:
        """Every time is possible, and every wait leaves room for what it waits for, the store's limits included."""
        for name in (option.name for option in fields(self) if option.type == "float"):
            value = getattr(self, name)
            if name.endswith("_s") and name not in _ZERO_ALLOWED_TIMES and not value > 0:
                raise UsageError(f"{option_name(name)} {value:g} s must be more than 0 seconds")
            if name.endswith("_s") and not 0 <= value <= MAX_WAIT_S:
                why = "is longer than a year" if value > 0 else "cannot be negative"
                raise UsageError(f"{option_name(name)} {value:g} s {why}")
        for name, terms, note, so_that in _TIMES_THAT_FIT:
            least = sum(factor * getattr(self, term) for factor, term in terms)
            words = (
                f"{'' if factor == 1 else f'{factor} × '}{option_name(term)} {getattr(self, term):g} s"
                for factor, term in terms
            )
            self._require_exceeds(name, least, " + ".join(words) + note, so_that)

    def _check_hang_times(self) -> None:
        """A hang is judged on more than one observation, and not before there was time for its evidence."""
        floor = self.least_deadline_s
        least = f"hang_floor {floor:g} s" if self.hang_floor_s is not None else f"the least hang floor, {floor:g} s"
        for name in ("hang_floor_s", "stopped_after_s"):
            value = getattr(self, name)
            if value is not None and not TWO_OBSERVATIONS_S <= value <= MAX_WAIT_S:
                raise UsageError(
                    f"{option_name(name)} {value:g} s must be at least {TWO_OBSERVATIONS_S:g} s, "
                    f"two looks at the workers, and at most a year"
                )
        for name in ("hang_factor", "slow_factor"):
            value = getattr(self, name)
            if not 1 < value < float("inf"):
                raise UsageError(f"{name} {value:g} must be more than 1: it says how many times the usual is too long")
        if self.slow_ceiling_s is not None:
            self._require_exceeds("slow_ceiling_s", floor, least, "slow ranks have more time than idle ones")
        if self.hang_floor_s is not None and self.progress_ceiling_s < floor:
            raise UsageError(
                f"progress_ceiling {self.progress_ceiling_s:g} s must not be less than {least}: it is the most a group "
                f"may be quiet, the floor the least; raise it by {floor - self.progress_ceiling_s:.6g} s"
            )
        if self.on_hang not in ("restart", "report"):
            raise UsageError(f"on_hang {self.on_hang!r} must be restart or report")

    def _require_exceeds(self, name: str, least: float, sum_of: str, so_that: str) -> None:
        value = getattr(self, name)
        if not value > least:
            raise UsageError(
                f"{option_name(name)} {value:g} s must exceed {sum_of}, so that {so_that}; "
                f"raise it by more than {least - value:.6g} s"
            )

    def slot_quarantine_s(self, quarantines: int) -> float:
        """Seconds of the n-th quarantine of a slot (n >= 1): twice as long each time, at most an hour."""
        return float(min(self.slot_cooloff_s * 2 ** (min(quarantines, 32) - 1), max(3600.0, self.slot_cooloff_s)))


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """The agent's own output: events, metrics, console."""

    event_log: Path | None = None
    metrics_port: int | None = None  #: None: no metrics are served; 0: any free port
    metrics_addr: str = "127.0.0.1"
    quiet: bool = False  #: only warnings and errors
    notice_services: tuple[tuple[str, str], ...] = ()  #: they are asked for preemption notices, each with its URL
    runtime_dir: Path | None = None  #: None: a new private directory for sockets and heartbeats, deleted at the end

    def __post_init__(self) -> None:
        if self.metrics_port is not None:
            _check_port("metrics", self.metrics_port, lowest=0)


MIN_DEADLINE_S = 5.0
"""Without progress, a group is suspected after this time at the earliest. What follows depends on the evidence."""
TWO_OBSERVATIONS_S = 0.5
"""The workers are observed four times a second."""
MAX_WAIT_S = 365 * 86400.0
"""Every wait has a deadline, and the system's own timers overflow at a few centuries."""
_ZERO_ALLOWED_TIMES = (
    "last_call_timeout_s",
    "replace_timeout_s",
    "grow_debounce_s",
    "node_cooloff_s",
    "shutdown_timeout_s",
    "user_error_wait_s",
)
_NEXT_ROUND_REASON = "the round that a group holds for can come"
_LEASES_REJUDGED_REASON = "leases are judged again before any node counts as lost"
_TIMES_THAT_FIT: tuple[tuple[str, tuple[tuple[int, str], ...], str, str], ...] = (
    ("lease_s", ((1, "renewal_s"), (2, "store_timeout_s")), "", "a renewal that fails can be tried once more"),
    ("lease_s", ((3, "store_timeout_s"),), "", "an unanswered request costs less than a third of it"),
    ("seen_timeout_s", ((1, "store_timeout_s"),), "", "a node that only waits for the store is not taken for dead"),
    ("join_timeout_s", ((1, "last_call_timeout_s"),), ", a part of it", "a job that has enough nodes begins"),
    ("startup_ceiling_s", ((1, "user_error_wait_s"),), ", a part of it", "an error of all ranks is seen as one"),
    ("hold_timeout_s", ((1, "grow_debounce_s"), (1, "seen_timeout_s")), "", _NEXT_ROUND_REASON),
    ("adopt_timeout_s", ((1, "lease_s"), (1, "renewal_s")), "", _LEASES_REJUDGED_REASON),
    ("store_away_s", ((1, "lease_s"), (1, "renewal_s")), "", _LEASES_REJUDGED_REASON),
)
"""(time, the terms of the sum that it must exceed, a note, so that ...)."""


def option_name(name: str) -> str:
    """The name of this field of Policy in flags and keys; all of Policy's errors begin with it."""
    return name.removesuffix("_s")


def _check_port(what: str, port: int, *, lowest: int) -> None:
    if not lowest <= port <= 65535:
        raise UsageError(f"port {port} for {what} is out of range; ports go from {lowest} to 65535")


def check_identifier(what: str, text: str) -> None:
    """Raises UsageError if `text` cannot name a job, a run or a node, which `what` names."""
    # It becomes part of keys in a store and of file names, which have at most 255 bytes.
    if not text or text != text.strip() or not text.isprintable() or "/" in text or text.startswith("."):
        raise UsageError(f"{what} {text!r} must be printable, without '/', a leading '.' or spaces around it")
    size = len(text.encode(errors="surrogateescape"))
    if size > MAX_NAME_BYTES:
        raise UsageError(f"{what} {text[:16]!r}… has {size} bytes; at most {MAX_NAME_BYTES} fit")


def check_new_id(what: str, text: str) -> None:
    """Raises UsageError. Jobs of earlier versions may have other ids, and keep them."""
    check_identifier(what, text)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
        raise UsageError(
            f"{what} {text!r} has characters that a shell or a URL reads otherwise; use letters, digits, '.', '_' and "
            "'-', and begin with a letter or a digit"
        )


def strip_interpreter(command: Sequence[str]) -> tuple[Literal["", "module", "no_python"], Sequence[str]] | None:
    """The key that a command needs which begins with an interpreter, if any, and its words with that key."""
    name, *rest = command
    if not re.fullmatch(r"(.*/)?python[0-9.]*", name):
        return None
    if rest[:1] == ["-m"] and rest[1:]:
        return "module", rest[1:]
    return ("no_python", command) if not rest or rest[0].startswith("-") else ("", rest)


def _check_catchable(name: str) -> None:
    if name in ("SIGKILL", "SIGSTOP"):
        raise UsageError(f"{name} cannot be handled by any process; leave it out of --signals-to-handle")
    if not name.startswith("SIG") or name.startswith("SIG_") or name not in signal.Signals.__members__:
        raise UsageError(f"--signals-to-handle: there is no signal {name!r}; names are SIGTERM, SIGUSR1 …")
