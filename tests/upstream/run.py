"""Runs PyTorch's own launcher and agent tests on elasticd: `python -m tests.upstream.run FOLDER [WORD…]`.

Each test runs in a process of its own. One that fails is run again with torch's own launcher and handlers: if it fails
there as well, it does not fit the installed torch, and says nothing about elasticd. WORDs select tests by name.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    "launcher/test_run",
    "launcher/api_test",
    "elastic/agent/server/test/local_elastic_agent_test",
    "elastic/agent/server/test/api_test",
    "elastic/timer/file_based_local_timer_test",
)
DEADLINE_S = 240
PASSED, SKIPPED, FAILED, OTHER, LEFT_OUT = "passed", "skipped by itself", "FAILED", "fails with torch's own", "left out"
NOT_OURS = {
    "test_launch_elastic_agent_raise_exception": "replaces torchrun's agent by a mock",
    "test_launch_elastic_worker_raise_exception": "counts the events inside torchrun's process",
    "test_launch_shutdown": "replaces torchrun's agent by a mock",
    "test_nproc_gpu_launch_configurations": "pretends to have GPUs inside torchrun's process",
    "test_is_torchelastic_launched_with_logs_spec_defined": "loads a plug-in for logs, which elasticd run refuses",
}
"""Of test_run: what cannot be asked of another launcher."""


def tests(folder: Path, module: str) -> Iterator[str]:
    """CLASS.TEST; of variants that differ in the backend only, the first."""
    source = ast.parse((folder / f"{module}.py").read_text())
    groups = [node for node in ast.walk(source) if isinstance(node, ast.ClassDef)]  # some are below an `if`
    for group in groups:
        seen = set()
        for part in group.body:
            if isinstance(part, ast.FunctionDef) and part.name.startswith("test"):
                name = re.sub("_(c10d|etcd|etcd_v2)$", "", part.name)
                if name not in seen:
                    seen.add(name)
                    yield f"{group.name}.{part.name}"


def run(folder: Path, module: str, test: str, side: str) -> tuple[int | None, str]:
    """The exit code, None after the deadline, and the output."""
    command = [sys.executable, "-m", "tests.upstream.one", str(folder), module, test, side]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, f"not ended within {DEADLINE_S} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what a test has left
        process.wait()


def verdict(folder: Path, module: str, test: str) -> tuple[str, str]:
    name = test.partition(".")[2]
    if module == "launcher/test_run" and name in NOT_OURS:
        return LEFT_OUT, NOT_OURS[name]
    code, output = run(folder, module, test, "elasticd")
    if code in (0, 77):
        return (PASSED if code == 0 else SKIPPED), ""
    with_torch, why = run(folder, module, test, "torch")
    if with_torch != 0:
        return OTHER, next((line for line in reversed(why.splitlines()) if "Error" in line or "not ended" in line), "")
    return FAILED, output


def main(folder: Path, words: list[str]) -> int:
    import torch

    print(f"{folder}: PyTorch's tests, with torch {torch.__version__}", flush=True)
    counts: Counter[str] = Counter()
    for module in MODULES:
        for test in tests(folder, module):
            if words and not any(word in f"{module} {test}" for word in words):
                continue
            began = time.monotonic()
            what, more = verdict(folder, module, test)
            counts[what] += 1
            print(f"{what:24} {time.monotonic() - began:6.1f} s  {module.rpartition('/')[2]} {test}", flush=True)
            if more:
                print("    " + more[-6000:].replace("\n", "\n    "), flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.most_common()))
    return int(counts[FAILED] > 0 or not counts[PASSED])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
