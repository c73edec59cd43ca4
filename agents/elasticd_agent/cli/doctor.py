"""`elasticd doctor`: everything the daemon would look at on this node, once, now, as a table for a person or as JSON.

It changes nothing: no strike is counted, no cool-off begins or ends, no daemon is asked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from elasticd.errors import UsageError
from elasticd_agent.config.agent_settings import NodeSettings
from elasticd_agent.config.load import load
from elasticd_agent.node.health import all_reduce as reducing
from elasticd_agent.node.health.checks import NodeChecks
from elasticd_agent.node.health.result import CheckResult, skipped
from elasticd_agent.node.health.setup import check_targets, max_gpus_seen

DEFAULT_CONFIG = Path("/etc/elasticd/agent.toml")
_HELP = f"""\
usage: elasticd doctor [--config FILE] [--json] [--all-reduce]

Looks at this node as the agent does before it joins: GPUs, directories, memory, and the operator's own checks.
The exit code is 0 when nothing is wrong, 1 when something is, 2 when it was called wrongly.

  --config FILE   the agent's configuration; default: {DEFAULT_CONFIG} if it is there
  --all-reduce    let the slots add up numbers with torch, too: it takes a moment, and GPUs that are in use may be too
                  full for it
  --json          {{"healthy": BOOL, "readings": [{{"check", "outcome", "why", "seconds"}}, ...]}}
"""


def doctor(argv: Sequence[str]) -> int:
    """Returns the exit code. Raises UsageError."""
    told = _parser().parse_args(argv)
    if told.help:
        print(_HELP, end="")
        return 0
    config = told.config or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)
    readings = run_checks(load(config, os.environ), os.environ, told.all_reduce)
    healthy = all(reading.outcome != "bad" for reading in readings)
    if told.json:
        print(json.dumps({"healthy": healthy, "readings": [asdict(reading) for reading in readings]}))
    else:
        _print(readings)
    return 0 if healthy else 1


def run_checks(settings: NodeSettings, environ: Mapping[str, str], all_reduce: bool) -> list[CheckResult]:
    """A reading for each check there is. Bounded, whatever hangs."""
    checks = NodeChecks(check_targets(settings, environ), environ, lambda: None)
    try:
        readings = checks.run(True, max_gpus_seen(settings))
        if all_reduce:
            readings.append(checks.all_reduce())
        else:
            readings.append(skipped(reducing.CHECK, "jobs may be running here; --all-reduce runs it"))
    finally:
        checks.close()
    return readings


def _print(readings: Sequence[CheckResult]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "result", "why", "seconds", box=None, pad_edge=False)
    table.columns[3].justify = "right"
    table.columns[0].no_wrap = True
    words = {"good": ("good", "green"), "bad": ("BAD", "red"), "skipped": ("skipped", "yellow")}
    for reading in readings:
        word, color = words[reading.outcome]
        table.add_row(Text(reading.check), Text(word, color), Text(reading.why), f"{reading.seconds:.2f}")
    tell = Console(file=sys.stdout, highlight=False, soft_wrap=False)
    if not tell.is_terminal:
        tell.width = 200
    tell.print(table)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="elasticd doctor", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--all-reduce", action="store_true")
    return parser
