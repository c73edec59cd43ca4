"""Records that cross a process or the network: frozen dataclasses, JSON outside, never pickle.

They exist so that two processes, perhaps one minor version apart, agree on what was said. A document (`Round`,
`NodeRecord`, `Failure`) carries `version`, "major.minor": fields this code does not know are kept and written back,
another major is refused. Whatever cannot be understood raises `WireError` naming the field, and nothing else does.
This module never imports torch, never reads a clock and never touches a file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from elasticd.errors import WireError

VERSION = "1.0"

# Far above what any record needs, far below Python's recursion limit, so that what was read can be written back.
_MAX_DEPTH = 32

Outcome = Literal["succeeded", "failed", "stopped"]

_R = TypeVar("_R", bound="Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Base of everything here: `unknown` holds the fields a newer minor version wrote, to be written back."""

    unknown: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)

    def check(self) -> None:
        """Raise WireError if the fields make no sense together. Called after decoding."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; unknown fields are beside the known ones."""
        known = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "unknown"}
        return {**self.unknown, **known}


@dataclass(frozen=True, slots=True, kw_only=True)
class Document(Record):
    """A record that is stored or sent on its own, and so says which version wrote it."""

    version: str = VERSION

    def to_json(self) -> bytes:
        """UTF-8, one line, keys sorted. What UTF-8 cannot say (lone surrogates from undecodable output) becomes '?'."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8", "replace")

    @classmethod
    def from_json(cls: type[_R], text: bytes | str) -> _R:
        """The record `text` holds. Raises WireError, naming the field, for anything else."""
        return _document(cls, text)


@dataclass(frozen=True, slots=True)
class Member(Record):
    """One node's part in a Round. `slots` are those in use; a slot's index is the worker's local rank."""

    node: str
    incarnation: str
    slots: tuple[int, ...]

    def check(self) -> None:
        if not self.node or not self.slots:
            raise WireError(f"member {self.node!r} needs a name and at least one slot")
        if min(self.slots) < 0 or len(set(self.slots)) != len(self.slots):
            raise WireError(f"member {self.node!r}: slots must be distinct and not negative, got {list(self.slots)}")


@dataclass(frozen=True, slots=True)
class Bench(Record):
    """What is held against a slot: `strikes` failures without progress between them, `times` set aside so far,
    `left_s` seconds of cool-off left when this Round was published (0: it may be used)."""

    node: str
    slot: int
    strikes: int
    times: int = 0
    left_s: float = 0.0

    def check(self) -> None:
        if min(self.slot, self.strikes, self.times, self.left_s) < 0:
            raise WireError(f"bench of slot {self.slot} on {self.node!r}: no number may be negative")


@dataclass(frozen=True, slots=True)
class Exclusion(Record):
    """A node that was left out of a Round although it may come back: how many `times` in a row, the last one `age_s`
    seconds before this Round was published."""

    node: str
    times: int
    age_s: float = 0.0

    def check(self) -> None:
        if not self.node or self.times < 1 or self.age_s < 0:
            raise WireError(f"exclusion of {self.node!r}: {self.times} times, {self.age_s} s ago makes no sense")


@dataclass(frozen=True, slots=True)
class BudgetState(Record):
    """The restart budget's counters as of this Round's publication.

    `counted` restarts so far that count, `streak` of them since the last progress, `tokens` left of the hourly
    allowance (None: full), `high_water` the highest step any round has committed.
    """

    counted: int = 0
    streak: int = 0
    tokens: float | None = None
    high_water: int = 0

    def check(self) -> None:
        if min(self.counted, self.streak, self.high_water, self.tokens or 0) < 0:
            raise WireError("budget: no counter may be negative")


@dataclass(frozen=True, slots=True)
class Round(Document):
    """One agreed membership, or, with an `outcome`, the end of the job.

    `resume` proposes a checkpoint as (round, step). Ranks are numbered through the members in order, and through
    each member's slots in order. `restarts` counts the rounds started after the first one. `directory` names the
    checkpoint directory of rank 0's node, as its NodeRecord does; `run` tells two runs of one job apart.
    """

    number: int
    members: tuple[Member, ...]
    resume: tuple[int, int] | None = None
    restarts: int = 0
    budget: BudgetState = BudgetState()
    benched: tuple[Bench, ...] = ()
    excluded: tuple[Exclusion, ...] = ()
    directory: str = ""
    run: str = ""
    reason: str = ""
    outcome: Outcome | None = None
    exit_code: int | None = None

    def check(self) -> None:
        if self.number < 1 or self.restarts < 0:
            raise WireError(f"round {self.number}: numbers start at 1, restarts ({self.restarts}) at 0")
        if (self.outcome is None) != (self.exit_code is None):
            raise WireError(f"round {self.number}: outcome and exit_code come together or not at all")
        if self.exit_code is not None and not 0 <= self.exit_code <= 255:
            raise WireError(f"round {self.number}: exit_code {self.exit_code} is not in 0..255")
        if self.outcome is None and not self.members:
            raise WireError(f"round {self.number}: a round that runs needs at least one member")
        if len({m.node for m in self.members}) != len(self.members):
            raise WireError(f"round {self.number}: a node is a member twice")

    @property
    def world_size(self) -> int:
        return sum(len(m.slots) for m in self.members)

    @property
    def terminal(self) -> bool:
        """True for the Round that ends the job."""
        return self.outcome is not None

    def member(self, node: str) -> Member | None:
        return next((m for m in self.members if m.node == node), None)

    def group_rank(self, node: str) -> int:
        """The node's place among the members (torchrun's GROUP_RANK). KeyError if it is none."""
        for i, m in enumerate(self.members):
            if m.node == node:
                return i
        raise KeyError(f"{node!r} is not a member of round {self.number}")

    def ranks(self, node: str) -> range:
        """The global ranks on `node`, in local-rank order; empty if it is not a member."""
        first = 0
        for m in self.members:
            if m.node == node:
                return range(first, first + len(m.slots))
            first += len(m.slots)
        return range(0)

    def places(self) -> Iterator[tuple[int, str, int, int]]:
        """(rank, node, local rank, slot) of every worker, by rank."""
        rank = 0
        for m in self.members:
            for local_rank, slot in enumerate(m.slots):
                yield rank, m.node, local_rank, slot
                rank += 1


@dataclass(frozen=True, slots=True)
class NodeRecord(Document):
    """An agent's announcement of its node, kept under its lease and up to date by itself.

    `incarnation` is new whenever the owner of its workers starts anew. `address` is where it answers a knock,
    "host:port". `directory` names its checkpoint directory: two nodes that say the same share it; `highest` is the
    highest round number found there and among its logs. The rest is how far it is, each the number of a round, 0 if
    none: it has `seen` the round, its group was started (`ready`), has `stepped`, could be held at a checkpoint
    (`can_hold`), is `held` at one; it is `leaving` if somebody asked its agent to stop, and `warm` (1, else 0)
    once its workers would start at once.
    """

    id: str
    incarnation: str
    address: str
    slots: tuple[int, ...]
    directory: str = ""
    highest: int = 0
    seen: int = 0
    ready: int = 0
    stepped: int = 0
    can_hold: int = 0
    held: int = 0
    checkpoint: tuple[int, int] | None = None
    high_water: int = 0
    leaving: str = ""
    warm: int = 1

    def check(self) -> None:
        if not self.id or not self.slots:
            raise WireError(f"node {self.id!r} needs an id and at least one slot")
        if min(self.slots) < 0 or len(set(self.slots)) != len(self.slots):
            raise WireError(f"node {self.id!r}: slots must be distinct and not negative, got {list(self.slots)}")


@dataclass(frozen=True, slots=True)
class Failure(Document):
    """Why a node's group of a round ended without success.

    `kind` is "crash", "user_error", "store_lost", "stalled", "start_failed" or newer. `culprits` are (rank, slot);
    none when nobody on this node is to blame. `high_water` is the highest step seen, `checkpoint` the newest
    (round, step) saved, both by this round. `error` is the exception's type, `detail` its traceback.
    """

    round: int
    node: str
    kind: str
    culprits: tuple[tuple[int, int], ...]
    why: str
    high_water: int = 0
    checkpoint: tuple[int, int] | None = None
    error: str | None = None
    detail: str | None = None


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


def _document(cls: type[_R], text: bytes | str) -> _R:
    name = cls.__name__
    try:
        raw = json.loads(text, object_pairs_hook=_no_twins, parse_constant=_no_constant, parse_float=_finite)
        _check_depth(raw)
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise WireError(f"{name}: not JSON: {e}") from None
    if not isinstance(raw, dict):
        raise WireError(f"{name}: expected an object, got {_kind(raw)}")
    version = raw.get("version")
    major, dot, minor = version.partition(".") if isinstance(version, str) else ("", "", "")
    if not (dot and _is_number(major) and _is_number(minor)):
        raise WireError(f"{name}.version: expected 'major.minor', got {_short(version)}")
    if major != VERSION.partition(".")[0]:
        raise WireError(
            f"{name}: version {version} cannot be read by this elasticd, which speaks {VERSION}; "
            "run the same major version everywhere"
        )
    return _record(cls, raw, name)


def _record(cls: type[_R], raw: Any, where: str) -> _R:
    if not isinstance(raw, dict):
        raise WireError(f"{where}: expected an object, got {_kind(raw)}")
    known: dict[str, Any] = {}
    for name, (read, required) in _readers(cls).items():  # type: ignore[arg-type]  # mypy: class taken for instance
        if name in raw:
            known[name] = read(raw[name], f"{where}.{name}")
        elif required:
            raise WireError(f"{where}.{name}: missing")
    unknown = {k: v for k, v in raw.items() if k not in known}
    record = cls(**known, unknown=unknown)
    record.check()
    return record


_Reader = Callable[[Any, str], Any]


@functools.cache  # keyed by the handful of classes above
def _readers(cls: type[Record]) -> dict[str, tuple[_Reader, bool]]:
    hints = typing.get_type_hints(cls)
    no = dataclasses.MISSING
    return {
        f.name: (_reader(hints[f.name]), f.default is no and f.default_factory is no)
        for f in dataclasses.fields(cls)
        if f.name != "unknown"
    }


def _reader(hint: Any) -> _Reader:
    """A function that turns a JSON value into what `hint` promises, or raises WireError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (a for a in args if a is not type(None))
        read = _reader(inner)
        return lambda v, where: None if v is None else read(v, where)
    if origin is Literal:
        return functools.partial(_choice, args)
    if origin is tuple and args[-1] is Ellipsis:
        return functools.partial(_list, _reader(args[0]))
    if origin is tuple:
        return functools.partial(_fixed, [_reader(a) for a in args])
    if isinstance(hint, type) and issubclass(hint, Record):
        return functools.partial(_record, hint)
    return {str: _text, int: _int, float: _float}[hint]


def _list(read: _Reader, value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise WireError(f"{where}: expected a list, got {_kind(value)}")
    return tuple(read(v, f"{where}[{i}]") for i, v in enumerate(value))


def _fixed(readers: list[_Reader], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) != len(readers):
        raise WireError(f"{where}: expected a list of {len(readers)}, got {_short(value)}")
    return tuple(read(v, f"{where}[{i}]") for i, (read, v) in enumerate(zip(readers, value, strict=True)))


def _choice(allowed: tuple[Any, ...], value: Any, where: str) -> Any:
    if not isinstance(value, str) or value not in allowed:
        raise WireError(f"{where}: expected one of {', '.join(allowed)}, got {_short(value)}")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise WireError(f"{where}: expected a string, got {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise WireError(f"{where}: a string with half a surrogate pair cannot be written anywhere") from None
    return value


def _int(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise WireError(f"{where}: expected a whole number, got {_kind(value)}")
    if not -(2**63) <= value < 2**63:
        raise WireError(f"{where}: a number that does not fit 64 bits")
    return value


def _float(value: Any, where: str) -> float:
    if isinstance(value, float):
        return value
    return float(_int(value, where))


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    known = dict(pairs)
    if len(known) != len(pairs):
        raise ValueError("an object names a field twice")
    return known


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def _check_depth(value: Any, depth: int = 0) -> None:
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_depth(inner, depth + 1)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
