"""The command `elasticd`: chooses the command and returns its exit code. Nothing slow is imported before that.

The commands of the three parts share one name. Those of a job (`run`, `explain`, `dump`, `checkpoints`, `store`,
`docs`) are in this package; those of the service are found by name and imported when they are called, so a machine that
only runs jobs never loads the service. `explain` and `dump` exist in both: which one is meant is decided by what the
user has written and by whether an agent runs here (`is_about_agents_job`).

A mistake of the user is one line on stderr and exit code 2; a store that is away is 75, since the same command may work
later; a traceback means a defect of elasticd. Standard streams that are closed are opened on /dev/null first: otherwise
the first file that is opened would get their numbers, and error messages would be written into it.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from elasticd.errors import StoreUnavailable, UsageError
from elasticd_agent.model.agent_address import AGENT_VARIABLE, DEFAULT_SOCKET
from elasticd_agent.model.job import INTERRUPTED_EXIT_CODE, REQUEUE_EXIT_CODE
from elasticd_agent.model.phrases import did_you_mean


class Command(NamedTuple):
    help: str  #: the command's line in the list of commands
    entry_point: str = ""  #: module:function. "": it uses an agent's HTTP API, cli/job_commands.py.


COMMANDS = {
    "run": Command("runs a job on this machine, alone or with other nodes: torchrun's options and its own", "-"),
    "submit": Command("submits a job to the agents, and prints its id"),
    "jobs": Command("lists the jobs: pending, running, ended"),
    "queue": Command("lists the pending jobs in the order in which they start"),
    "status": Command("shows what a job does and why: its state, ranks and rounds; without JOB, all jobs and nodes"),
    "logs": Command("prints the output of a rank, wherever it runs"),
    "cancel": Command("ends a job"),
    "explain": Command("names the root cause of a hang", "elasticd_agent.cli.explain:explain"),
    "dump": Command("takes the stacks of all ranks now, without disturbing them", "elasticd_agent.cli.dump:dump"),
    "checkpoints": Command(
        "lists, checks and prunes a checkpoint directory", "elasticd_agent.cli.checkpoints:checkpoints"
    ),
    "report": Command(
        "sums up weeks of jobs: goodput, and what faults cost by cause, node and rank",
        "elasticd_daemon.cli.report_command:report",
    ),
    "open": Command("prints a URL that logs a browser in to the dashboard"),
    "nodes": Command("lists the nodes, what runs there, and why a node takes no work"),
    "cordon": Command("gives a node no new work"),
    "drain": Command("moves a node's jobs away after a checkpoint, and gives it no new ones"),
    "uncordon": Command("gives a node work again"),
    "agent": Command("runs on a node as a service and runs submitted jobs", "elasticd_daemon.agent:agent"),
    "store": Command("hosts a c10d store, where nodes without etcd meet", "elasticd_agent.cli.store_server:store"),
    "doctor": Command("runs the agent's health checks on this machine", "elasticd_daemon.cli.doctor:doctor"),
    "config": Command("checks an agent.toml or a job file", "elasticd_daemon.cli.config_command:config"),
    "docs": Command("prints the documentation of this version", "elasticd_agent.cli.docs:docs"),
}
AGENT_COMMANDS = tuple(name for name, command in COMMANDS.items() if not command.entry_point)
"""Those that always use an agent."""
_HIDDEN_COMMANDS = {"job": "elasticd_daemon.runners.main:job"}
"""The agent starts its runners with it."""
_COMMANDS_FOR_FILES = ("explain", "dump", "checkpoints")
"""Commands about files of jobs, which other users may not be able to reach."""
_AGENT_FLAGS = {"--agent", "--token-file", "--ca", "--node"}
_LOCAL_FLAGS = {"--list", "--event-log", "--pid", "--job", "--out", "-h", "--help"}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 succeeded, 1 the job failed, 2 usage, 75 requeue, 128+n stopped by signal n."""
    _open_closed_streams()
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has stopped, as head does. Python would report the buffered rest when it ends.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE


def _dispatch(argv: Sequence[str] | None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # help and file names must print in any locale
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["help"]
    if command == "help" and rest:
        command, rest = rest[0], ["--help"]
    if command in ("-h", "--help", "help"):
        print(_help_text(), end="")
        return 0
    if command == "--version":
        from elasticd_agent.model.version import version

        print(f"elasticd {version()}")
        return 0
    try:
        if command == "run":
            return _run_job(rest)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if command in AGENT_COMMANDS or (
            command in ("dump", "explain") and is_about_agents_job(command, rest, os.environ)
        ):
            run_command: Callable[[str, Sequence[str]], int] = _load_entry_point(
                "elasticd_daemon.cli.job_commands:run_command"
            )
            return run_command(command, rest)
        if entry := _HIDDEN_COMMANDS.get(command) or (COMMANDS[command].entry_point if command in COMMANDS else ""):
            return _load_entry_point(entry)(rest)
    except (UsageError, StoreUnavailable) as error:
        return _print_error(
            f"elasticd {command}", str(error), REQUEUE_EXIT_CODE if isinstance(error, StoreUnavailable) else 2
        )
    except PermissionError as error:
        if command not in _COMMANDS_FOR_FILES or not error.filename:
            raise
        return _print_error(f"elasticd {command}", f"{error.filename}: {error.strerror}")
    known = f"there are {', '.join(COMMANDS)}, as in: elasticd run train.py"
    return _print_error("elasticd", f"unknown command {command!r}; {did_you_mean(command, COMMANDS, known)}")


def _help_text() -> str:
    """The text of `elasticd help`."""
    lines = (f"  {name:<12} {command.help}\n" for name, command in COMMANDS.items())
    return (
        "usage: elasticd run [options] SCRIPT [script's arguments]\n       elasticd COMMAND [options]\n"
        "       elasticd help COMMAND\n\nKeeps a PyTorch training job running while its workers fail.\n\n"
        + "".join(lines)
        + "\nMost commands use the HTTP API of an agent: this node's, or --agent URL. More: elasticd docs cli\n"
    )


def _load_entry_point(entry: str) -> Callable[..., int]:
    """Return the function that an entry names. Raises UsageError if a package that it needs is missing."""
    module, _, name = entry.partition(":")
    try:
        function: Callable[..., int] = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("", "elasticd", "elasticd_agent", "elasticd_daemon"):
            raise
        raise UsageError(
            f"the package {error.name!r} is missing, which this command needs: pip install elasticd, without --no-deps"
        ) from None
    return function


def _run_job(argv: Sequence[str]) -> int:
    """Run a job: parse, check this machine, and only then import what runs it."""
    from elasticd_agent.config import run_options

    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current directory does not exist; change to one that does") from None
    spec, policy, settings = run_options.parse_run(argv, os.environ, here)
    from elasticd_agent.job import preflight  # not needed by a page of help or a mistake in an option

    preflight.check(spec, settings, os.environ)
    from elasticd_agent.job.run import run_job

    return run_job(spec, policy, settings)


def is_about_agents_job(command: str, argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """True if `dump` or `explain` is about a job of an agent. `dump JOB` is; `explain WORD` is if there is an agent,
    unless the word has a slash or exists here.
    """
    flags = {word.partition("=")[0] for word in argv if word.startswith("-")}
    if flags & _AGENT_FLAGS:
        return True
    if flags & _LOCAL_FLAGS:
        return False
    words = [word for before, word in zip(["", *argv], argv, strict=False) if before != "--round" and word[:1] != "-"]
    if len(words) != 1:
        return False
    if command == "dump":
        return True
    if "/" in words[0] or os.path.lexists(words[0]):
        return False
    return bool(environ.get(AGENT_VARIABLE)) or os.path.exists(DEFAULT_SOCKET)


def _open_closed_streams() -> None:
    """Open /dev/null for closed standard streams (`2>&-`, some init systems), before any other file gets their numbers:
    a lock or a connection as descriptor 2 would be written to by error messages.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:  # an earlier number was free
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False))  # noqa: SIM115 for good


def _print_error(prefix: str, message: str, code: int = 2) -> int:
    """Print one line on stderr and return the exit code."""
    # One line for any argument: a newline in a file name must not break it up.
    print(f"{prefix}: error: {message}".replace("\n", "\\n").replace("\r", "\\r"), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
