"""The requests of evidence.py to its helper, one JSON line each."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from elasticd.channel import Message
from elasticd_agent.system.files import temporary_directory

VERDICT_FILE = "verdict.json"

FilePath = str | Path


def fallback_directory(temporary: Path | None = None) -> Path:
    """The directory of this user's jobs for evidence without a log directory, or whose log directory cannot be
    written."""
    return (temporary or temporary_directory()) / f"elasticd-evidence-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class EvidenceTarget:
    """One worker, and where its files are."""

    rank: int
    pid: int
    logs: tuple[FilePath, ...] = ()
    heartbeat: FilePath | None = None
    stacks: FilePath | None = None  #: the file to which the worker's faulthandler appends
    flight: FilePath | None = None  #: the file to which the worker's heartbeat thread writes the flight recorder
    pipe: FilePath | None = None  #: NCCL's dump pipe, if a dump is to be requested; `dump`: the file that NCCL writes
    dump: FilePath | None = None


@dataclass(frozen=True, slots=True)
class CollectRequest:
    """Report evidence of `ranks`, and write whole recordings to `directory`, which exists, within `seconds`."""

    directory: str
    seconds: float
    ranks: tuple[EvidenceTarget, ...]
    spy: str = ""  #: py-spy's path
    nvml: str | None = None  #: the directory of pynvml, "" if it is not installed; None without GPUs
    ras: int = 0  #: the port of NCCL's RAS on this machine's loopback; 0: there is none

    @classmethod
    def from_message(cls, data: Message) -> CollectRequest:
        ranks = tuple(EvidenceTarget(**{**target, "logs": tuple(target["logs"])}) for target in data["ranks"])
        return cls(**{**data, "ranks": ranks})


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """Put `file`, its name and text, or all of `source` into `final`; keep that of the newest `rounds` only."""

    final: str
    source: str = ""
    file: tuple[str, str] | None = None
    rounds: int = 0


def to_message(request: CollectRequest | PublishRequest) -> Message:
    return dict(json.loads(json.dumps(asdict(request), default=str)))
