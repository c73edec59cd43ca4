"""What a job's answer (docs/http.md) says, checked field by field: what comes from a runner may be anything.

It exists so that drawing never meets a word where a number should be. What makes no sense is left out. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PLANNED_CAUSES = frozenset({"start", "resize", "join", "drain", ""})
"""Causes of rounds that are nobody's fault."""


@dataclass(frozen=True, slots=True)
class RankProgress:
    rank: int
    node: str = ""
    slot: int | None = None
    phase: str = ""
    step: int = 0
    idle_s: float = 0.0
    state: str = ""
    barrier: str = ""
    exited: bool = False


@dataclass(frozen=True, slots=True)
class RoundStatus:
    """Times are unix seconds. `over_at`: when it made its last step, None while it may make more."""

    number: int
    at: float = 0.0
    world_size: int = 0
    nodes: tuple[str, ...] = ()
    cause: str = ""
    reason: str = ""
    first_step: int | None = None
    first_step_at: float | None = None
    last_step: int | None = None
    ended_at: float | None = None
    lost_s: float | None = None
    lost_steps: int | None = None
    lost: tuple[str, ...] = ()

    @property
    def planned(self) -> bool:
        return self.cause in PLANNED_CAUSES and not self.lost

    @property
    def kind(self) -> str:
        """Why it began, in a word; as the metrics have it."""
        return "node lost" if self.lost and self.cause in PLANNED_CAUSES else self.cause or "round"


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    round: int
    step: int
    age_s: float | None


@dataclass(frozen=True, slots=True)
class AssignmentStatus:
    node: str
    state: str
    slots: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobStatus:
    """All that is known of one job."""

    job: str
    number: int = 0
    state: str = ""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    assignments: tuple[AssignmentStatus, ...] = ()
    submitted_by: str = ""
    age_s: float | None = None
    ended_at: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    max_workers: int | None = None
    node: str = ""
    round: int | None = None
    phase: str = ""
    world_size: int | None = None
    step: int | None = None
    rate: float | None = None
    restarts: int | None = None
    goodput: float | None = None
    began_at: float | None = None
    checkpoint: CheckpointStatus | None = None
    rounds: tuple[RoundStatus, ...] = ()
    ranks: tuple[RankProgress, ...] = ()
    step_samples: tuple[tuple[float, int, int], ...] = ()
    unreachable_nodes: tuple[tuple[str, str], ...] = field(default=())
    runner_problem: str = ""

    @property
    def ended(self) -> bool:
        return self.ended_at is not None

    @property
    def newest_round(self) -> RoundStatus | None:
        return self.rounds[-1] if self.rounds else None


def job_status(said: Mapping[str, Any]) -> JobStatus:
    """`said` is GET /v1/jobs/JOB."""
    wants, progress = _dict(said.get("wants")), _dict(said.get("progress"))
    return JobStatus(
        job=_text(said.get("job")),
        number=_whole(said.get("number")) or 0,
        state=_text(said.get("state")),
        reason=_text(said.get("reason")),
        nodes=_texts(said.get("nodes")),
        assignments=tuple(
            AssignmentStatus(
                _text(p.get("node")), _text(p.get("state")), len(_list(p.get("slots"))), _text(p.get("reason"))
            )
            for p in _dicts(said.get("places"))
        ),
        submitted_by=_text(said.get("by")),
        age_s=_real(said.get("age_seconds")),
        ended_at=_real(said.get("ended_at")),
        ended_s=_real(said.get("ended_seconds")),
        exit_code=_whole(said.get("exit_code"), least=-256),
        max_workers=_most(wants),
        node=_text(progress.get("node")),
        round=_whole(progress.get("round")),
        phase=_text(progress.get("phase")),
        world_size=_whole(progress.get("world_size")),
        step=_whole(progress.get("step")),
        rate=_real(progress.get("steps_per_second")),
        restarts=_whole(progress.get("restarts")),
        goodput=_real(progress.get("goodput")),
        began_at=_real(progress.get("began_at")),
        checkpoint=_checkpoint(_dict(progress.get("checkpoint"))),
        rounds=tuple(_round(one) for one in _dicts(progress.get("rounds"))),
        ranks=tuple(found for one in _dicts(progress.get("ranks")) if (found := _rank(one)) is not None),
        step_samples=_track(progress.get("track")),
        unreachable_nodes=tuple((node, _text(why)) for node, why in _dict(progress.get("silent")).items()),
        runner_problem=_text(progress.get("trouble")),
    )


def _most(wants: Mapping[str, Any]) -> int | None:
    nodes, slots = _list(wants.get("nodes"))[-1:], _list(wants.get("slots"))[-1:]
    most = [_whole(one) for one in (*nodes, *slots)]
    return most[0] * most[1] if len(most) == 2 and most[0] is not None and most[1] is not None else None


def _checkpoint(one: Mapping[str, Any]) -> CheckpointStatus | None:
    step = _whole(one.get("step"))
    return (
        None if step is None else CheckpointStatus(_whole(one.get("round")) or 0, step, _real(one.get("age_seconds")))
    )


def _round(one: Mapping[str, Any]) -> RoundStatus:
    return RoundStatus(
        _whole(one.get("round")) or 0,
        _real(one.get("at")) or 0.0,
        _whole(one.get("world_size")) or 0,
        _texts(one.get("nodes")),
        _text(one.get("cause")),
        _text(one.get("reason")),
        _whole(one.get("first_step")),
        _real(one.get("first_step_at")),
        _whole(one.get("last_step")),
        _real(one.get("over_at")),
        _real(one.get("lost_seconds")),
        _whole(one.get("lost_steps")),
        _texts(one.get("lost")),
    )


def _rank(one: Mapping[str, Any]) -> RankProgress | None:
    number = _whole(one.get("rank"))
    if number is None:
        return None
    return RankProgress(
        number,
        _text(one.get("node")),
        _whole(one.get("slot")),
        _text(one.get("phase")),
        _whole(one.get("step")) or 0,
        _real(one.get("idle_seconds")) or 0.0,
        _text(one.get("state")),
        _text(one.get("barrier")),
        one.get("exited") is True,
    )


def _track(value: object) -> tuple[tuple[float, int, int], ...]:
    found = []
    for point in _list(value):
        if isinstance(point, (list, tuple)) and len(point) == 3:
            at, number, step = _real(point[0]), _whole(point[1]), _whole(point[2])
            if at is not None and number is not None and step is not None:
                found.append((at, number, step))
    return tuple(found)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _whole(value: object, least: int = 0) -> int | None:
    good = isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 62
    return value if good and isinstance(value, int) else None


def _real(value: object) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12
    return float(value) if good and isinstance(value, (int, float)) else None


def _list(value: object) -> list[Any]:
    return list(value[:100_000]) if isinstance(value, (list, tuple)) else []


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: object) -> list[dict[str, Any]]:
    return [one for one in _list(value) if isinstance(one, dict)]


def _texts(value: object) -> tuple[str, ...]:
    return tuple(one for one in _list(value) if isinstance(one, str))
