"""The same situations under torchrun, with a plain script whose process group gives up after 30 s.

torchrun has no verdict: what is measured is whether and when all ranks step again after the injection. It has no
process that hosts a round's store alone, so a stopped store has no counterpart here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.hang_jobs import GAP_STEPS, START_S, HangOutcome, fired, stepped
from benchmarks.processes import end_all
from tests.hangs.situations import PLAIN, SCRIPTS, Situation
from tests.multihost.net import Network

TIMEOUT_S = 30.0
CUT_S = TIMEOUT_S + 10.0
"""So long no packet passes between two nodes: until both their groups have given up."""
_LOOK_S = 0.05
_COMMAND = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", "3", "--nproc-per-node")


def torchrun(situation: Situation, folder: Path, deadline_s: float, outcome: HangOutcome) -> None:
    """One job, one hang; every process of it is gone after this."""
    folder.mkdir(parents=True)
    (folder / "faults.json").write_text(json.dumps([asdict(fault) for fault in situation.faults(GAP_STEPS)]))
    script = [str(SCRIPTS / PLAIN), *situation.args, "--timeout", f"{TIMEOUT_S:g}"]
    # As well as it can: with the agent's store shared, a restarted gloo group often reads the dead group's addresses.
    environment = {"WORK": str(folder), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / "output.log").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *_COMMAND, str(situation.workers), *script],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **environment},
        )
    outcome.tried += 1
    try:
        start = time.monotonic()
        at = first = None
        while process.poll() is None and time.monotonic() < (start + START_S if at is None else at + deadline_s):
            at = fired(folder, len(situation.ranks))
            first = stepped(folder, 1, situation.workers)
            if first is not None:
                break
            time.sleep(_LOOK_S)
        if at is not None and first is not None:
            outcome.recovered.append(first - at)
        else:
            outcome.wrong.append("never" if process.poll() is None else f"ended with exit code {process.returncode}")
    finally:
        process.kill()
        process.wait(10)
        end_all()


def torchrun_partition(folder: Path, deadline_s: float, outcome: HangOutcome) -> None:
    """Two nodes whose packets vanish until both groups have given up; nothing resets a connection. Needs root."""
    folder.mkdir(parents=True)
    (folder / "faults.json").write_text("[]")
    script = [str(SCRIPTS / PLAIN), "--timeout", f"{TIMEOUT_S:g}"]
    environment = {"WORK": str(folder), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with Network(2) as net, ExitStack() as stack:
        nodes = []
        where = ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"{net.hosts[0].address}:29400"]
        for host in net.hosts:
            out = stack.enter_context((folder / f"output-{host.name}.log").open("wb"))
            flags = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", host.address]
            command = [sys.executable, *_COMMAND[:2], *flags, *where, *script]
            nodes.append(host.popen(command, environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out))
        start = time.monotonic()
        while _all_since(folder, start) is None and time.monotonic() < start + START_S:
            time.sleep(_LOOK_S)
        outcome.tried += 1
        time.sleep(GAP_STEPS * 0.05)
        at = time.monotonic()
        net.cut(*net.hosts)
        again = healed = None
        while again is None and time.monotonic() < at + deadline_s and any(node.poll() is None for node in nodes):
            if healed is None and time.monotonic() > at + CUT_S:
                healed = time.monotonic()
                net.heal(*net.hosts)
            again = None if healed is None else _all_since(folder, healed)
            time.sleep(_LOOK_S)
        if again is not None:
            outcome.recovered.append(again - at)
        else:
            codes = [node.poll() for node in nodes]
            outcome.wrong.append("never" if None in codes else f"ended with exit codes {codes}")


def _all_since(folder: Path, since: float) -> float | None:
    """When the last rank had done its first step since then, once both have."""
    firsts = []
    for rank in (0, 1):
        path = folder / f"steps-{rank}"
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        times = [float(line.split()[2]) for line in lines]
        firsts.append(min((time for time in times if time > since), default=None))
    return None if None in firsts else max(first for first in firsts if first is not None)
