"""`elasticd dump`: requests the evidence of a running job, without disturbing it, and explains it.

Agents of this user are found by their runtime directories; the agent of the job gathers the evidence. The command
itself touches no worker: the agent knows the ranks, may trace them, and has the deadlines that keep a dead file system
or a stuck process from stopping the collection.

Directories of killed agents may lie beside those of live ones. A directory counts if its pid lives and its socket
answers; an agent that does not answer is named, since that is what a person with a stuck job has to know first.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticd.errors import UsageError
from elasticd_agent.cli.explain import READ_TIMEOUT_S, print_explanation
from elasticd_agent.config.command_parser import CommandParser
from elasticd_agent.hangs.explain import load as reading
from elasticd_agent.hangs.explain import locate as finding
from elasticd_agent.system import bounded_io as files
from elasticd_agent.system.files import temporary_directory
from elasticd_agent.system.network import control_socket as control

ABOUT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class LocalRun:
    """An agent (`elasticd run`) that answers."""

    pid: int
    job: str
    node: str
    socket: Path

    def __str__(self) -> str:
        return f"job {self.job}, node {self.node}, pid {self.pid}"


def dump(argv: Sequence[str]) -> int:
    """Returns 0 if evidence was gathered, 1 if not; raises UsageError."""
    args = build_parser().parse_args(argv)
    out = _check_output_directory(args.out)
    agents, silent = find_local_runs(args.pid)
    chosen = [agent for agent in agents if args.job in (None, agent.job)]
    if not chosen:
        for why in silent:
            print(f"elasticd dump: {why}", file=sys.stderr)
        named = f"; there is {'; '.join(map(str, agents))}" if agents else ""
        which = f"job {args.job}" if args.job is not None else f"agent {args.pid}" if args.pid is not None else "job"
        return _print_failure(f"no {which} of this user runs on this machine{named}")
    if len(chosen) > 1:
        listed = "".join(f"\n  --pid {agent.pid}  (job {agent.job}, node {agent.node})" for agent in chosen)
        print(f"elasticd dump: several jobs run here; choose one:{listed}", file=sys.stderr)
        return 2
    return _request_dump(chosen[0], out, as_json=args.json)


def find_local_runs(only_pid: int | None = None) -> tuple[list[LocalRun], list[str]]:
    """This user's agents on this machine, or the one with `only_pid`; and a sentence for each that does not answer."""
    runs, silent = [], []
    for path in sorted(_control_sockets()):
        pid = path.parent.name.split("-")[2]
        if not pid.isdecimal() or not Path(f"/proc/{pid}").exists() or only_pid not in (None, int(pid)):
            continue  # an agent that was killed leaves its directory behind
        try:
            about = control.send_request(path, {"do": "about"}, ABOUT_TIMEOUT_S)
        except control.ControlSocketError as error:
            silent.append(f"the agent with pid {pid} does not answer: {error}")
            continue
        runs.append(LocalRun(int(pid), str(about.get("job", "?")), str(about.get("node", "?")), path))
    return sorted(runs, key=lambda agent: agent.pid), silent


def _control_sockets() -> set[Path]:
    """The control sockets where run.runtime_directory puts them."""
    bases = {Path("/dev/shm"), temporary_directory()}
    return {path for base in bases for path in base.glob(f"elasticd-{os.getuid()}-*-*/{control.SOCKET_NAME}")}


def _request_dump(agent: LocalRun, out: Path | None, *, as_json: bool) -> int:
    """Have the agent gather the evidence, and print it."""
    try:
        answer = control.send_request(agent.socket, {"do": "dump", "out": None if out is None else str(out)})
    except control.ControlSocketError as error:
        return _print_failure(f"{agent}: {error}")
    path = answer.get("path")
    if not isinstance(path, str):
        return _print_failure(f"{agent}: {answer.get('error', 'the answer has no path')}")
    try:
        return files.run_within(READ_TIMEOUT_S, lambda: _print_evidence(Path(path), agent.node, as_json=as_json))
    except files.DeadlineExceeded:
        return _print_failure(f"the evidence is in {path}, which does not answer")


def _print_evidence(path: Path, node: str, *, as_json: bool) -> int:
    place = finding.choose_default_folder(finding.find_folders(path))
    if place is None:
        return _print_failure(f"the agent reports evidence in {path}, where there is none")
    print_explanation(reading.explain(place, default_node=node), as_json=as_json)
    return 0


def _check_output_directory(out: Path | None) -> Path | None:
    """Return the directory for the evidence. Raises UsageError for one that holds something already."""
    if out is None:
        return None
    path = out.absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"--out {out}: give a new or empty directory: evidence of two dumps must not mix")
    return path


def _print_failure(why: str) -> int:
    print(f"elasticd dump: {why}", file=sys.stderr)
    return 1


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "dump",
        "Takes stacks, /proc facts and last log lines of every rank of a job that runs on this machine, "
        "without disturbing it, and explains them. This finds `elasticd run`; of a daemon's job, wherever it runs: "
        "elasticd dump JOB [--node NODE] [--json] [--agent URL].",
        "Exit codes: 0 taken, 1 not taken, 2 usage, or several jobs run here. More: elasticd docs hangs",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--job", metavar="ID", help="of the job with this id (--rdzv-id)")
    which.add_argument("--pid", type=int, help="of the agent, an `elasticd run`, with this process id")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to; otherwise beside the round's logs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the page")
    return parser
