"""`elasticd completion SHELL`, and the parsers of all commands in one, from which it and the man page are made."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from elasticd.errors import UsageError
from elasticd_agent.config.command_parser import CommandParser

_SHELLS = ("bash", "zsh", "fish", "tcsh")


def completion(argv: Sequence[str]) -> int:
    shell = build_parser().parse_args(argv).shell
    try:
        import shtab
    except ImportError:
        raise UsageError("the package 'shtab' is missing: pip install shtab") from None
    sys.stdout.write(shtab.complete(all_parsers(), shell))
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        "completion",
        "Prints a script that makes a shell complete elasticd's commands and options.",
        'For bash: eval "$(elasticd completion bash)" in ~/.bashrc.',
    )
    parser.add_argument("shell", choices=_SHELLS)
    return parser


def all_parsers() -> argparse.ArgumentParser:
    """One parser with a subparser for every command; for its description only, not for parsing."""
    from elasticd_agent.cli import checkpoints, docs, dump, explain, store_server
    from elasticd_agent.cli.main import COMMANDS
    from elasticd_agent.config.elasticd_flags import ELASTICD_FLAGS
    from elasticd_agent.config.flag import Treatment
    from elasticd_agent.config.torchrun_flags import TORCHRUN_FLAGS
    from elasticd_daemon import agent
    from elasticd_daemon.cli import config_command, doctor, job_commands

    run = CommandParser("run", COMMANDS["run"].line, "Exit codes: 0 succeeded, 1 the job failed, 2 usage, 75 requeue.")
    for flag in (*ELASTICD_FLAGS, *TORCHRUN_FLAGS):
        if flag.treatment is Treatment.HONORED:
            word = flag.usage.rpartition(" ")[2]
            switch = {"action": "store_true"} if word.startswith("-") else {"metavar": word}
            run.add_argument(*flag.spellings, help=flag.help.replace("%", "%%"), **switch)  # type: ignore[arg-type]
    run.add_argument("script", metavar="SCRIPT", help="and its arguments")
    parsers: dict[str, argparse.ArgumentParser] = {"run": run, "completion": build_parser()}
    local = (agent, store_server, doctor, config_command, checkpoints, docs)
    parsers |= {parser.prog.split()[-1]: parser for parser in (module.build_parser() for module in local)}
    parsers |= {name: job_commands.build_parser(name) for name in COMMANDS if name not in parsers}
    # Without a JOB, or of a directory, these two are about this machine, and have options of their own.
    for name, module in (("dump", dump), ("explain", explain)):
        of_job, parsers[name] = parsers[name], module.build_parser()
        for action in of_job._actions:
            if action.option_strings and not parsers[name]._option_string_actions.keys() & set(action.option_strings):
                parsers[name]._add_action(action)
    whole = argparse.ArgumentParser(prog="elasticd", description="Keeps a PyTorch training job running.")
    commands = whole.add_subparsers(metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(
            name,
            help=command.line,
            description=parsers[name].description,
            epilog=parsers[name].epilog,
            parents=[parsers[name]],
            add_help=False,
        )
    return whole
