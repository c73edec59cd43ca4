"""Pure: what each node knows of a job -> what is known of it.

It exists because a node has its own ranks, its own log since it joined, and a checkpoint's news only if rank 0 was
there; whoever asks wants the job. Where two nodes tell the same, the first one counts: times of two hosts are shown
side by side, never subtracted from each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MOST_ROUNDS = 100


def merge_progress(rows: Sequence[Mapping[str, Any]], silent: Mapping[str, str]) -> dict[str, Any] | None:
    """`rows`: the one that counts first. `silent`: by node, why it has said nothing. None if nobody knows anything."""
    if not rows:
        return None
    first = rows[0]
    newest = max(_whole(row.get("round")) for row in rows)
    rounds: dict[int, Any] = {}
    for row in rows:
        for one in _dicts(row.get("rounds")):
            rounds.setdefault(_whole(one.get("round")), one)
    ranks = {
        _whole(one.get("rank")): one
        for row in rows
        if _whole(row.get("round")) == newest  # who is still in an older one numbers its ranks differently
        for one in _dicts(row.get("ranks"))
    }
    saved = [found for row in rows if isinstance(found := row.get("checkpoint"), dict)]
    steps = [step for row in rows if isinstance(step := row.get("step"), int)]
    tracks = [track for row in rows if isinstance(track := row.get("track"), list) and track]
    return {
        **first,
        "step": max(steps, default=None),
        "checkpoint": max(saved, key=lambda one: (_whole(one.get("round")), _whole(one.get("step"))), default=None),
        "rounds": [rounds[number] for number in sorted(rounds)][-MOST_ROUNDS:],
        "ranks": [ranks[rank] for rank in sorted(ranks)],
        "track": min(tracks, key=_first_time, default=[]),
        "silent": dict(silent),
    }


def _first_time(track: Sequence[Any]) -> float:
    point = track[0]
    return float(point[0]) if isinstance(point, (list, tuple)) and point and isinstance(point[0], (int, float)) else 0.0


def _dicts(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
