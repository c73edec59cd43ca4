"""What the helper is asked for: one JSON object on its standard input, written by evidence.py."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

NO_STACKS = "no stacks: "
"""How the file of a rank's stacks begins where there are none, and why."""


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """One worker; paths are "" where there is none. See evidence.Target."""

    rank: int
    pid: int
    logs: tuple[str, ...] = ()
    heartbeat: str = ""
    stacks: str = ""
    flight: str = ""
    pipe: str = ""
    dump: str = ""


@dataclass(frozen=True, slots=True)
class CollectRequest:
    """Evidence of `ranks` into `directory`, which is there, within `seconds`.

    `spy` is py-spy's path, `nvml` a directory that holds pynvml; "" without. `nvml` None: there are no GPUs.
    """

    directory: str
    seconds: float
    ranks: tuple[WorkerRequest, ...]
    why: str = ""
    spy: str = ""
    nvml: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> CollectRequest:
        ranks = tuple(WorkerRequest(**{**one, "logs": tuple(one["logs"])}) for one in data["ranks"])
        return cls(**{**data, "ranks": ranks})


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """Put `files`, by name, and everything in `source` ("": nothing) into `final`, and rotate what is older there."""

    final: str
    source: str = ""
    files: tuple[tuple[str, str], ...] = ()
    rounds: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> PublishRequest:
        return cls(**{**data, "files": tuple((name, text) for name, text in data["files"])})
