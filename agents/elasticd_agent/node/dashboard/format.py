"""Numbers, spans and moments as a person reads them at a glance. Pure but for the host's time zone."""

from __future__ import annotations

import time
from urllib.parse import quote

from elasticd_agent.node.dashboard.markup import Html, tag


def duration(seconds: float) -> str:
    """ "0.4 s", "12 s", "3 min 20 s", "5 h 12 min", "4 d 3 h" """
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = int(seconds + 0.5)
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {name}" if rest else "")
    return f"{whole} s"


def rate(per_second: float) -> str:
    """ "12.3 steps/s"; of slow ones the seconds a step takes."""
    if per_second <= 0:
        return "0 steps/s"
    return f"{per_second:.3g} steps/s" if per_second >= 0.1 else f"{duration(1 / per_second)} a step"


def count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def clock(at: float, *, day: bool = False) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S" if day else "%H:%M:%S", time.localtime(at))


def timestamp(at: float, now: float) -> Html:
    """Today only the time of day; the whole of it when pointed at."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(at))
    today = time.localtime(at)[:3] == time.localtime(now)[:3]
    return tag("time", clock(at, day=not today), datetime=whole, title=clock(at, day=True))


def job_url(job: str, more: str = "") -> str:
    """The address of a job's page."""
    return f"/jobs/{quote(job, safe='', errors='replace')}{more}"


def time_zone() -> str:
    return time.strftime("%Z")
