"""`elasticd status [JOB] --watch`: a page every few seconds; in place on a terminal, else one by one.

It continues while the agent is restarted, with the age of what is shown, and ends with 0 when the job has ended or at
Ctrl-C.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator

from elasticd.errors import WireError
from elasticd_agent.model.phrases import visible
from elasticd_daemon.api.client import AgentClient, RequestFailed, Unreachable, fetch_status
from elasticd_daemon.api.schema import Answer, JobStatus
from elasticd_daemon.cli import tables

MAX_DETAILED_JOBS = 32
"""Running jobs whose steps, rates and problems are shown: each costs a request."""
_STYLES = {
    r"\bstopped\b|\bdead\b|\bstalled\b|\bfailed\b|\blost\b|\boffline\b|\bquarantined\b": "bold red",
    r"\brecovering\b|\bstarting\b|\bstopping\b|\bpending\b|\bdraining\b": "yellow",
    r"\brunning\b|\bsucceeded\b|\bready\b": "green",
    r"(?m)^(?:RANK|ROUND|JOB|NODE) .*$": "dim",
    r"(?m)^elasticd: .*$": "bold yellow",
}


@contextlib.contextmanager
def _full_screen() -> Iterator[Callable[[str], None]]:
    """Shows pages on the whole terminal, which is restored at the end; the last page stays on it."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    last = ""

    def show(page: str) -> None:
        nonlocal last
        last, text = page, Text(page, no_wrap=True, overflow="ellipsis")
        for pattern, style in _STYLES.items():
            text.highlight_regex(pattern, style)
        live.update(text, refresh=True)

    try:
        with Live(console=Console(), screen=True, auto_refresh=False) as live:
            yield show
    finally:
        _print(last)


def _show_below(page: str) -> None:
    """One page after another, each below the time of day."""
    _print(f"--- {time.strftime('%H:%M:%S%z')}\n{page}\n")


def watch(client: AgentClient, job: str | None, every_s: float, *, as_json: bool) -> int:
    """Without `job`, what runs. Returns the exit code. Raises Unreachable, RequestFailed."""
    try:
        if as_json or not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
            return follow(client, job, every_s, _show_below, as_json=as_json)
        with _full_screen() as show:
            return follow(client, job, every_s, show)
    except KeyboardInterrupt:
        return 0


def fetch_overview(client: AgentClient) -> Answer:
    """All jobs and nodes, and in "status" the running jobs whole, as far as they answer."""
    overview = fetch_status(client, None)
    running = [row["job"] for row in overview["jobs"] if row.get("state") in ("running", "starting", "leaving")]
    overview["status"] = {}
    for name in running[:MAX_DETAILED_JOBS]:
        with contextlib.suppress(RequestFailed, Unreachable):  # it has ended, or its nodes do not answer
            overview["status"][name] = fetch_status(client, name)
    return overview


def follow(
    client: AgentClient,
    job: str | None,
    every_s: float,
    show: Callable[[str], None],
    *,
    as_json: bool = False,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Until the job has ended. Raises RequestFailed, and Unreachable without any answer so far."""
    page = ""
    answered_at = clock()
    while True:
        ended = False
        try:
            answer = fetch_overview(client) if job is None else fetch_status(client, job)
            if as_json:
                _print(json.dumps(answer, ensure_ascii=False) + "\n")
            if job is None:
                page = tables.overview(answer)
            else:
                status = JobStatus.from_dict(answer)
                page = tables.job_page(status)
                ended = status.ended and not status.leaving
            answered_at = clock()
            if not as_json:
                show(page)
        except WireError as error:
            raise RequestFailed(f"the answer of the agent makes no sense ({error}); is it another version?") from None
        except Unreachable as error:
            if not page:
                raise
            if not as_json:
                age = tables.age(clock() - answered_at)
                show(f"elasticd: as of {age} ago: {visible(str(error))}\n\n{page}")
        if ended:
            return 0
        sleep(every_s)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
