"""`elasticd status [JOB] --watch`: the page every few seconds; in place on a terminal, else one after another.

It continues while the agent is restarted, with the age of what is shown, and ends with 0 when the job has ended or at
Ctrl-C.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import quote

from elasticd.errors import WireError
from elasticd_agent.cli import tables
from elasticd_agent.node.api.client import AgentClient, Reply, Unreachable
from elasticd_agent.node.api.schema import JobStatus
from elasticd_agent.node.dashboard import chart
from elasticd_agent.node.dashboard.status import problem

SPARKS = " ▁▂▃▄▅▆▇█"
SPARK_COLUMNS, SPARK_S = 40, 600.0
_STYLES = {
    r"\bstopped\b|\bdead\b|\bstalled\b|\bfailed\b|\boffline\b|\bquarantined\b": "bold red",
    r"\brecovering\b|\bstarting\b|\bstopping\b|\bpending\b|\bdraining\b": "yellow",
    r"\brunning\b|\bsucceeded\b|\bready\b": "green",
    r"(?m)^(?:RANK|ROUND|JOB|NODE) .*$": "dim",
    r"(?m)^elasticd: .*$": "bold yellow",
}


class Screen(Protocol):
    def show(self, page: str) -> None: ...
    def __enter__(self) -> Screen: ...
    def __exit__(self, *error: Any) -> None: ...


class PlainScreen:
    """One page after another, each below the time of day."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def show(self, page: str) -> None:
        self._write(f"--- {time.strftime('%H:%M:%S')}\n{page}\n")

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class TerminalScreen:
    """The whole terminal, restored at the end; the last page stays on it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._text = Text
        self._last = ""
        self._console = Console()
        self._live = Live(console=self._console, screen=True, auto_refresh=False)

    def show(self, page: str) -> None:
        text = self._text(page, no_wrap=True, overflow="ellipsis")
        for pattern, style in _STYLES.items():
            text.highlight_regex(pattern, style)
        self._last = page
        self._live.update(text, refresh=True)

    def __enter__(self) -> TerminalScreen:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)
        print(self._last, end="", flush=True)


def watch(client: AgentClient, job: str | None, every_s: float, *, as_json: bool) -> int:
    """Returns the exit code. Raises Unreachable, Refused."""
    screen: Screen = TerminalScreen() if sys.stdout.isatty() and not as_json else PlainScreen(_print)
    try:
        with screen:
            return follow(client, job, every_s, screen.show, as_json=as_json)
    except KeyboardInterrupt:
        return 0


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
    """Until the job has ended. Raises WatchFailed, and Unreachable without any answer so far."""
    page = ""
    answered_at = clock()
    while True:
        ended = False
        try:
            answer = _fetch(client, job)
            if as_json:
                _print(json.dumps(answer, ensure_ascii=False) + "\n")
            if job is None:
                page = tables.overview(answer)
            else:
                status = JobStatus.from_dict(answer)
                page = render(status)
                ended = status.ended and not status.leaving
            answered_at = clock()
            if not as_json:
                show(page)
        except WireError as error:
            raise WatchFailed(f"the answer of the agent makes no sense ({error}); is it another version?") from None
        except Unreachable as error:
            if not page:
                raise
            if not as_json:
                age = tables.age(clock() - answered_at)
                show(f"elasticd: as of {age} ago: {tables.visible(str(error))}\n\n{page}")
        if ended:
            return 0
        sleep(every_s)


def render(job: JobStatus) -> str:
    """One job's page: its problem, the step rate of the last minutes, then the page of `elasticd status`."""
    wrong = problem(job)
    head = f"elasticd: {wrong[0]}: {tables.visible(wrong[1])}\n" if wrong else ""
    if job.submitted_at is not None and job.age_seconds is not None:
        now = job.submitted_at + job.age_seconds  # by the agent's clock, as all other times
        shown = chart.window(job, now, SPARK_S)
        rates = chart.rates(chart.points(job), shown, live=not job.ended, columns=SPARK_COLUMNS)
        if any(rates):
            head += f"{sparks(rates)}  steps/s, the last {tables.age(shown.until - shown.since)}\n"
    return head + tables.status(job)


def sparks(found: list[float | None]) -> str:
    """One character each; a dot where nothing is known."""
    most = max((one for one in found if one is not None), default=0.0) or 1.0
    return "".join("·" if one is None else SPARKS[round(one / most * (len(SPARKS) - 1))] for one in found)


class WatchFailed(Exception):
    """The agent refuses or its answer makes no sense; the text says why."""


def _fetch(client: AgentClient, job: str | None) -> dict[str, Any]:
    """Raises WatchFailed; Unreachable also if the agent's store or another node does not answer."""
    if job is not None:
        return _document(client.get(f"/v1/jobs/{quote(job, safe='')}"))
    return {**_document(client.get("/v1/jobs")), "nodes": _document(client.get("/v1/nodes"))["nodes"]}


def _document(reply: Reply) -> dict[str, Any]:
    if reply.code >= 500:
        raise Unreachable(reply.why)
    if reply.code != 200:
        raise WatchFailed(reply.why)
    return reply.document()


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
