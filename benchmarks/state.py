"""The cost of saving and restoring a state, side by side: elasticd, torch.save with fsync, DCP's async_save.

    python -m benchmarks.state --megabytes 10 300 2000 --workers 2 4

"elasticd FSDP2" is the same model in shards: each rank saves one. Per gigabyte of state: seconds that a save blocks
training (the slowest rank), seconds of a plain copy of as many bytes by all ranks at the same time, seconds until it is
on the disk, CPU seconds of all ranks and of the writer; the same for a restore from the disk. Medians. Then megabytes:
the peak of memory a rank beside its model in a restore and in a save, and what the node's buffers hold.
Each cell is two jobs: one that saves, and one that restores what the first one saved.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.launchers import ELASTICD, TORCHRUN_TUNED, ComparedLauncher

SCRIPT = Path(__file__).with_name("scripts") / "state_job.py"
WAYS: dict[str, ComparedLauncher] = {
    "elasticd": ELASTICD,
    "elasticd in place": replace(ELASTICD, command=(*ELASTICD.command, "--spares", "1")),
    "elasticd FSDP2": ELASTICD,
    "torch.save": TORCHRUN_TUNED,
    "DCP async_save": TORCHRUN_TUNED,
}
DEADLINE_S = 600


def run(method: str, workers: int, megabytes: float, saves: int, directory: Path) -> list[dict[str, Any]]:
    """The costs that one job has noted. Raises CalledProcessError if it fails."""
    (directory / "costs.jsonl").unlink(missing_ok=True)
    job = ["--method", method, "--megabytes", str(megabytes), "--directory", str(directory), "--saves", str(saves)]
    launcher = WAYS[method]
    subprocess.run(
        launcher.start(str(SCRIPT), workers, *job),
        env=launcher.full_environment(),
        check=True,
        timeout=DEADLINE_S,
        stdout=subprocess.DEVNULL,
    )
    return [json.loads(line) for line in (directory / "costs.jsonl").read_text().splitlines()]


def measure(method: str, workers: int, megabytes: float, saves: int, scratch: Path) -> dict[str, float]:
    """Medians per gigabyte; the first save, which makes the memory, is left out of them and stands by itself."""
    directory = Path(tempfile.mkdtemp(dir=scratch))
    try:
        costs = run(method, workers, megabytes, saves, directory)
        written, copied = ([cost for cost in costs if cost["what"] == what] for what in ("save", "copy"))
        restored = run(method, workers, megabytes, 1, directory)[0]
    finally:
        shutil.rmtree(directory)

    def median(name: str, costs: list[dict[str, Any]] = written[1:]) -> float:
        return float(statistics.median(cost.get(name, 0.0) for cost in costs)) * 1000 / megabytes

    return {
        "first": written[0]["wall_s"] * 1000 / megabytes,
        "blocked": median("wall_s"),
        "plain copy": median("wall_s", copied),
        "on disk": median("wall_s") + median("then_s"),
        "CPU of ranks": median("cpu_s"),
        "CPU of writer": median("writer_cpu_s"),
        "restore": restored["wall_s"] * 1000 / megabytes,
        "CPU of restore": restored["cpu_s"] * 1000 / megabytes,
        "peak MB a rank": restored["peak_mb"],
        "of a save": max(cost["peak_mb"] for cost in written),
        "MB a node in buffers": max(cost.get("shared_mb", 0.0) for cost in written),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10, 300, 2000])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--saves", type=int, default=5, help="of each job, the first of them not counted")
    parser.add_argument("--methods", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="the disk to write to")
    args = parser.parse_args()
    header = ""
    for megabytes in args.megabytes:
        for workers in args.workers:
            for method in args.methods:
                found = measure(method, workers, megabytes, args.saves, args.scratch)
                if not header:
                    header = "| MB | workers | way | " + " | ".join(found) + " |"
                    print(header, "|---" * (3 + len(found)) + "|", sep="\n", flush=True)
                cells = " | ".join(f"{value:.3g}" for value in found.values())
                print(f"| {megabytes:g} | {workers} | {method} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
