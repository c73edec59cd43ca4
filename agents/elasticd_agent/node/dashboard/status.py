"""How a job stands at this moment: its state in a word, and what is wrong in a sentence. Pure."""

from __future__ import annotations

from elasticd_agent.node.dashboard import ranks
from elasticd_agent.node.dashboard.decode import JobStatus
from elasticd_agent.system.durations import in_words

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
    """A word and a sentence; None if nothing is wrong."""
    if job.ended:
        return None
    newest = job.newest_round
    if newest is not None and newest.first_step_at is None and newest.lost_s is not None:
        return (
            "recovering",
            f"No step for {in_words(newest.lost_s)}: round {newest.number} is starting, since {newest.reason}",
        )
    if job.phase in ("stopping", "settling"):
        return "stopping", f"The workers of round {job.round} are being ended."
    for rank in job.ranks:
        word, kind = ranks.condition(rank, job)
        if kind == "bad":
            others = " The others wait for it." if len(job.ranks) > 1 else ""
            since = f"nothing of it has moved for {in_words(rank.idle_s)}."
            return "stalled", f"Rank {rank.rank} on {rank.node} is {word}: {since}{others}"
    still = [rank for rank in job.ranks if ranks.condition(rank, job)[1] == "warn"]
    if still:
        who = f"Rank {still[0].rank} on {still[0].node} has" if len(still) == 1 else f"{len(still)} ranks have"
        return "stalled", f"{who} not moved for {in_words(max(rank.idle_s for rank in still))}."
    return None


def state(job: JobStatus) -> tuple[str, str]:
    """What a chip says, and its kind."""
    wrong = problem(job)
    return (f"{job.state}, {wrong[0]}", "warn") if wrong else (job.state, JOB_STATE_STYLES.get(job.state, "idle"))
