"""`manifest.json`, the description of a checkpoint, read and written without torch.

It holds the parent (the checkpoint that its round resumed from), the size and checksum of `state.pt`, and a seal, the
checksum of the manifest's own fields, so that a flipped bit in it is as visible as one in the state. A manifest that
cannot be trusted is a value with a reason; the content of a file never raises.

The manifest makes a directory a checkpoint, so nothing in it is believed before its seal is right: a disk that flips a
bit in a step's number would otherwise send a job back in silence. Fields of a newer minor version are kept and written
back; another major version is refused with the advice to use the elasticd that wrote it.

A relinked checkpoint is one that a round did not train: it resumed from it and made it its own, with the same files, so
that the lineage of the new round is complete by itself and older rounds may be deleted.
"""

from __future__ import annotations

import builtins
import errno
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from elasticd.bounded_json import JsonObject

VERSION = "1.1"
STATE = "state.pt"
METADATA = ".metadata"
"""torch.distributed.checkpoint's own description of the shards."""
MANIFEST = "manifest.json"

try:
    import xxhash

    _ALGORITHMS: dict[str, Callable[[], Any]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}
except ImportError:  # an interpreter of the job's own that has this library, but not what it depends on
    _ALGORITHMS = {"sha256": hashlib.sha256}
CHECKSUM_ALGORITHM = next(iter(_ALGORITHMS))
"""The algorithm of new checkpoints. The checksum finds damage, not forgery, and xxh3 takes a tenth of sha256's time
(0.04 s instead of 0.57 s a gigabyte); `xxhsum -H2 state.pt` checks a file by hand."""
NO_CHECKSUM = "none:"
"""The checksum of a state in memory."""
_MAX_MANIFEST_BYTES = 1 << 20
"""Ten thousand ranks' files fit."""
_INTEGER_LIMIT = 1 << 63


SizeAndChecksum = tuple[int, str]
"""The size of a file in bytes, and its checksum."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint. Raises ValueError for fields that contradict each other."""

    round: int
    step: int
    parent: tuple[int, int] | None  #: the (round, step) its round resumed from; None: the round began from nothing
    world_size: int  #: the size of the round that trained it; `job` and `run` are that round's, too
    bytes: int  #: the size of state.pt; `checksum` is of the same file
    checksum: str  #: the algorithm and the digits, "xxh3_128:…"; older checkpoints have sha256
    job: str
    run: str
    cursor: JsonObject | None = None
    wall: float = 0.0
    """When the state was saved, unix seconds; for people only. A relinked checkpoint has its parent's."""
    relinked: bool = False  #: the round did not train this: it made its parent's checkpoint its own
    version: str = VERSION
    files: Mapping[str, SizeAndChecksum] = field(default_factory=dict)
    """The files of a sharded checkpoint other than state.pt."""
    unknown: Mapping[str, Any] = field(default_factory=dict, repr=False)  #: fields of a newer minor version

    def __post_init__(self) -> None:
        if min(self.round, self.step, self.bytes) < 0 or self.world_size < 1:
            raise ValueError(
                f"round {self.round}, step {self.step}: no number may be negative, and world_size must be at least 1"
            )
        if max(self.round, self.step, self.bytes, self.world_size) >= _INTEGER_LIMIT:
            raise ValueError("a number does not fit 64 bits")
        if self.parent is not None and not (0 <= self.parent[0] < self.round and 0 <= self.parent[1] <= self.step):
            raise ValueError(
                f"r{self.round}-s{self.step} cannot have the parent r{self.parent[0]}-s{self.parent[1]}: "
                "a parent has an older round and no later step"
            )

    @property
    def name(self) -> str:
        """The name of the checkpoint's directory."""
        return f"r{self.round}-s{self.step}"

    @property
    def all_files(self) -> dict[str, SizeAndChecksum]:
        """All files of the checkpoint: state.pt and the shards."""
        return {STATE: (self.bytes, self.checksum), **self.files}

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        return sum(size for size, _ in self.all_files.values())

    def to_json(self) -> builtins.bytes:
        """Readable JSON with its seal. Raises TypeError or ValueError for a cursor that is not JSON."""
        content = {**self.unknown, **{name: getattr(self, name) for name in _CHECKS}}
        content = json.loads(json.dumps(content, allow_nan=False))  # as a reader gets it: lists, and names as strings
        content["seal"] = seal_of(content)
        return json.dumps(content, indent=1).encode() + b"\n"

    @property
    def trained_as(self) -> tuple[int, int] | None:
        """The parent of a round that resumes from this: the (round, step) that trained it, so that re-linked
        checkpoints in between may be deleted.
        """
        return self.parent if self.relinked else (self.round, self.step)

    def relinked_to(self, round: int) -> Manifest:
        """The manifest as the first checkpoint of `round`, which resumed from this one."""
        return replace(self, round=round, parent=self.trained_as, relinked=True)


def shard_name(rank: int) -> str:
    """The file with a rank's part of a sharded state, as torch.distributed.checkpoint names it."""
    return f"__{rank}_0.distcp"


def shard_names(world_size: int) -> list[str]:
    """All files of a sharded state."""
    return [*map(shard_name, range(world_size)), METADATA, STATE]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Why a manifest cannot be used."""

    why: str
    is_permanent: bool = True  #: false: a newer elasticd, or a later try, may read it


def read(checkpoint: Path) -> Manifest | Unreadable:
    """The manifest in the directory `checkpoint`."""
    try:
        with open(checkpoint / MANIFEST, "rb", opener=_open_nonblocking) as file:
            data = file.read(_MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            return Unreadable(f"{MANIFEST} is missing")
        return Unreadable(f"{MANIFEST} cannot be read: {os.strerror(error.errno or errno.EIO)}", is_permanent=False)
    return parse(data)


def _open_nonblocking(path: str, flags: int) -> int:
    """Also a pipe, which is damage."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse(data: bytes) -> Manifest | Unreadable:
    """The inverse of `to_json`, also of another minor version."""
    if len(data) > _MAX_MANIFEST_BYTES:
        return Unreadable(f"{MANIFEST} is longer than {_MAX_MANIFEST_BYTES} bytes")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        return Unreadable(f"{MANIFEST} is not JSON")
    if not isinstance(raw, dict):
        return Unreadable(f"{MANIFEST} is not an object")
    version = raw.get("version")
    major, dot, minor = version.partition(".") if isinstance(version, str) else ("", "", "")
    if not (dot and _is_digits(major) and _is_digits(minor)):
        return Unreadable(f"{MANIFEST}: version is {version!r}, not 'major.minor'")
    if major != VERSION.partition(".")[0]:
        why = (
            f"{MANIFEST} has version {version}; this elasticd reads {VERSION}. Load it with the elasticd that wrote it"
        )
        return Unreadable(why, is_permanent=False)
    seal = raw.pop("seal", None)
    if seal != seal_of(raw):
        return Unreadable(f"{MANIFEST} does not match its seal: it was damaged or edited")
    raw.setdefault("files", {})  # version 1.0
    for name, check in _CHECKS.items():
        if name not in raw or not check(raw[name]):
            return Unreadable(f"{MANIFEST}: {name} is missing or invalid")
    known = {name: raw[name] for name in _CHECKS}
    if known["parent"] is not None:
        known["parent"] = tuple(known["parent"])
    known["files"] = {name: (size, checksum) for name, (size, checksum) in known["files"].items()}
    try:
        return Manifest(**known, unknown={name: value for name, value in raw.items() if name not in _CHECKS})
    except ValueError as error:
        return Unreadable(f"{MANIFEST}: {error}")


class Checksum:
    """A checksum that is computed piece by piece. Raises LookupError for an algorithm that this interpreter lacks."""

    def __init__(self, algorithm: str = CHECKSUM_ALGORITHM) -> None:
        self._algorithm = algorithm
        self._digest = _ALGORITHMS[algorithm]()

    def update(self, data: builtins.bytes | memoryview) -> None:
        self._digest.update(data)

    def __str__(self) -> str:
        return f"{self._algorithm}:{self._digest.hexdigest()}"


def seal_of(content: Mapping[str, Any]) -> str:
    """The checksum of the description itself, of all its fields but the seal."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def _is_digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 6


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_parent(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 2 and all(map(_is_integer, value)))


def _is_checksum(value: Any) -> bool:
    return isinstance(value, str) and ":" in value


def _is_files(value: Any) -> bool:
    return isinstance(value, dict) and all(
        os.path.basename(name) == name not in (STATE, MANIFEST)
        and isinstance(field_value, list)
        and len(field_value) == 2
        and _is_integer(field_value[0])
        and field_value[0] >= 0
        and _is_checksum(field_value[1])
        for name, field_value in value.items()
    )


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "version": _is_text,
    "round": _is_integer,
    "step": _is_integer,
    "parent": _is_parent,
    "relinked": lambda value: isinstance(value, bool),
    "world_size": _is_integer,
    "bytes": _is_integer,
    "checksum": _is_checksum,
    "job": _is_text,
    "run": _is_text,
    "cursor": lambda value: value is None or isinstance(value, dict),
    "wall": lambda value: isinstance(value, float) or _is_integer(value),
    "files": _is_files,
}
assert {known.name for known in fields(Manifest)} == {*_CHECKS, "unknown"}
