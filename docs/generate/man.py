"""docs/man/elasticd.1, from the commands' parsers."""

from __future__ import annotations

import argparse
import os

from elasticd_agent.cli.main import COMMANDS
from elasticd_daemon.cli.completion import all_parsers


def page() -> str:
    os.environ["COLUMNS"] = "80"
    (commands,) = (action.choices for action in all_parsers()._actions if isinstance(action.choices, dict))
    parts = [
        '.TH ELASTICD 1 "" "elasticd" "User Commands"',
        ".SH NAME\nelasticd \\- keeps a PyTorch training job running while its workers fail",
        ".SH SYNOPSIS\n.B elasticd\n.I COMMAND\n[options]",
        ".SH COMMANDS",
        *(_command(name, commands[name]) for name in COMMANDS),
        ".SH SEE ALSO\n.BR torchrun (1)",
    ]
    return "\n".join(parts) + "\n"


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    arguments = " ".join(_names(one) for one in parser._actions if not one.option_strings)
    text = [f".SS elasticd {name} {_escaped(arguments)}".rstrip(), _escaped(parser.description or COMMANDS[name].line)]
    formatter = argparse.HelpFormatter(parser.prog)
    for action in parser._actions:
        if action.option_strings and not isinstance(action, argparse._HelpAction):
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
