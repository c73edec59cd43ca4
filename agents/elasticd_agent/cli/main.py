"""The command `elasticd`: chooses the command and returns its exit code. Nothing slow is imported before that."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from elasticd.errors import StoreUnavailable, UsageError
from elasticd_agent.model.exit_codes import REQUEUE

DEFAULT_SOCKET = "/run/elasticd/agent.sock"
AGENT_VARIABLE = "ELASTICD_AGENT"
_HELP = """\
usage: elasticd run [options] SCRIPT [script's arguments]
       elasticd agent --config FILE
       elasticd store [--port PORT]
       elasticd explain LOGDIR [options]
       elasticd dump [options]
       elasticd doctor [options]
       elasticd config check|example [options]
       elasticd checkpoints list|show|verify|prune DIR [options]
       elasticd submit FILE | jobs | status [JOB] | logs JOB | cancel JOB [options]
       elasticd nodes | cordon NODE | uncordon NODE | drain NODE [options]
       elasticd dump JOB | explain JOB | open [options]
       elasticd --version

Keeps a PyTorch training job running while its workers fail.

  run        runs a job on this machine, alone or with other nodes; it takes torchrun's options and its own
  explain    names the root cause of a hang, from the evidence in a log directory
  dump       takes the same evidence of a running job, without disturbing it
  agent      runs on a node as a service and runs the jobs that are submitted
  store      hosts a c10d store, where the nodes of jobs without an etcd meet
  doctor     runs the agent's health checks on this machine
  config     checks and explains an agent.toml or a job file
  checkpoints  lists, checks and prunes a checkpoint directory

The other commands use the HTTP API of an `elasticd agent`: this node's, or --agent URL. More: docs/cli.md.
"""
_COMMANDS = {
    "run": "",
    "agent": "elasticd_agent.node.agent:agent",
    "store": "elasticd_agent.cli.store_server:store",
    "explain": "elasticd_agent.cli.explain:explain",
    "dump": "elasticd_agent.cli.dump:dump",
    "doctor": "elasticd_agent.cli.doctor:doctor",
    "config": "elasticd_agent.cli.config_command:config",
    "checkpoints": "elasticd_agent.cli.checkpoints:checkpoints",
    "job": "elasticd_agent.node.runners.main:job",  # not in the help: the agent starts its runners with it
}
AGENT_COMMANDS = ("submit", "jobs", "status", "logs", "cancel", "nodes", "cordon", "uncordon", "drain", "open")
"""Those that always use an agent."""
_AGENT_FLAGS = {"--agent", "--token-file", "--ca", "--node"}
_LOCAL_FLAGS = {"--list", "--event-log", "--pid", "--job", "--out", "-h", "--help"}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 succeeded, 1 the job failed, 2 usage, 75 requeue, 128+n stopped by signal n."""
    _open_std_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # help and file names must print in any locale
    command, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
    if command in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    if command == "--version":
        from elasticd_agent.model.version import version

        print(f"elasticd {version()}")
        return 0
    try:
        if command == "run":
            return _run(rest)
        if command in AGENT_COMMANDS or (command in ("dump", "explain") and refers_to_job(command, rest, os.environ)):
            from elasticd_agent.cli.job_commands import run_command

            return run_command(command, rest)
        if command in _COMMANDS:
            return _load(_COMMANDS[command])(rest)
    except (UsageError, StoreUnavailable) as error:
        return _error(f"elasticd {command}", str(error), REQUEUE if isinstance(error, StoreUnavailable) else 2)
    wrong = f"unknown command {command!r}" if command else "a command is missing"
    known = ", ".join((*(name for name in _COMMANDS if name != "job"), *AGENT_COMMANDS))
    return _error("elasticd", f"{wrong}; there are {known}, as in: elasticd run train.py")


def _load(entry: str) -> Callable[[Sequence[str]], int]:
    module, _, function = entry.partition(":")
    found: Callable[[Sequence[str]], int] = getattr(import_module(module), function)
    return found


def _run(argv: Sequence[str]) -> int:
    from elasticd_agent.config import run_options
    from elasticd_agent.job import preflight

    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current directory does not exist; change to one that does") from None
    spec, policy, settings = run_options.parse_run(argv, os.environ, here)
    preflight.check(spec, settings, os.environ)
    from elasticd_agent.job.run import run_job

    return run_job(spec, policy, settings)


def refers_to_job(command: str, argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether `dump` or `explain` is about a job of an agent. `dump JOB` is; `explain WORD` is if there is an agent,
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


def _open_std_streams() -> None:
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


def _error(prefix: str, message: str, code: int = 2) -> int:
    # One line for any argument: a newline in a file name must not break it up.
    print(f"{prefix}: error: {message}".replace("\n", "\\n").replace("\r", "\\r"), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
