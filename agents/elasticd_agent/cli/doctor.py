"""`elasticd doctor`: one run of the agent's health checks on this node, as a table or JSON. It changes nothing."""

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
from elasticd_agent.node.health.all_reduce import CHECK
from elasticd_agent.node.health.checks import NodeChecks
from elasticd_agent.node.health.monitor import check_targets, max_gpus_seen
from elasticd_agent.node.health.result import CheckResult, skipped

DEFAULT_CONFIG = Path("/etc/elasticd/agent.toml")
_HELP = f"""\
usage: elasticd doctor [--config FILE] [--json] [--all-reduce]

Runs the agent's health checks on this node: GPUs, directories, memory, and the operator's own checks.
Exit codes: 0 all checks passed, 1 a check failed, 2 usage.

  --config FILE   the agent's configuration; default: {DEFAULT_CONFIG} if it exists
  --all-reduce    let the slots run an all-reduce with torch, too: it takes a moment, and needs free memory on the GPUs
  --json          {{"healthy": BOOL, "results": [{{"check", "outcome", "why", "seconds"}}, ...]}}
"""


def doctor(argv: Sequence[str]) -> int:
    """Returns the exit code. Raises UsageError."""
    options = _parser().parse_args(argv)
    if options.help:
        print(_HELP, end="")
        return 0
    config = options.config or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)
    results = run_checks(load(config, os.environ), os.environ, options.all_reduce)
    healthy = all(one.outcome != "failed" for one in results)
    if options.json:
        print(json.dumps({"healthy": healthy, "results": [asdict(one) for one in results]}))
    else:
        _print(results)
    return 0 if healthy else 1


def run_checks(settings: NodeSettings, environ: Mapping[str, str], all_reduce: bool) -> list[CheckResult]:
    """A result for each check; bounded, whatever hangs."""
    checks = NodeChecks(check_targets(settings, environ), environ, lambda: None)
    try:
        results = checks.run(True, max_gpus_seen(settings))
        skip = skipped(CHECK, "jobs may be running here; --all-reduce runs it")
        return [*results, checks.all_reduce() if all_reduce else skip]
    finally:
        checks.close()


def _print(results: Sequence[CheckResult]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "result", "why", "seconds", box=None, pad_edge=False)
    table.columns[3].justify = "right"
    table.columns[0].no_wrap = True
    words = {"passed": ("passed", "green"), "failed": ("FAILED", "red"), "skipped": ("skipped", "yellow")}
    for one in results:
        table.add_row(Text(one.check), Text(*words[one.outcome]), Text(one.why), f"{one.seconds:.2f}")
    console = Console(file=sys.stdout, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table)


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
