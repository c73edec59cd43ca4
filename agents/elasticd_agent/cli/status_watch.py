"""`elasticd status [JOB] --watch`: the same page again and again; on a terminal in place, else one after another.

It exists so that somebody with nothing but a shell sees a fault while it happens. It goes on when the daemon is
restarted, saying how old what is shown is; it ends with 0 when the job has ended or the person has seen enough.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from urllib.parse import quote

from elasticd_agent.cli import tables
from elasticd_agent.node.api.client import AgentClient, Reply, Unreachable
from elasticd_agent.node.dashboard import chart
from elasticd_agent.node.dashboard import decode as facts
from elasticd_agent.node.dashboard import status as standing

SPARKS = " ▁▂▃▄▅▆▇█"
SPARK_COLUMNS, SPARK_S = 40, 600.0
_STYLES = {
    r"\bstopped\b|\bdead\b|\bstalled\b|\bfailed\b|\baway\b|\bquarantined\b": "bold red",
    r"\brecovering\b|\bstarting\b|\bstopping\b|\bwaiting\b|\bdraining\b": "yellow",
    r"\brunning\b|\bsucceeded\b|\bready\b": "green",
    r"(?m)^(?:RANK|ROUND|JOB|NODE) .*$": "dim",
    r"(?m)^elasticd: .*$": "bold yellow",
}


class Screen(Protocol):
    def show(self, page: str) -> None: ...
    def __enter__(self) -> Screen: ...
    def __exit__(self, *error: Any) -> None: ...


class PlainScreen:
    """One page after another, each after the time of day."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def show(self, page: str) -> None:
        self._write(f"--- {time.strftime('%H:%M:%S')}\n{page}\n")

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class TerminalScreen:
    """The whole of a terminal, given back as it was; what was shown last is left on it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._text, self._last = Text, ""
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
    """Until the job has ended. Raises Refused, and Unreachable if there was no answer yet."""
    page, heard = "", clock()
    while True:
        ended = False
        try:
            said = _fetch(client, job)
            if as_json:
                _print(json.dumps(said, ensure_ascii=False) + "\n")
            page, heard = render(said) if job is not None else tables.overview(said), clock()
            ended = job is not None and said.get("ended_at") is not None and not said.get("leaving")
            if not as_json:
                show(page)
        except Unreachable as error:
            if not page:
                raise
            if not as_json:
                show(f"elasticd: as of {tables.age(clock() - heard)} ago: {tables.visible(str(error))}\n\n{page}")
        if ended:
            return 0
        sleep(every_s)


def render(said: Mapping[str, Any]) -> str:
    """One job's page: what is wrong, how fast it went in the last minutes, then as `elasticd status` prints it."""
    job = facts.job_status(said)
    wrong = standing.problem(job)
    head = f"elasticd: {wrong[0]}: {tables.visible(wrong[1])}\n" if wrong else ""
    submitted, age = said.get("submitted_at"), said.get("age_seconds")
    if isinstance(submitted, (int, float)) and isinstance(age, (int, float)):
        now = submitted + age  # by the agent's clock, as all else
        shown = chart.window(job, now, SPARK_S)
        found = chart.rates(chart.points(job), shown, live=not job.ended, columns=SPARK_COLUMNS)
        if any(found):
            head += f"{sparks(found)}  steps/s, the last {tables.age(shown.until - shown.since)}\n"
    return head + tables.status(said)


def sparks(found: list[float | None]) -> str:
    """One character each; nothing known is a dot."""
    most = max((one for one in found if one is not None), default=0.0) or 1.0
    return "".join("·" if one is None else SPARKS[round(one / most * (len(SPARKS) - 1))] for one in found)


class WatchFailed(Exception):
    """The daemon said no; the text is its sentence."""


def _fetch(client: AgentClient, job: str | None) -> dict[str, Any]:
    """Raises Refused; Unreachable also where only its store, or another node, does not answer it."""
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
