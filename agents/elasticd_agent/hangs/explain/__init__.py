"""Explains evidence on disk to people and programs: `elasticd explain`, the HTTP API, and the last lines of a job.

`locate` finds a folder, `load` reads it (with `event_log` and `recordings`) into a `model.Explanation`, `text` and
`json_report` show that. It only reads; only the file system may block it.
"""

from __future__ import annotations

from pathlib import Path

from elasticd_agent.model.reports import RecordedVerdict

SUMMARY_TIMEOUT_S = 2.0
"""Reading takes some milliseconds; a dead file system must not delay the end of a job."""


def summary_lines(
    directory: Path, verdict: RecordedVerdict | None = None, seconds: float = SUMMARY_TIMEOUT_S
) -> list[str]:
    """The evidence at or below `directory` in at most 12 lines, for the console; none within `seconds`: no lines.

    `verdict`: it may not be on disk yet.
    """
    from elasticd_agent.hangs.explain import load, locate, text
    from elasticd_agent.system import bounded_io

    def read() -> list[str]:
        folder = locate.choose_default_folder(locate.find_folders(directory))
        return text.summary(load.explain(folder, verdict=verdict)) if folder is not None else []

    try:
        return bounded_io.run_within(seconds, read)
    except bounded_io.DeadlineExceeded:
        return []
