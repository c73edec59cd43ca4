"""The command `elasticd`: reads the command line, hands it to the part that does the work, answers with an exit code.

It exists to be small: usage errors and --help are answered before anything slow is imported. It decides nothing.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from elasticd.errors import UsageError
from elasticd_agent.cli import std_streams as standard_files

_HELP = """\
usage: elasticd run [options] SCRIPT [script's arguments]
       elasticd agent --config FILE
       elasticd store [--port PORT]
       elasticd explain LOGDIR [options]
       elasticd dump [options]
       elasticd doctor [options]
       elasticd config check|example [options]
       elasticd submit FILE | jobs | status [JOB] | logs JOB | cancel JOB [options]
       elasticd nodes | cordon NODE | uncordon NODE | drain NODE [options]
       elasticd dump JOB | explain JOB [options]
       elasticd --version

Keeps a PyTorch training job running while its workers fail. `elasticd run` takes torchrun's options and its own:
elasticd run --help lists them. `elasticd explain` says who made a job hang and why, from the evidence in its log
directory; `elasticd dump` takes the same evidence of a job that runs on this machine, without disturbing it.
`elasticd agent` runs for months on a node and is given jobs. `elasticd doctor` looks at this machine as it does.
`elasticd store` is where jobs can meet without an etcd.
`elasticd config check FILE` says what an agent.toml or a job file means, or what is wrong with it.
The others ask an `elasticd agent`, this node's unless --agent names another one: docs/cli.md.
"""
_COMMANDS = ("run", "agent", "store", "explain", "dump", "doctor", "config")
_AGENT_COMMANDS = ("submit", "jobs", "status", "logs", "cancel", "nodes", "cordon", "uncordon", "drain")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 succeeded, 1 the job failed, 2 usage, 128+n stopped by signal n."""
    standard_files.ensure()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # help and file names must print in any locale
    command, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
    if command == "run":
        return _run(rest)
    if command == "explain":
        return _explain(rest)
    if command == "dump":
        return _dump(rest)
    if command == "doctor":
        return _doctor(rest)
    if command == "agent":
        return _agent(rest)
    if command == "store":
        return _store(rest)
    if command == "job":
        return _job(rest)
    if command == "config":
        return _config(rest)
    if command in _AGENT_COMMANDS:
        return _agent_command(command, rest)
    if command in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    if command == "--version":
        from elasticd_agent.model.version import version

        print(f"elasticd {version()}")
        return 0
    wrong = f"unknown command {command!r}" if command else "a command is missing"
    return _usage_error(
        "elasticd", f"{wrong}; there are {', '.join((*_COMMANDS, *_AGENT_COMMANDS))}, as in: elasticd run train.py"
    )


def _run(argv: Sequence[str]) -> int:
    from elasticd_agent.config import run_options as arguments
    from elasticd_agent.job import preflight

    try:
        spec, policy, settings = arguments.parse_run(argv, os.environ, _here())
        preflight.check(spec, settings, os.environ)
        from elasticd_agent.job.run import run_job

        return run_job(spec, policy, settings)
    except UsageError as error:
        return _usage_error("elasticd run", str(error))


def _explain(argv: Sequence[str]) -> int:
    from elasticd_agent.cli.dispatch import refers_to_job

    if refers_to_job("explain", argv, os.environ):
        return _agent_command("explain", argv)
    from elasticd_agent.cli.explain import explain

    try:
        return explain(argv)
    except UsageError as error:
        return _usage_error("elasticd explain", str(error))


def _dump(argv: Sequence[str]) -> int:
    from elasticd_agent.cli.dispatch import refers_to_job

    if refers_to_job("dump", argv, os.environ):
        return _agent_command("dump", argv)
    from elasticd_agent.cli.dump import dump

    try:
        return dump(argv)
    except UsageError as error:
        return _usage_error("elasticd dump", str(error))


def _agent(argv: Sequence[str]) -> int:
    from elasticd_agent.node.agent import agent

    try:
        return agent(argv)
    except UsageError as error:
        return _usage_error("elasticd agent", str(error))


def _store(argv: Sequence[str]) -> int:
    from elasticd_agent.cli.store_server import store

    try:
        return store(argv)
    except UsageError as error:
        return _usage_error("elasticd store", str(error))


def _job(argv: Sequence[str]) -> int:
    """Not in the help: the daemon's runners are started so."""
    from elasticd_agent.node.runners.main import job

    try:
        return job(argv)
    except UsageError as error:
        return _usage_error("elasticd job", str(error))


def _doctor(argv: Sequence[str]) -> int:
    from elasticd_agent.cli.doctor import doctor

    try:
        return doctor(argv)
    except UsageError as error:
        return _usage_error("elasticd doctor", str(error))


def _config(argv: Sequence[str]) -> int:
    from elasticd_agent.cli.config_command import config

    try:
        return config(argv)
    except UsageError as error:
        return _usage_error("elasticd config", str(error))


def _agent_command(name: str, argv: Sequence[str]) -> int:
    from elasticd_agent.cli.job_commands import run_command

    try:
        return run_command(name, argv)
    except UsageError as error:
        return _usage_error(f"elasticd {name}", str(error))


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current directory does not exist any more; change to one that does") from None


def _usage_error(who: str, message: str) -> int:
    # One line whatever was typed: a newline in a file name must not break it up.
    print(f"{who}: error: {message}".replace("\n", "\\n").replace("\r", "\\r"), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
