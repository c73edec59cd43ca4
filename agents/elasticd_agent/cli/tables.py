"""What daemons answer -> tables and pages of plain text, for a person at three in the morning.

It exists apart from asking so that what is shown can be tested without a daemon. Columns are aligned, the sentence that
says why comes last and is never wrapped or cut. What came from jobs has its control characters made visible. Pure.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elasticd_agent.model.phrases import count, plural, ranges

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SHOWN_NODES = 3
SHOWN_RANKS = 64
"""Of more ranks those that have not moved for longest are shown."""
SHOWN_ROUNDS = 20
"""Of more rounds the newest are shown; --json has up to a hundred."""
_NAME = 11


def jobs(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "no jobs; elasticd submit FILE hands one in\n"
    cells = [
        (
            _text(row.get("job")),
            _text(row.get("state")),
            _nodes(row.get("nodes")),
            str(row.get("slots") or "-"),
            _age(row.get("age_seconds") if row.get("ended_at") is None else row.get("ended_seconds"))
            + (" ago" if row.get("ended_at") is not None else ""),
            _text(row.get("reason")),
        )
        for row in rows
    ]
    return table(("JOB", "STATE", "NODES", "SLOTS", "AGE", "REASON"), cells)


def cancelled(answer: Mapping[str, Any]) -> str:
    leaving = answer.get("leaving")
    stopping = f"; its workers on {_nodes(leaving)} are being stopped" if leaving else ""
    return visible(f"{answer['job']}: {answer['reason']}{stopping}") + "\n"


def nodes(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "no nodes: no daemon has announced one\n"
    cells = [
        (
            _text(row.get("node")),
            _text(row.get("state")),
            f"{row.get('used', 0)}/{row.get('slots', 0)}",
            str(len(row.get("gpus") or ()) or "-"),
            _nodes(row.get("jobs")),
            _text(row.get("address")) or "-",
            _text((row.get("versions") or {}).get("elasticd")) or "-",
            _text(row.get("reason")),
        )
        for row in rows
    ]
    return table(("NODE", "STATE", "USED", "GPUS", "JOBS", "ADDRESS", "VERSION", "REASON"), cells)


def status(job: Mapping[str, Any]) -> str:
    """One job's page: what it does and why, then its rounds."""
    progress = job.get("progress") or {}
    lines = [f"{_text(job.get('job'))}: {_state(job)}"]
    facts = [
        ("why", _text(job.get("reason"))),
        *_where(job),
        ("round", _round(progress)),
        ("step", _step(progress)),
        ("checkpoint", _checkpoint(progress)),
        ("goodput", _goodput(progress)),
        ("restarts", str(progress["restarts"]) if progress.get("restarts") is not None else ""),
        ("wants", _wants(job)),
        ("submitted", _submitted(job)),
    ]
    lines += [f"  {name:<{_NAME}} {value}" for name, value in facts if value]
    rounds = progress.get("rounds") or []
    page = "\n".join(lines) + "\n" + _ranks(progress.get("ranks"))
    if rounds:
        older = len(rounds) - SHOWN_ROUNDS
        page += "\n" + table(
            ("ROUND", "SINCE", "WORKERS", "NODES", "LOST", "REASON"), [_round_row(r) for r in rounds[-SHOWN_ROUNDS:]]
        )
        page += f"and {older} older ones: --json\n" if older > 0 else ""
    return page


def overview(both: Mapping[str, Any]) -> str:
    """All jobs, all nodes."""
    return jobs(both["jobs"]) + "\n" + nodes(both["nodes"])


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they have to be; the last one as long as it is."""
    cells = [tuple(heads), *map(tuple, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads) - 1)]
    return "".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip() + "\n"
        for row in cells
    )


def age(seconds: float) -> str:
    """ "7s", "12m", "3h20m", "4d" """
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole}s"
    if whole < 7200:
        return f"{whole // 60}m"
    if whole < 2 * 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d"


def visible(text: str) -> str:
    """The text with control characters made visible: no job's words may steer a terminal, or begin another line."""
    return _CONTROL.sub(lambda found: repr(found.group())[1:-1], text)


def _text(value: object) -> str:
    return visible(value) if isinstance(value, str) else ""


def _nodes(names: object) -> str:
    some = [visible(str(name)) for name in names] if isinstance(names, list) else []
    more = f" +{len(some) - _SHOWN_NODES}" if len(some) > _SHOWN_NODES else ""
    return (",".join(some[:_SHOWN_NODES]) + more) or "-"


def _age(seconds: object) -> str:
    return age(seconds) if isinstance(seconds, (int, float)) else "-"


def _state(job: Mapping[str, Any]) -> str:
    state = _text(job.get("state"))
    if job.get("ended_at") is None:
        return state
    leaving = f"; its workers are still leaving {_nodes(job['leaving'])}" if job.get("leaving") else ""
    return f"{state}, {_age(job.get('ended_seconds'))} ago, with exit code {job.get('exit_code')}{leaving}"


def _where(job: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = job.get("places") or []
    if not rows:
        return [("nodes", _nodes(job.get("nodes")) if job.get("nodes") else "")]
    found = []
    for index, row in enumerate(rows):
        slots = row.get("slots") or []
        which = f" {plural(len(slots), 'slot')} {','.join(ranges(slots))}" if slots else ""
        why = f": {_text(row.get('reason'))}" if row.get("reason") else ""
        found.append(("" if index else "nodes", f"{_text(row.get('node'))}{which}, {_text(row.get('state'))}{why}"))
    return found


def _round(progress: Mapping[str, Any]) -> str:
    number, size = progress.get("round"), progress.get("world_size")
    if not number:
        return ""
    phase = _text(progress.get("phase"))
    return f"{number}" + (f", {phase}" if phase else "") + (f", {count(size, 'worker')}" if size else "")


def _step(progress: Mapping[str, Any]) -> str:
    step, rate = progress.get("step"), progress.get("steps_per_second")
    if not isinstance(step, int):
        return ""
    return f"{step:,}" + (f", {rate:.3g} steps/s" if isinstance(rate, (int, float)) else "")


def _checkpoint(progress: Mapping[str, Any]) -> str:
    saved = progress.get("checkpoint")
    if not isinstance(saved, dict):
        return ""
    return f"step {saved.get('step')} of round {saved.get('round')}, {_age(saved.get('age_seconds'))} ago"


def _goodput(progress: Mapping[str, Any]) -> str:
    part = progress.get("goodput")
    return f"{100 * part:.1f} % of the time since its start made steps that count" if isinstance(part, float) else ""


def _wants(job: Mapping[str, Any]) -> str:
    wants = job.get("wants")
    if not isinstance(wants, dict) or job.get("ended_at") is not None:
        return ""
    (few, many), (low, high) = wants["nodes"], wants["slots"]
    nodes = f"{few}" if few == many else f"{few} to {many}"
    slots = f"{low}" if low == high else f"{low} to {high}"
    return f"{nodes} {plural(many, 'node')} with {slots} {plural(high, 'slot')} each"


def _submitted(job: Mapping[str, Any]) -> str:
    if not isinstance(job.get("submitted_at"), (int, float)):
        return ""
    by = f" by {_text(job.get('by'))}" if job.get("by") else ""
    return f"{_moment(job['submitted_at'])}{by}, {_age(job.get('age_seconds'))} ago, as number {job.get('number')}"


def _round_row(one: Mapping[str, Any]) -> tuple[str, ...]:
    size = one.get("world_size")
    return (
        str(one.get("round")),
        _moment(one.get("at")),
        str(size) if size else "-",
        _nodes(one.get("nodes")),
        _lost(one),
        _text(one.get("reason")),
    )


def _lost(one: Mapping[str, Any]) -> str:
    """What it cost: until its first step, and how many steps were made again."""
    seconds, steps = one.get("lost_seconds"), one.get("lost_steps")
    if not isinstance(seconds, (int, float)):
        return "-"
    return f"{seconds:.1f}s" + (f", {count(steps, 'step')}" if isinstance(steps, int) else "")


def _ranks(rows: object) -> str:
    if not isinstance(rows, list) or not rows:
        return ""
    idle = lambda one: -one["idle_seconds"] if isinstance(one.get("idle_seconds"), (int, float)) else 0.0  # noqa: E731
    shown = sorted(rows, key=idle)[:SHOWN_RANKS] if len(rows) > SHOWN_RANKS else rows
    cells = [
        (
            str(one.get("rank")),
            _text(one.get("node")),
            _doing(one),
            str(one.get("step")),
            f"{one['idle_seconds']:.1f}s ago" if isinstance(one.get("idle_seconds"), (int, float)) else "-",
        )
        for one in shown
    ]
    more = f"and {len(rows) - SHOWN_RANKS} more that moved later: --json\n" if len(rows) > SHOWN_RANKS else ""
    return "\n" + table(("RANK", "NODE", "PHASE", "STEP", "MOVED"), cells) + more


def _doing(one: Mapping[str, Any]) -> str:
    if one.get("exited") is True:
        return "done"
    word = {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead"}.get(str(one.get("state")))
    barrier = _text(one.get("barrier"))
    return word or _text(one.get("phase")) + (f" {barrier}" if barrier else "")


def _moment(at: object) -> str:
    if not isinstance(at, (int, float)) or not 0 < at < 1e11:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
