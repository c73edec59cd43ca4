"""The commands that use an agent's HTTP API: submit, jobs, queue, status, logs, cancel, nodes, cordon, uncordon,
drain, open, dump, explain. Exit codes: 0 done, 1 the agent refuses or does not answer, 2 usage.

Any agent answers for the whole cluster; the one on this machine is asked, by its socket, unless --agent names another.
A command is one request, or polls: no agent keeps state for a client, and Ctrl-C ends nothing but the command. Only a
submission is repeated, with the token of its first try, since a repeated one must not be a second job; whatever else
got no answer can simply be asked again.

Text that jobs and nodes have chosen (reasons, names, errors) reaches the terminal by `tables.visible` only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from elasticd.errors import UsageError, WireError
from elasticd_agent.config.command_parser import CommandParser
from elasticd_agent.model.agent_address import AGENT_VARIABLE
from elasticd_agent.model.job import strip_interpreter
from elasticd_agent.model.phrases import is_are, visible
from elasticd_daemon.api.client import (
    AgentClient,
    AnswerLost,
    Reply,
    RequestFailed,
    Unreachable,
    fetch_status,
    job_path,
    make_client,
    quoted,
)
from elasticd_daemon.api.schema import Answer, JobStatus, JobSummary, NodeSummary
from elasticd_daemon.cli import tables
from elasticd_daemon.cli.log_follower import LogFollower, LogQuery

TOKEN_FILE_VARIABLE = "ELASTICD_TOKEN_FILE"
CA_VARIABLE = "ELASTICD_CA"
EVIDENCE_TIMEOUT_S = 75.0
DRAIN_TIMEOUT_S = 3600.0
POLL_S = 0.5
_MAX_JOB_FILE_BYTES = 64 * 1024
_CONTENT_TYPES = {"toml": "application/toml", "json": "application/json"}
_SUBMIT_TRIES = 3
_UPGRADE_S = 5.0
"""An agent that is upgraded cuts its connections, and accepts none until it runs again."""
_FAILED_RANK_LINES = 40
_JOB_OPTIONS = ("module", "no_python", "python", "env", "nodes", "workers", "checkpoint_dir", "priority", "node_labels")
"""Keys of a job file that have an option, for a command without a file."""


def run_command(name: str, argv: Sequence[str]) -> int:
    """Returns the exit code; raises UsageError."""
    before, command = _split_command(argv) if name == "submit" else (argv, ())
    options = build_parser(name).parse_args(before)
    options.command = command
    client = make_client(
        options.agent or os.environ.get(AGENT_VARIABLE),
        options.token_file or _path_or_none(os.environ.get(TOKEN_FILE_VARIABLE)),
        options.ca or _path_or_none(os.environ.get(CA_VARIABLE)),
    )
    try:
        return _COMMANDS[name](client, options)
    except (RequestFailed, Unreachable) as error:
        print(f"elasticd {name}: {visible(str(error))}", file=sys.stderr)
        return 1


def _split_command(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The words before and after `--`."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _submit(client: AgentClient, options: argparse.Namespace) -> int:
    if options.command and options.file is not None:
        raise UsageError("give a job file, or -- and a command, not both")
    if options.command:
        return _submit_file(client, options, Path("the command"), _make_job_file(options), "application/json")
    given = [name for name in _JOB_OPTIONS if getattr(options, name) is not None]
    if options.file is None or given:
        what = f"--{given[0].replace('_', '-')} is for a command" if given else "a job file is missing"
        raise UsageError(f"{what}; write: elasticd submit [options] -- train.py [arguments]")
    path: Path = options.file
    data = sys.stdin.buffer.read(_MAX_JOB_FILE_BYTES + 1) if str(path) == "-" else _read_file(path)
    if not data.strip():
        raise UsageError(f"{path} is empty; `elasticd config example --job` prints a job file to start from")
    if len(data) > _MAX_JOB_FILE_BYTES:
        raise UsageError(f"{path} has more than {_MAX_JOB_FILE_BYTES} bytes, the limit of a job file")
    from elasticd_daemon.config.documents import format_of

    return _submit_file(client, options, path, data, _CONTENT_TYPES[options.kind or format_of(path.name)])


def _make_job_file(options: argparse.Namespace) -> bytes:
    """The job file for a command that is run in this directory, as `elasticd run` would."""
    if not (options.module or options.no_python):
        _check_is_script(options.command)
    job: dict[str, Any] = {"command": options.command, "workdir": str(Path.cwd())}
    for name in _JOB_OPTIONS:
        value = getattr(options, name)
        if value is not None:
            job[name] = str(Path.cwd() / value) if name == "checkpoint_dir" and "://" not in value else value
    if options.env is not None:
        job["env"] = dict(options.env)
    return json.dumps(job).encode()


def _check_is_script(command: Sequence[str]) -> None:
    """Raises UsageError for an interpreter, or another program that no file of this directory is named like."""
    name = command[0]
    if script := strip_interpreter(command):
        key, words = script
        option = [f"--{key.replace('_', '-')}"] if key else []
        instead = shlex.join(["elasticd", "submit", *option, "--", *words])
        raise UsageError(f"the command begins with a script, not with {name!r}; write: {instead}")
    if name and "/" not in name and not name.endswith(".py") and not Path(name).exists() and shutil.which(name):
        instead = shlex.join(["elasticd", "submit", "--no-python", "--", *command])
        raise UsageError(f"{name!r} is a program, not a script of this directory; write: {instead}")


def _submit_file(client: AgentClient, options: argparse.Namespace, path: Path, data: bytes, kind: str) -> int:
    # The same token at every try: a job that was submitted although the answer got lost is found, not run twice.
    query = {"id": options.id, "token": secrets.token_hex(16)}
    send = partial(client.post, "/v1/jobs", data, kind, query=query)
    reply = _until_answered(send)
    for _ in range(_SUBMIT_TRIES - 1):
        if reply.code == 503:
            time.sleep(POLL_S)
            reply = _until_answered(send)
    made = _result_or_usage_error(reply, path)
    shown = _print_answer(options, made, lambda made: f"{made['job']}\n")
    if not options.follow:
        return shown
    job = str(made["job"])
    _follow(client, LogQuery(job, 0, ("stdout", "stderr"), None, None, None, True), "submit")
    ended = JobStatus.from_dict(fetch_status(client, job))
    if rank := ended.failed_rank:  # the lines of rank 0 are here already
        print(f"elasticd submit: the end of rank {rank}'s stderr:", file=sys.stderr)
        with contextlib.suppress(RequestFailed):  # it has written nothing
            _follow(client, LogQuery(job, rank, ("stderr",), None, None, _FAILED_RANK_LINES, False), "submit")
    end = ": ".join(visible(word) for word in (job, ended.state, ended.reason))
    print(f"elasticd submit: {end}", file=sys.stderr)
    return 0 if ended.state == "succeeded" else 1


def _until_answered(send: Callable[[], Reply]) -> Reply:
    """Send again for a while where the agent got a job and its answer is lost. Raises Unreachable."""
    until, is_lost = time.monotonic() + _UPGRADE_S, False
    while True:
        try:
            return send()
        except Unreachable as error:
            is_lost = is_lost or isinstance(error, AnswerLost)
            if not is_lost:
                raise
            if time.monotonic() >= until:
                raise Unreachable(f"{error}; the job may have been submitted: see elasticd jobs") from None
        time.sleep(POLL_S)


def _result_or_usage_error(reply: Reply, path: Path) -> Answer:
    """Raises UsageError that names the job file."""
    if reply.code == 400:
        raise UsageError(reply.why.replace("the job: ", f"{path}: ", 1))
    return reply.result()


def _list(client: AgentClient, options: argparse.Namespace, path: str, page: Callable[[Answer], str]) -> int:
    answer = client.get(path).result()
    _print_problems(answer)
    return _print_answer(options, answer, page)


def _summaries(answer: Answer) -> list[JobSummary]:
    return [JobSummary.from_dict(row) for row in answer["jobs"]]


def _node_table(answer: Answer) -> str:
    return tables.nodes([NodeSummary.from_dict(row) for row in answer["nodes"]])


def _status(client: AgentClient, options: argparse.Namespace) -> int:
    from elasticd_daemon.cli.status_watch import fetch_overview, watch

    if options.watch:
        return watch(client, options.job, options.every, as_json=options.json)
    if options.job is None:
        answer = fetch_overview(client)
        _print_problems(answer)
        return _print_answer(options, answer, lambda answer: tables.overview(answer, ended=True))
    return _print_answer(
        options, fetch_status(client, options.job), lambda answer: tables.job_page(JobStatus.from_dict(answer))
    )


def _logs(client: AgentClient, options: argparse.Namespace) -> int:
    streams = ("stdout", "stderr") if options.stream == "both" else (options.stream,)
    query = LogQuery(
        options.job,
        options.rank,
        streams,
        options.node,
        options.round,
        options.tail,
        follow=options.follow,
    )
    _follow(client, query, "logs")
    return 0


def _follow(client: AgentClient, query: LogQuery, command: str) -> None:
    log = lambda sentence: print(f"elasticd {command}: {visible(sentence)}", file=sys.stderr)  # noqa: E731
    LogFollower(client, query, sys.stdout.buffer, sys.stderr.buffer, log).run()


def _cancel(client: AgentClient, options: argparse.Namespace) -> int:
    return _print_answer(options, client.post(f"{job_path(options.job)}/cancel").result(), tables.cancel_line)


def _cordon(client: AgentClient, options: argparse.Namespace, what: str) -> int:
    reason = (options.reason or "").encode(errors="backslashreplace").decode()
    body = json.dumps({"reason": reason}).encode()
    row = client.post(f"/v1/nodes/{quoted(options.name)}/{what}", body).result()
    if getattr(options, "wait", False):
        row = _wait_until_drained(client, options.name, options.timeout)
    return _print_answer(options, row, lambda row: _node_table({"nodes": [row]}))


def _uncordon(client: AgentClient, options: argparse.Namespace) -> int:
    answer = client.post(f"/v1/nodes/{quoted(options.name)}/uncordon").result()
    return _print_answer(options, answer, lambda answer: f"{answer['node']} takes work again\n")


def _open(client: AgentClient, options: argparse.Namespace) -> int:
    made = client.post("/v1/login").result()
    # Over TCP the browser uses the way that this command has used; on the node itself the agent knows its port.
    made["url"] = (made.get("base", "") if client.socket is not None else str(client)) + made.get("path", "")
    return _print_answer(options, made, lambda made: f"{made['url']}\n")


def _dump(client: AgentClient, options: argparse.Namespace) -> int:
    return _print_evidence(options, client.post(f"{job_path(options.job)}/dump", within_s=EVIDENCE_TIMEOUT_S).result())


def _explain(client: AgentClient, options: argparse.Namespace) -> int:
    path, query = f"{job_path(options.job)}/explain", {"round": options.round}
    return _print_evidence(options, client.get(path, query, EVIDENCE_TIMEOUT_S).result())


_COMMANDS: dict[str, Callable[[AgentClient, argparse.Namespace], int]] = {
    "submit": _submit,
    "jobs": partial(_list, path="/v1/jobs", page=lambda answer: tables.jobs(_summaries(answer))),
    "queue": partial(_list, path="/v1/jobs", page=lambda answer: tables.queue(_summaries(answer))),
    "status": _status,
    "logs": _logs,
    "cancel": _cancel,
    "nodes": partial(_list, path="/v1/nodes", page=_node_table),
    "cordon": partial(_cordon, what="cordon"),
    "uncordon": _uncordon,
    "drain": partial(_cordon, what="drain"),
    "open": _open,
    "dump": _dump,
    "explain": _explain,
}


def _print_answer(options: argparse.Namespace, found: Answer, page: Callable[[Answer], str]) -> int:
    try:
        text = json.dumps(found, indent=2, ensure_ascii=False) + "\n" if options.json else page(found)
    except (WireError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestFailed(f"the answer of the agent makes no sense ({error!r}); is it another version?") from None
    print(text, end="", flush=True)
    return 0


def _print_problems(found: Answer) -> None:
    for sentence in found.get("problems") or []:
        print(f"elasticd: {visible(str(sentence))}", file=sys.stderr)


def _print_evidence(options: argparse.Namespace, found: Answer) -> int:
    """The explanations of the nodes, those with a verdict first; a node without evidence is a line on stderr."""
    rows = [row for row in found.get("nodes", []) if options.node in (None, row.get("node"))]
    explained = [row for row in rows if isinstance(row.get("page"), str)]
    explained.sort(key=lambda row: row.get("document", {}).get("verdict") is None)
    for row in rows:
        if row not in explained:
            why = visible(str(row.get("error", "no reason given")))
            print(f"elasticd: {visible(str(row.get('node')))}: {why}", file=sys.stderr)
    if options.json:
        plain = [{key: value for key, value in row.items() if key != "page"} for row in rows]
        print(json.dumps({**found, "nodes": plain}, indent=2, ensure_ascii=False), flush=True)
    else:
        pages = [(f"NODE {row['node']}\n\n" if len(explained) > 1 else "") + row["page"] for row in explained]
        print("\n\n".join(pages), end="", flush=True)
    if not explained and not rows:
        print("elasticd: no node has data of this job", file=sys.stderr)
    return 0 if explained else 1


def _wait_until_drained(client: AgentClient, node: str, within_s: float) -> Answer:
    """Wait until nothing runs on the node. Raises RequestFailed after the timeout."""
    until = time.monotonic() + within_s
    while True:
        try:
            rows = {row["node"]: row for row in client.get("/v1/nodes").result()["nodes"]}
            why = ""
        except (Unreachable, RequestFailed) as error:  # the agent may be restarting
            rows, why = {}, str(error)
        row = rows.get(node)
        if row is not None and not row["jobs"]:
            return dict(row)
        if not why:
            why = "it is not registered"
            if row is not None:
                why = f"{', '.join(row['jobs'])} {is_are(row['jobs'])} still there"
        if time.monotonic() >= until:
            raise RequestFailed(f"{node} is being drained, but {why} after {within_s:g} s")
        time.sleep(POLL_S)


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_JOB_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}: cannot be read: {(isinstance(error, OSError) and error.strerror) or error}"
        ) from None


def _path_or_none(text: str | None) -> Path | None:
    return Path(text) if text else None


def _parse_interval_s(text: str) -> float:
    seconds = float(text)
    if not 0.2 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: between 0.2 and 3600 seconds")
    return seconds


def _name_and_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


_DESCRIPTIONS = {
    "submit": "Submits a job and prints its id. FILE is TOML or JSON, by its name; - is standard input. "
    "Without a file: elasticd submit [options] -- SCRIPT [arguments], run in this directory on the nodes.",
    "jobs": "Lists the jobs: the unfinished ones in the order of their submission, then the ended ones.",
    "queue": "Lists the pending jobs in the order in which they start, and how many slots their submitters use.",
    "status": "Shows what one job does and why: its nodes, step, steps/s, last checkpoint, goodput, ranks and rounds.",
    "logs": "Prints the output of a rank, wherever it runs: of its newest round, or of --round.",
    "cancel": "Ends a job: its workers get SIGTERM, and SIGKILL if they do not stop.",
    "nodes": "Lists the nodes, what runs on them, and why a node takes no work.",
    "cordon": "Gives a node no new work. Its running jobs continue.",
    "uncordon": "Gives a node work again.",
    "drain": "Moves a node's jobs away, after a checkpoint, and gives it no new ones: before maintenance.",
    "open": "Prints a URL that logs a browser in to the dashboard: once, within two minutes. For a browser on another "
    "machine, forward the port first: ssh -L 9411:127.0.0.1:9411 NODE.",
    "dump": "Takes stacks, /proc facts and last log lines of every rank of an agent's job, without disturbing it, and "
    "explains them. Without a JOB, it takes those of an `elasticd run` on this machine: see elasticd dump --help.",
    "explain": "Names the root cause of a job's hang, from the evidence on its nodes. A word with a slash, or one that "
    "exists here, is a directory instead: see elasticd explain --help.",
}
_EPILOG = (
    f"--agent, --token-file and --ca may be in {AGENT_VARIABLE}, {TOKEN_FILE_VARIABLE} and {CA_VARIABLE}. "
    "Exit codes: 0 done, 1 the agent refuses or does not answer, 2 usage. More: elasticd docs cli"
)


_ALL_COMMANDS = " ".join(_COMMANDS)


def _option(commands: str, *spellings: str, **arguments: Any) -> tuple[list[str], tuple[str, ...], dict[str, Any]]:
    """The commands that have an option, its spellings, and the arguments of `add_argument`."""
    return commands.split(), spellings, arguments


_OPTIONS = (
    _option("submit", "file", type=Path, nargs="?", metavar="FILE", help="the job file"),
    _option(
        "submit",
        "--id",
        metavar="JOB",
        help="the job's id; default: the file's, or the script's name and four characters",
    ),
    _option("submit", "--kind", choices=tuple(_CONTENT_TYPES), help="the format of FILE, without a suffix"),
    _option(
        "submit",
        "-f",
        "--follow",
        action="store_true",
        help="print rank 0's output until the end; exit code 1 if it failed",
    ),
    _option(
        "submit",
        "--module",
        action="store_true",
        default=None,
        help="the command is a module's name and arguments: python -m",
    ),
    _option(
        "submit", "--no-python", action="store_true", default=None, help="the command is a program, started as it is"
    ),
    _option(
        "submit",
        "--python",
        metavar="FILE",
        help="of a command: its interpreter on the nodes; default: the agent's own",
    ),
    _option(
        "submit",
        "--env",
        type=_name_and_value,
        action="append",
        metavar="NAME=VALUE",
        help="of a command: a variable; repeatable",
    ),
    _option("submit", "--nodes", metavar="N", help="of a command: nodes, N or MIN:MAX"),
    _option("submit", "--workers", metavar="N", help="of a command: workers on each node, N or MIN:MAX"),
    _option("submit", "--checkpoint-dir", metavar="DIR", help="of a command: where session.checkpoint() writes"),
    _option("submit", "--priority", choices=("high", "normal", "low"), help="of a command: its class in the queue"),
    _option(
        "submit",
        "--node-label",
        dest="node_labels",
        action="append",
        metavar="LABEL",
        help="of a command: only such nodes",
    ),
    _option("status", "job", metavar="JOB", nargs="?", help="its id; without one, all jobs and nodes"),
    _option("status", "--watch", action="store_true", help="repeat until the job has ended or Ctrl-C"),
    _option(
        "status", "--every", type=_parse_interval_s, default=2.0, metavar="S", help="of --watch: the interval (2 s)"
    ),
    _option("logs cancel dump explain", "job", metavar="JOB", help="its id, as elasticd jobs lists it"),
    _option("cordon uncordon drain", "name", metavar="NODE", help="its name, as elasticd nodes lists it"),
    _option("cordon drain", "--reason", metavar="TEXT", help="the reason that elasticd nodes shows"),
    _option("drain", "--wait", action="store_true", help="return once nothing runs there"),
    _option("drain", "--timeout", type=float, default=DRAIN_TIMEOUT_S, metavar="S", help="of --wait (3600 s)"),
    _option("logs", "-f", "--follow", action="store_true", help="continue through all rounds until the job has ended"),
    _option("logs", "--rank", type=int, default=0, metavar="K", help="the global rank (0)"),
    _option("logs", "--node", metavar="NODE", help="read this node's file; default: wherever the rank is"),
    _option("logs", "--round", type=int, metavar="N", help="of this round; default: the newest"),
    _option("logs", "--tail", type=int, metavar="LINES", help="begin with the last LINES lines"),
    _option(
        "logs",
        "--stream",
        choices=("both", "stdout", "stderr", "elasticd", "events"),
        default="both",
        help="both (the rank's stdout on stdout, its stderr on stderr); elasticd: elasticd's own log on the node; "
        "events: its event log",
    ),
    _option("dump explain", "--node", metavar="NODE", help="only this node's evidence"),
    _option("explain", "--round", type=int, metavar="N", help="this round; default: the newest that hung"),
    _option(
        " ".join(_COMMANDS.keys() - {"logs"}), "--json", action="store_true", help="print the agent's JSON, not a page"
    ),
    _option(
        _ALL_COMMANDS, "--agent", metavar="URL", help="the agent: unix:PATH, http://HOST:PORT or https://HOST:PORT"
    ),
    _option(_ALL_COMMANDS, "--token-file", type=Path, metavar="FILE", help="the file with the token, needed over TCP"),
    _option(_ALL_COMMANDS, "--ca", type=Path, metavar="FILE", help="the authority of the agent's certificate, PEM"),
)


def build_parser(name: str) -> argparse.ArgumentParser:
    parser = CommandParser(name, _DESCRIPTIONS[name], _EPILOG)
    for commands, spellings, arguments in _OPTIONS:
        if name in commands:
            parser.add_argument(*spellings, **arguments)
    return parser
