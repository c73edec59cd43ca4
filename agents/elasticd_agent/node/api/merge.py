"""Pure: what each node knows of a job -> what is known of it.

A node has its own ranks, its own log since it joined, and a checkpoint's record only if rank 0 ran there. Where two
nodes differ the first one counts: times of two hosts are shown side by side, never subtracted from each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from elasticd_agent.node.api.schema import JobProgress, RankProgress, RoundStatus

MAX_ROUNDS = 100


def merge_progress(rows: Sequence[JobProgress], unreachable: Mapping[str, str]) -> JobProgress | None:
    """`rows`: the one that counts first. `unreachable`: by node, why it did not answer. None without any row."""
    if not rows:
        return None
    newest = max(row.round or 0 for row in rows)
    rounds: dict[int, RoundStatus] = {}
    ranks: dict[int, RankProgress] = {}
    for row in reversed(rows):
        rounds |= {one.round: one for one in row.rounds}
        if (row.round or 0) == newest:  # in an older round ranks are numbered differently
            ranks |= {one.rank: one for one in row.ranks}
    checkpoints = [row.checkpoint for row in rows if row.checkpoint is not None]
    samples = [row.step_samples for row in rows if row.step_samples]
    return replace(
        rows[0],
        step=max((row.step for row in rows if row.step is not None), default=None),
        checkpoint=max(checkpoints, key=lambda one: (one.round, one.step), default=None),
        rounds=tuple(rounds[number] for number in sorted(rounds)[-MAX_ROUNDS:]),
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        step_samples=min(samples, key=lambda one: one[0], default=()),
        unreachable=dict(unreachable),
    )
