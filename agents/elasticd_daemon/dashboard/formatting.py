"""Rates and times for people, in the host's time zone."""

from __future__ import annotations

import time
from urllib.parse import quote

from elasticd_agent.system.durations import in_words


def rate(per_second: float) -> str:
    """ "12.3 steps/s"; of slow ones the seconds a step takes."""
    if per_second <= 0:
        return "0 steps/s"
    return f"{per_second:.3g} steps/s" if per_second >= 0.1 else f"{in_words(1 / per_second)} a step"


def clock(at: float, *, day: bool = False) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S" if day else "%H:%M:%S", time.localtime(at))


def job_url(job: str, more: str = "") -> str:
    """The address of a job's page."""
    return f"/jobs/{quote(job, safe='', errors='replace')}{more}"
