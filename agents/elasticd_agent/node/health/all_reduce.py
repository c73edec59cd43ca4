"""The quick all-reduce before a node joins, from the daemon's side: start it, wait no longer than told, end it.

It shows what no single check does: that every slot's device, its memory and the ways between them work. It is asked
only while no job runs here, since it would take the GPUs' memory and time from it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from elasticd_agent.node.health.result import CheckResult, failed, skipped

CHECK = "all-reduce"
TIMEOUT_S = 30.0
"""Four NCCL ranks on one machine need 2 to 5 s, eight gloo ranks on two busy cores 3 s."""
IMPORT_TIMEOUT_S = 60.0
"""torch from a cold network file system; at most."""
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
    """`devices`: what CUDA_VISIBLE_DEVICES is for each slot, none for CPUs. `stop`: an fd; when readable, give up."""
    if not devices and len(slots) < 2:
        return skipped(CHECK, "one slot without a GPU has nobody to add up with")
    with TemporaryDirectory(prefix="elasticd-health-") as directory:
        return _run(python, slots, devices, environ, directory, within_s, import_s, stop)


def _run(
    python: str,
    slots: Sequence[int],
    devices: Sequence[str],
    environ: Mapping[str, str],
    directory: str,
    within_s: float,
    import_s: float,
    stop: int | None,
) -> CheckResult:
    world = len(slots)
    asked = {
        "slots": list(slots),
        "devices": list(devices),
        "backend": "nccl" if devices else "gloo",
        "directory": directory,
        "within_s": within_s,
        "sum": world * (world + 1) / 2,
    }
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            [python, "-u", str(Path(__file__).with_name("all_reduce_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environ, "OMP_NUM_THREADS": "1"},
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        return skipped(CHECK, f"{python} cannot be run: {error.strerror}")
    try:
        line = _line(process, json.dumps(asked).encode() + b"\n", within_s + import_s + CLOSE_S, stop)
    finally:
        left = _end(process)
    took_s = time.monotonic() - began
    if line is None:
        return failed(CHECK, f"it was not over within {within_s + import_s + CLOSE_S:g} s{left}", took_s)
    try:
        found = json.loads(line)
        return CheckResult(CHECK, found["outcome"], f"{found['why']}{left}", took_s)
    except (ValueError, KeyError, TypeError):
        said = f"exit code {process.returncode}" if process.returncode is not None else "no answer"
        return failed(CHECK, f"{python} ended in the middle of it ({said}){left}", took_s)


def _line(process: subprocess.Popen[bytes], asked: bytes, within_s: float, stop: int | None) -> bytes | None:
    """The first line it writes, "" if it ends before, None if it takes too long or it is asked to stop."""
    assert process.stdin is not None and process.stdout is not None
    until = time.monotonic() + within_s
    watched = [process.stdout.fileno(), *([stop] if stop is not None else [])]
    said = b""
    try:
        process.stdin.write(asked)
        process.stdin.flush()
    except OSError:
        return b""
    while b"\n" not in said:
        ready = select.select(watched, [], [], max(0.0, until - time.monotonic()))[0]
        if watched[0] not in ready:
            return None
        data = os.read(watched[0], 4096)
        if not data:
            break
        said += data
    return said.partition(b"\n")[0]


def _end(process: subprocess.Popen[bytes]) -> str:
    """Its whole session: the slots' processes are in it. Returns what to say of one that does not die."""
    assert process.stdin is not None and process.stdout is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    for stream in (process.stdin, process.stdout):
        try:
            stream.close()
        except OSError:
            pass
    try:
        process.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        return f"; process {process.pid} does not die"
    return ""
