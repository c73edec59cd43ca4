"""docs/man/elasticd.1, from the commands' parsers."""

from __future__ import annotations

import argparse
import os

from elasticd_agent.cli import checkpoints, docs, dump, explain, store_server
from elasticd_agent.cli.main import COMMANDS
from elasticd_agent.config.command_parser import CommandParser
from elasticd_agent.config.elasticd_flags import ELASTICD_FLAGS
from elasticd_agent.config.flag import Treatment
from elasticd_agent.config.torchrun_flags import TORCHRUN_FLAGS
from elasticd_daemon import agent
from elasticd_daemon.cli import config_command, doctor, job_commands, report_command


def page() -> str:
    os.environ["COLUMNS"] = "80"
    commands = all_parsers()
    parts = [
        '.TH ELASTICD 1 "" "elasticd" "User Commands"',
        ".SH NAME\nelasticd \\- keeps a PyTorch training job running while its workers fail",
        ".SH SYNOPSIS\n.B elasticd\n.I COMMAND\n[options]",
        ".SH COMMANDS",
        *(_command(name, commands[name]) for name in COMMANDS),
        ".SH SEE ALSO\n.BR torchrun (1)",
    ]
    return "\n".join(parts) + "\n"


def all_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command; for its description only, not for parsing."""

    run = CommandParser("run", COMMANDS["run"].help, "Exit codes: 0 succeeded, 1 the job failed, 2 usage, 75 requeue.")
    for flag in (*ELASTICD_FLAGS, *TORCHRUN_FLAGS):
        if flag.treatment is Treatment.HONORED:
            word = flag.usage.rpartition(" ")[2]
            switch = {"action": "store_true"} if word.startswith("-") else {"metavar": word}
            run.add_argument(*flag.documented_spellings, help=flag.help.replace("%", "%%"), **switch)  # type: ignore[arg-type]
    run.add_argument("script", metavar="SCRIPT", help="and its arguments")
    parsers: dict[str, argparse.ArgumentParser] = {"run": run}
    local = (agent, store_server, doctor, config_command, report_command, checkpoints, docs)
    parsers |= {parser.prog.split()[-1]: parser for parser in (module.build_parser() for module in local)}
    parsers |= {name: job_commands.build_parser(name) for name in COMMANDS if name not in parsers}
    # Without a JOB, or of a directory, these two are about this machine, and have options of their own.
    for name, module in (("dump", dump), ("explain", explain)):
        of_job, parsers[name] = parsers[name], module.build_parser()
        for action in of_job._actions:
            if action.option_strings and not parsers[name]._option_string_actions.keys() & set(action.option_strings):
                parsers[name]._add_action(action)
    return parsers


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    arguments = " ".join(_names(one) for one in parser._actions if not one.option_strings)
    text = [f".SS elasticd {name} {_escaped(arguments)}".rstrip(), _escaped(parser.description or COMMANDS[name].help)]
    formatter = argparse.HelpFormatter(parser.prog)
    for action in parser._actions:
        if action.option_strings and not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS:
            text += [".TP", f".B {_escaped(_names(action))}", _escaped(formatter._expand_help(action))]
    if parser.epilog:
        text += [".PP", _escaped(parser.epilog)]
    return "\n".join(text)


def _names(action: argparse.Action) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
    if not action.option_strings:
        name = str(value or action.dest.upper())
        return f"[{name}]" if action.nargs == "?" else name
    return f"{', '.join(action.option_strings)} {value if action.nargs != 0 else ''}".rstrip()


def _escaped(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped
