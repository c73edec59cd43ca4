"""A job's state in a word, and its present problem in a sentence. Pure."""

from __future__ import annotations

from elasticd_agent.system.durations import in_words
from elasticd_daemon.api.schema import JobStatus
from elasticd_daemon.dashboard import ranks

JOB_STATE_STYLES = {
    "running": "good",
    "succeeded": "good",
    "starting": "busy",
    "leaving": "busy",
    "pending": "idle",
    "cancelled": "idle",
    "failed": "bad",
}


def problem(job: JobStatus) -> tuple[str, str] | None:
    """A word and a sentence; None without a problem."""
    if job.ended:
        return None
    progress = job.known
    newest = progress.newest_round
    if newest is not None and newest.first_step_at is None and newest.lost_seconds is not None:
        lost = in_words(newest.lost_seconds)
        return "recovering", f"No step for {lost}: round {newest.round} is starting: {newest.reason}"
    if progress.phase in ("stopping", "settling"):
        return "stopping", f"The workers of round {progress.round} are being stopped."
    conditions = [(rank, *ranks.condition(rank, progress)) for rank in progress.ranks]
    for rank, word, style in conditions:
        if style == "bad":
            others = " The other ranks wait for it." if len(progress.ranks) > 1 else ""
            since = f"no progress for {in_words(rank.idle_seconds)}."
            return "stalled", f"Rank {rank.rank} on {rank.node} is {word}: {since}{others}"
    stalled = [rank for rank, _, style in conditions if style == "warn"]
    if stalled:
        one = stalled[0]
        which = f"Rank {one.rank} on {one.node} has" if len(stalled) == 1 else f"{len(stalled)} ranks have"
        return "stalled", f"{which} made no progress for {in_words(max(rank.idle_seconds for rank in stalled))}."
    return None


def state(job: JobStatus) -> tuple[str, str]:
    """The words of a chip, and its style."""
    found = problem(job)
    return (f"{job.state}, {found[0]}", "warn") if found else (job.state, JOB_STATE_STYLES.get(job.state, "idle"))
