"""The commands that ask a daemon: submit, jobs, status, logs, cancel, nodes, cordon, uncordon, drain, dump, explain.

It exists so that whoever operates nodes needs no HTTP: each verb is one question or two, and its answer a page, or JSON
as the daemon gave it. Exit codes: 0 done, 1 the daemon says no or does not answer, 2 usage. It decides nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from elasticd.errors import UsageError, WireError
from elasticd_agent.cli import tables
from elasticd_agent.cli.main import AGENT_VARIABLE
from elasticd_agent.model.exit_codes import INTERRUPTED
from elasticd_agent.node.api.client import AgentClient, Reply, Unreachable, open_client
from elasticd_agent.node.api.schema import JobStatus, JobSummary, NodeSummary

TOKEN_FILE, CA = "ELASTICD_TOKEN_FILE", "ELASTICD_CA"
EVIDENCE_TIMEOUT_S = 75.0
DRAIN_TIMEOUT_S = 3600.0
POLL_S = 0.5
_MAX_FILE_BYTES = 64 * 1024
_CONTENT_TYPES = {"toml": "application/toml", "yaml": "application/yaml", "json": "application/json"}
_SUBMIT_TRIES = 3


class _RequestFailed(Exception):
    """The daemon said no; the text is its sentence."""


def run_command(name: str, argv: Sequence[str]) -> int:
    """Returns the exit code; raises UsageError."""
    asked = _parser(name).parse_args(argv)
    client = open_client(
        asked.agent or os.environ.get(AGENT_VARIABLE),
        asked.token_file or _path(os.environ.get(TOKEN_FILE)),
        asked.ca or _path(os.environ.get(CA)),
    )
    try:
        return _COMMANDS[name](client, asked)
    except (_RequestFailed, Unreachable) as error:
        print(f"elasticd {name}: {tables.visible(str(error))}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read has stopped, as head does. What is buffered would be complained about when python ends.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED


# ---- one function for each


def _submit(client: AgentClient, asked: argparse.Namespace) -> int:
    path: Path = asked.file
    data = sys.stdin.buffer.read(_MAX_FILE_BYTES + 1) if str(path) == "-" else _content(path)
    if not data.strip():
        raise UsageError(f"{path} is empty; `elasticd config example --job` prints a job file to start from")
    if len(data) > _MAX_FILE_BYTES:
        raise UsageError(f"{path} has more than {_MAX_FILE_BYTES} bytes; a job file is a page")
    from elasticd_agent.config.documents import format_of

    kind = _CONTENT_TYPES[asked.kind or format_of(path.name)]
    # The same word at every try: a job that was handed in although the answer got lost is found again, not run twice.
    query = {"id": asked.id, "token": secrets.token_hex(16)}
    reply = client.post("/v1/jobs", data, kind, query=query)
    for _ in range(_SUBMIT_TRIES - 1):
        if reply.code == 503:
            time.sleep(POLL_S)
            reply = client.post("/v1/jobs", data, kind, query=query)
    if reply.code == 400:
        raise UsageError(reply.why.replace("the job: ", f"{path}: ", 1))
    return _show(asked, _document(reply), lambda made: f"{made['job']}\n")


def _jobs(client: AgentClient, asked: argparse.Namespace) -> int:
    found = _document(client.get("/v1/jobs"))
    _print_problems(found)
    return _show(asked, found, lambda it: tables.jobs([JobSummary.from_dict(row) for row in it["jobs"]]))


def _status(client: AgentClient, asked: argparse.Namespace) -> int:
    if asked.watch:
        from elasticd_agent.cli.status_watch import WatchFailed, watch

        try:
            return watch(client, asked.job, asked.every, as_json=asked.json)
        except WatchFailed as error:
            raise _RequestFailed(str(error)) from None
    if asked.job is None:
        both = {**_document(client.get("/v1/jobs")), "nodes": _document(client.get("/v1/nodes"))["nodes"]}
        _print_problems(both)
        return _show(asked, both, tables.overview)
    return _show(asked, _document(client.get(_job(asked.job))), lambda it: tables.status(JobStatus.from_dict(it)))


def _logs(client: AgentClient, asked: argparse.Namespace) -> int:
    from elasticd_agent.cli.log_follower import LogFollower, LogQuery, LogUnavailable

    streams = ("stdout", "stderr") if asked.stream == "both" else (asked.stream,)
    wanted = LogQuery(
        asked.job, asked.rank, streams, asked.node, asked.round, asked.tail, follow=asked.follow, as_json=asked.json
    )
    say = lambda sentence: print(f"elasticd logs: {tables.visible(sentence)}", file=sys.stderr)  # noqa: E731
    try:
        LogFollower(client, wanted, sys.stdout.buffer, sys.stderr.buffer, say).run()
    except LogUnavailable as error:
        raise _RequestFailed(str(error)) from None
    return 0


def _cancel(client: AgentClient, asked: argparse.Namespace) -> int:
    found = _document(client.post(f"{_job(asked.job)}/cancel"))
    return _show(asked, found, tables.cancelled)


def _nodes(client: AgentClient, asked: argparse.Namespace) -> int:
    found = _document(client.get("/v1/nodes"))
    _print_problems(found)
    return _show(asked, found, lambda it: tables.nodes([NodeSummary.from_dict(row) for row in it["nodes"]]))


def _cordon(client: AgentClient, asked: argparse.Namespace, what: str = "cordon") -> int:
    body = json.dumps({"reason": asked.reason or ""}).encode()
    row = _document(client.post(f"/v1/nodes/{quote(asked.name, safe='')}/{what}", body))
    if getattr(asked, "wait", False):
        row = _wait_until_drained(client, asked.name, asked.timeout)
    return _show(asked, row, lambda it: tables.nodes([NodeSummary.from_dict(it)]))


def _drain(client: AgentClient, asked: argparse.Namespace) -> int:
    return _cordon(client, asked, "drain")


def _uncordon(client: AgentClient, asked: argparse.Namespace) -> int:
    found = _document(client.post(f"/v1/nodes/{quote(asked.name, safe='')}/uncordon"))
    return _show(asked, found, lambda it: f"{it['node']} takes work again\n")


def _dump(client: AgentClient, asked: argparse.Namespace) -> int:
    return _evidence(asked, _document(client.post(f"{_job(asked.job)}/dump", within_s=EVIDENCE_TIMEOUT_S)))


def _explain(client: AgentClient, asked: argparse.Namespace) -> int:
    query = {"round": asked.round}
    return _evidence(asked, _document(client.get(f"{_job(asked.job)}/explain", query, EVIDENCE_TIMEOUT_S)))


_COMMANDS: dict[str, Callable[[AgentClient, argparse.Namespace], int]] = {
    "submit": _submit,
    "jobs": _jobs,
    "status": _status,
    "logs": _logs,
    "cancel": _cancel,
    "nodes": _nodes,
    "cordon": _cordon,
    "uncordon": _uncordon,
    "drain": _drain,
    "dump": _dump,
    "explain": _explain,
}
AGENT_COMMANDS = tuple(name for name in _COMMANDS if name not in ("dump", "explain"))
"""Those that ask a daemon whatever they are given."""


# ---- asking and showing


def _document(reply: Reply) -> dict[str, Any]:
    if reply.code == 400:
        raise UsageError(reply.why)
    if reply.code == 401 and "a token is needed" in reply.why:
        raise _RequestFailed(
            "a token is needed: --token-file FILE names a file with that of the daemon's http.token_file"
        )
    if not 200 <= reply.code < 300:
        raise _RequestFailed(reply.why)
    return reply.document()


def _show(asked: argparse.Namespace, found: dict[str, Any], page: Callable[[dict[str, Any]], str]) -> int:
    try:
        text = json.dumps(found, indent=2, ensure_ascii=False) + "\n" if asked.json else page(found)
    except (WireError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise _RequestFailed(
            f"the daemon answered something that makes no sense ({error!r}); is it another version?"
        ) from None
    print(text, end="", flush=True)
    return 0


def _print_problems(found: dict[str, Any]) -> None:
    for sentence in found.get("problems") or []:
        print(f"elasticd: {tables.visible(str(sentence))}", file=sys.stderr)


def _evidence(asked: argparse.Namespace, found: dict[str, Any]) -> int:
    """What nodes say of their evidence: those that judged first; a node without any is a line on stderr."""
    rows = [row for row in found.get("nodes", []) if asked.node in (None, row.get("node"))]
    told = [row for row in rows if isinstance(row.get("page"), str)]
    told.sort(key=lambda row: row.get("document", {}).get("verdict") is None)
    for row in rows:
        if row not in told:
            why = tables.visible(str(row.get("error", "it says nothing")))
            print(f"elasticd: {tables.visible(str(row.get('node')))}: {why}", file=sys.stderr)
    if asked.json:
        plain = [{key: value for key, value in row.items() if key != "page"} for row in rows]
        print(json.dumps({**found, "nodes": plain}, indent=2, ensure_ascii=False), flush=True)
    else:
        pages = [(f"NODE {row['node']}\n\n" if len(told) > 1 else "") + row["page"] for row in told]
        print("\n\n".join(pages), end="", flush=True)
    if not told and not rows:
        print("elasticd: no node has anything of this job", file=sys.stderr)
    return 0 if told else 1


def _wait_until_drained(client: AgentClient, node: str, within_s: float) -> dict[str, Any]:
    """Wait until nothing runs on the node any more. Raises _Refused when that takes too long."""
    until = time.monotonic() + within_s
    while True:
        try:
            rows = {row["node"]: row for row in _document(client.get("/v1/nodes"))["nodes"]}
            why = ""
        except (Unreachable, _RequestFailed) as error:  # a daemon that is restarted meanwhile is no reason to give up
            rows, why = {}, str(error)
        row = rows.get(node)
        if row is not None and not row["jobs"]:
            return dict(row)
        if not why:
            why = "it is no node any more"
            if row is not None:
                why = f"{', '.join(row['jobs'])} {'is' if len(row['jobs']) == 1 else 'are'} still there"
        if time.monotonic() >= until:
            raise _RequestFailed(f"{node} is being drained, but {why} after {within_s:g} s")
        time.sleep(POLL_S)


def _job(name: str) -> str:
    return f"/v1/jobs/{quote(name, safe='')}"


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}: cannot be read: {(isinstance(error, OSError) and error.strerror) or error}"
        ) from None


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


# ---- the command line


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.2 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: between 0.2 and 3600 seconds")
    return seconds


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


_DESCRIPTIONS = {
    "submit": "Hands a job in and prints its id. FILE is TOML, YAML or JSON, by its name; - is standard input.",
    "jobs": "Lists the jobs: those that wait or run in the order in which they were handed in, then those that ended.",
    "status": "Says what one job does and why: its nodes, step, steps/s, last checkpoint, goodput, ranks and rounds.",
    "logs": "Prints what a rank has written, wherever it runs: of its newest round, or of the one that is named.",
    "cancel": "Ends a job: its workers are asked to stop, and killed when they do not.",
    "nodes": "Lists the nodes, what runs on them, and why one takes no work.",
    "cordon": "Gives a node no new work. What runs there goes on.",
    "uncordon": "Gives a node work again.",
    "drain": "Takes a node's jobs away, after a checkpoint, and gives it no new ones: before maintenance.",
    "dump": "Takes stacks, /proc facts and last log lines of every rank of a daemon's job, without disturbing it, and "
    "explains them. Without a JOB, it looks for an `elasticd run` on this machine: see elasticd dump --help.",
    "explain": "Says who made a daemon's job hang and why, from the evidence on its nodes. A word with a slash, or "
    "that exists here, is a directory instead: see elasticd explain --help.",
}
_ENVIRONMENT = (
    f"--agent, --token-file and --ca may be in {AGENT_VARIABLE}, {TOKEN_FILE} and {CA}. "
    "Exit codes: 0 done, 1 the daemon says no or does not answer, 2 usage. More: docs/cli.md."
)


def _parser(name: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=f"elasticd {name}", description=_DESCRIPTIONS[name], epilog=_ENVIRONMENT, allow_abbrev=False)
    if name == "submit":
        parser.add_argument("file", type=Path, metavar="FILE", help="the job file")
        parser.add_argument("--id", metavar="JOB", help="the job's id; otherwise the file's, or job-NUMBER")
        parser.add_argument(
            "--kind", choices=tuple(_CONTENT_TYPES), help="what FILE is, where its name does not say so"
        )
    if name == "status":
        parser.add_argument("job", metavar="JOB", nargs="?", help="its id; without one, all jobs and nodes")
        parser.add_argument("--watch", action="store_true", help="again and again, until the job has ended or Ctrl-C")
        parser.add_argument("--every", type=_seconds, default=2.0, metavar="S", help="with --watch: how often (2 s)")
    if name in ("logs", "cancel", "dump", "explain"):
        parser.add_argument("job", metavar="JOB", help="its id, as elasticd jobs lists it")
    if name in ("cordon", "uncordon", "drain"):
        parser.add_argument("name", metavar="NODE", help="its name, as elasticd nodes lists it")
    if name in ("cordon", "drain"):
        parser.add_argument("--reason", metavar="TEXT", help="why: others see it in elasticd nodes")
    if name == "drain":
        parser.add_argument("--wait", action="store_true", help="until nothing runs there any more")
        parser.add_argument(
            "--timeout", type=float, default=DRAIN_TIMEOUT_S, metavar="S", help="for at most that long (3600 s)"
        )
    if name == "logs":
        _add_log_options(parser)
    if name in ("dump", "explain"):
        parser.add_argument("--node", metavar="NODE", help="only what this node has")
    if name == "explain":
        parser.add_argument("--round", type=int, metavar="N", help="this round's; otherwise the newest that hung")
    parser.add_argument("--json", action="store_true", help="JSON, as the daemon answers, instead of a page")
    parser.add_argument(
        "--agent", metavar="URL", help="the daemon to ask: unix:PATH, http://HOST:PORT or https://HOST:PORT"
    )
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="holds the token that daemon asks for over TCP")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="the authority that signed its certificate, PEM")
    return parser


def _add_log_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on, through all rounds, until the job has ended"
    )
    parser.add_argument("--rank", type=int, default=0, metavar="K", help="whose: a global rank (0)")
    parser.add_argument("--node", metavar="NODE", help="as this node has it; otherwise wherever the rank is")
    parser.add_argument("--round", type=int, metavar="N", help="of this round; otherwise of the newest")
    parser.add_argument("--tail", type=int, metavar="LINES", help="begin with the last so many lines")
    parser.add_argument(
        "--stream",
        choices=("both", "stdout", "stderr", "elasticd"),
        default="both",
        help="both (the rank's stdout on stdout, its stderr on stderr); elasticd: what elasticd said on the node",
    )
