"""The all-reduce before a node registers: starts its process and waits for the result with a deadline.

It shows that every slot's device, its memory and the links between them work. It runs only while no job runs here,
since it takes memory and time of the GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from elasticd_agent.system.processes.helper_process import HelperCancelled, HelperError, HelperProcess, HelperTimeout
from elasticd_daemon import health
from elasticd_daemon.health.result import CheckResult, Outcome, skipped

CHECK = "all-reduce"
TIMEOUT_S = 30.0
"""Four NCCL ranks on one machine need 2 to 5 s, eight gloo ranks on two busy cores 3 s."""
IMPORT_TIMEOUT_S = 60.0
"""At most, for torch from a cold network file system."""
CLOSE_S = 2.0


def check_all_reduce(
    python: str,
    slots: Sequence[int],
    devices: Sequence[str],
    environ: Mapping[str, str],
    *,
    within_s: float = TIMEOUT_S,
    import_s: float = IMPORT_TIMEOUT_S,
    stop: int | None = None,
) -> CheckResult:
    """`devices`: CUDA_VISIBLE_DEVICES of each slot, none for CPUs. `stop`: an fd that is readable to give up."""
    if not devices and len(slots) < 2:
        return skipped(CHECK, "a single slot without a GPU has no peer")
    with TemporaryDirectory(prefix="elasticd-health-") as directory:
        request = {
            "slots": list(slots),
            "devices": list(devices),
            "backend": "nccl" if devices else "gloo",
            "directory": directory,
            "within_s": within_s,
            "sum": len(slots) * (len(slots) + 1) / 2,
        }
        return _run(python, request, environ, within_s + import_s + CLOSE_S, stop)


def _run(
    python: str, request: Mapping[str, Any], environ: Mapping[str, str], within_s: float, stop: int | None
) -> CheckResult:
    began = time.monotonic()
    env = {**environ, "OMP_NUM_THREADS": "1"}
    try:
        helper = HelperProcess([python, "-u", str(Path(health.__path__[0], "all_reduce_process.py"))], env=env, cwd="/")
    except OSError as error:
        return skipped(CHECK, f"{python} cannot be run: {error.strerror}")
    outcome: Outcome = "failed"
    try:
        helper.send(request, began + within_s)
        answer = helper.receive(began + within_s, cancel=stop)
        outcome, why = answer["outcome"], answer["why"]
    except (HelperTimeout, HelperCancelled):
        why = f"no result within {within_s:g} s"
    except (HelperError, KeyError) as error:
        why = f"{python} ended before the result ({error})"
    finally:
        left = helper.close()
    return CheckResult(CHECK, outcome, f"{why}; {left}" if left else why, time.monotonic() - began)
