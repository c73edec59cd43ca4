"""`elasticd doctor`: one run of the agent's health checks on this node, as a table or JSON. It changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from elasticd_agent.config.command_parser import CommandParser
from elasticd_agent.model.phrases import visible
from elasticd_daemon.cli import tables
from elasticd_daemon.config.agent_settings import NodeSettings
from elasticd_daemon.config.load import DEFAULT_FILE, installed_config, load
from elasticd_daemon.health.checks import ALL_REDUCE_CHECK, NodeChecks
from elasticd_daemon.health.monitor import max_gpus_seen
from elasticd_daemon.health.result import CheckResult, failed, passed, skipped
from elasticd_daemon.job_dir import JobFiles
from elasticd_daemon.runners import liveness


def doctor(argv: Sequence[str]) -> int:
    """Returns the exit code. Raises UsageError."""
    options = build_parser().parse_args(argv)
    config = options.config or installed_config()
    results = run_checks(load(config, os.environ), os.environ, options.all_reduce)
    healthy = all(result.outcome != "failed" for result in results)
    if options.json:
        print(json.dumps({"healthy": healthy, "results": [asdict(result) for result in results]}))
    else:
        words = {"passed": "passed", "failed": "FAILED", "skipped": "skipped"}
        rows = [
            (result.check, words[result.outcome], f"{result.seconds:.2f}", visible(result.why)) for result in results
        ]
        print(tables.table(("CHECK", "RESULT", "SECONDS", "WHY"), rows), end="")
    return 0 if healthy else 1


def run_checks(settings: NodeSettings, environ: Mapping[str, str], all_reduce: bool) -> list[CheckResult]:
    """A result for each check; bounded, whatever hangs."""
    checks = NodeChecks(settings, environ, lambda: None)
    try:
        results = [
            *checks.run(not runs_jobs(settings.state_dir), max_gpus_seen(settings)),
            *check_link_protection(agent_is_root(settings.state_dir)),
        ]
        skip = skipped(ALL_REDUCE_CHECK, "jobs may be running here; --all-reduce runs it")
        return [*results, checks.all_reduce() if all_reduce else skip]
    finally:
        checks.close()


def runs_jobs(state_dir: Path) -> bool:
    """True while the agent has jobs here, or if that cannot be seen: what they use is not the node's fault."""
    try:
        runs = list((state_dir / "runners").iterdir())
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return any(liveness.has_processes(JobFiles(state_dir / "jobs" / run.name)) for run in runs)


def agent_is_root(state_dir: Path) -> bool:
    """Tell by the owner of the agent's directory: `sudo elasticd doctor` is for any agent."""
    try:
        return state_dir.stat().st_uid == 0
    except OSError:
        return os.geteuid() == 0


def check_link_protection(root: bool, sysctls: Path = Path("/proc/sys/fs")) -> list[CheckResult]:
    """The kernel keeps users from leading root to files of others by links. Root's agent runs jobs of any user."""
    results = []
    for name in ("protected_hardlinks", "protected_symlinks"):
        check = f"fs.{name}"
        try:
            value = int((sysctls / name).read_bytes())
        except (OSError, ValueError) as error:
            results.append(skipped(check, f"it cannot be read: {error}"))
            continue
        if value:
            results.append(passed(check, str(value)))
        elif root:
            results.append(failed(check, f"0, but jobs may run as other users; sysctl -w {check}=1"))
        else:
            results.append(skipped(check, "0; give jobs a user of their own only where it is 1"))
    return results


def build_parser() -> CommandParser:
    parser = CommandParser(
        "doctor",
        "Runs the agent's health checks on this node: GPUs, directories, memory, links, and the operator's own checks.",
        "Exit codes: 0 all checks passed, 1 a check failed, 2 usage. More: elasticd docs health",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"the agent's configuration; default: {DEFAULT_FILE} if it exists"
    )
    parser.add_argument(
        "--all-reduce",
        action="store_true",
        help="let the slots run an all-reduce with torch, too: it takes a moment, and needs free memory on the GPUs",
    )
    parser.add_argument(
        "--json", action="store_true", help='{"healthy": BOOL, "results": [{"check", "outcome", "why", "seconds"}, …]}'
    )
    return parser
