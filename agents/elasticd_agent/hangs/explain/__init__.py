"""Evidence on a disk -> an explanation a person or a program reads. `elasticd explain` is its command.

It exists apart from the command so that the agent can end a job with the same words. Nothing here kills, writes, or
waits for anything but the file system.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUMMARY_S = 2.0
"""Reading takes some milliseconds; a file system that is gone must not hold up the end of a job."""


def summary_lines(directory: Path, verdict: Mapping[str, Any] | None = None, seconds: float = SUMMARY_S) -> list[str]:
    """The evidence at or below `directory` in at most 12 lines, for the console; none if there is nothing to tell.

    `verdict`: what verdict.json will say, which may not be on disk yet. Takes at most `seconds`: a file system that
    does not answer by then has nothing to tell.
    """
    from elasticd_agent.hangs.explain import load as reading
    from elasticd_agent.hangs.explain import locate as finding
    from elasticd_agent.hangs.explain import text as page
    from elasticd_agent.system import bounded_io as files

    def read() -> list[str]:
        place = finding.choose_folder(finding.find_folders(directory))
        return page.summary(reading.explain(place, verdict=verdict)) if place is not None else []

    try:
        return files.run_within(seconds, read)
    except files.DeadlineExceeded:
        return []
