"""What only a device can tell, measured in one go: 23 checks, each with an expectation, into gpu-day/report.md.

    python benchmarks/gpu_day.py [--on cuda|fake] [--seconds 600] [--again]

Each check is a process of its own with a limit; one that fails or hangs costs only itself. A call stops before a check
that could take longer than `--seconds` in all; the next call continues with it (results.json keeps what is known).
`--on fake` runs everything on the processor and gloo: it shows that the checks work, and nothing about GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticd_agent.system.python_packages import installed_version

CHECKS_SCRIPT = Path(__file__).parent / "scripts" / "gpu_checks.py"


@dataclass(frozen=True)
class Check:
    name: str
    expected: str
    limit_s: int
    command: tuple[str, ...] = ()
    """Default: the function of this name in scripts/gpu_checks.py."""
    nccl2: bool = False
    """Of torch's second class for NCCL, where it has one: a check whose name has this in addition."""


FAKE_LIMIT_S = 240
"""Of each check without a GPU, so that one call is enough for all of them."""
GPU_TESTS = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-k")
DONORS = (sys.executable, "-m", "benchmarks.donors", "--gpu", "--kills", "20")
CHECKS = (
    Check("facts", "schedstat and wchan are readable, persistence mode is on", 30),
    Check("preloads", "NVML open after is_available, closed after nvmlShutdown, CUDA works in a fork", 90),
    Check("contexts", "0.2 to 0.5 s and 250 to 500 MB for one; 8 at once below 3 s", 120),
    Check("launches", "blocked after about 1,000 launches, with a whole core", 60),
    Check("waits", "item() and backward leave the GIL free", 60),
    Check("hang", "verdict within the limit, on rank 1", 300, (*GPU_TESTS, "does_not_come and not nccl2")),
    Check("hang-nccl2", "the same", 300, (*GPU_TESTS, "does_not_come and nccl2"), nccl2=True),
    Check("recorder", "enqueued above completed while a rank is missing, below 1 ms", 90),
    Check("recorder-nccl2", "the same", 90, nccl2=True),
    Check("long_kernel", "8 s under item() on all ranks: no kill", 120),
    Check("pipe", "a dump within 6 s, for it names frames; none while the GIL is held", 90),
    Check("killed", "reaped, NVML's process gone, memory free: within 30 s", 200),
    Check("tests", "make test-gpu passes", 480, (*GPU_TESTS, "not does_not_come and not nccl2")),
    Check("tests-nccl2", "the same", 480, (*GPU_TESTS, "not does_not_come and nccl2"), nccl2=True),
    Check("state", "10 GB to the processor and back at the speed of the bus", 240),
    Check("recovery", "kill to next step, by part: below 12 s with a small state", 400),
    Check("abort", "a wait ends within a second of the abort, and the next group works", 240),
    Check("in_place", "every step is equal, bit for bit, and both survivors stayed", 300),
    Check("compiled", "the survivor has compiled as many frames as before", 300),
    Check("change", "kill to next step of a survivor, by part: below 2 s", 200),
    Check("donors", "no step differs after 20 kills", 240, DONORS),
    Check("nvml", "readable without root", 30),
    Check("suspend", "torch offers suspend and resume of a communicator", 60),
)


def limit_s(check: Check, device: str) -> int:
    return check.limit_s if device == "cuda" else min(check.limit_s, FAKE_LIMIT_S)


def run(number: int, check: Check, device: str, log: Path) -> dict[str, Any]:
    """What the check printed as its last line, in JSON, or how it ended."""
    command = check.command or (sys.executable, str(CHECKS_SCRIPT), check.name.removesuffix("-nccl2"), device)
    env = os.environ | {"ELASTICD_TEST_DEVICE": "cpu" if device == "fake" else "cuda"}
    env |= {"TORCH_DIST_USE_NCCL2": str(int(check.nccl2))}
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(limit_s(check, device))
        except subprocess.TimeoutExpired:
            code = None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    seconds = round(time.monotonic() - began, 1)
    *_, last = ["", *log.read_text(errors="replace").strip().splitlines()]
    result = {"number": number, "name": check.name, "expected": check.expected, "device": device, "seconds": seconds}
    if code is None:
        return result | {"ok": False, "measured": f"no end within {limit_s(check, device)} s"}
    if check.command:
        return result | {"ok": code == 0, "measured": last}
    try:
        return result | dict(json.loads(last))
    except (ValueError, TypeError):
        return result | {"ok": False, "measured": f"exit code {code}: {last[:200]}"}


def report(results: dict[str, dict[str, Any]]) -> str:
    lines = ["# The day with a GPU", "", "| | check | on | expected | measured | as expected | s |", "|" + "---|" * 7]
    for one in sorted(results.values(), key=lambda one: int(one["number"])):
        ok = {True: "yes", False: "**no**"}.get(one["ok"], "not decided here")
        measured = str(one["measured"]).replace("|", "/")
        cells = (one["number"], one["name"], one["device"], one["expected"], measured, ok, one["seconds"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=("cuda", "fake"), default="cuda")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--again", action="store_true", help="also what an earlier call has measured")
    parser.add_argument("--only", nargs="*", choices=[check.name for check in CHECKS])
    parser.add_argument("--directory", type=Path, default=Path("gpu-day"))
    options = parser.parse_args()
    options.directory.mkdir(exist_ok=True)
    kept = options.directory / "results.json"
    results = json.loads(kept.read_text()) if kept.exists() and not options.again else {}
    results = {name: one for name, one in results.items() if one["device"] == options.on}
    began = time.monotonic()
    classes = 2 if (installed_version("torch", sys.executable, {}) or (0, 0)) >= (2, 14) else 1
    for number, check in enumerate(CHECKS, 1):
        if check.nccl2 and classes == 1:
            continue
        if check.name in results or (options.only and check.name not in options.only):
            continue
        may_take_s = limit_s(check, options.on)
        if time.monotonic() - began + may_take_s > options.seconds and number > 1:
            print(f"{check.name} may take {may_take_s} s: call again to continue")
            return 75
        results[check.name] = run(number, check, options.on, options.directory / f"{check.name}.log")
        part = kept.with_suffix(".part")
        part.write_text(json.dumps(results, indent=1))
        part.replace(kept)
        (options.directory / "report.md").write_text(report(results))
        print(f"{number} {check.name}: {results[check.name]['measured']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
