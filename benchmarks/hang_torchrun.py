"""The same situations under torchrun, with a plain script whose process group gives up after 30 s.

torchrun has no verdict: what is measured is whether and when all ranks step again after the injection.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.hang_jobs import GAP_STEPS, START_S, Outcome, fired, stepped
from benchmarks.processes import end_all
from tests.hangs.situations import PLAIN, SCRIPTS, Situation

TIMEOUT_S = 30.0
_LOOK_S = 0.05
_COMMAND = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", "3", "--nproc-per-node")


def torchrun(situation: Situation, folder: Path, deadline_s: float, outcome: Outcome) -> None:
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
