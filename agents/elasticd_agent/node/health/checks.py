"""One run of all checks of this node: for the health monitor, and for `elasticd doctor`. It belongs to one thread.

Every check has a deadline. A check whose process hangs and cannot be killed is not started again while that process
lives: a dead mount would cost a process a minute.
"""

from __future__ import annotations

import os
import queue
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticd_agent.node.health import gpu_checks, plugins
from elasticd_agent.node.health.all_reduce import check_all_reduce
from elasticd_agent.node.health.directories import format_size
from elasticd_agent.node.health.result import CheckResult, failed, passed, skipped
from elasticd_agent.system import procfs
from elasticd_agent.system.helper_process import HelperError, HelperProcess
from elasticd_agent.system.installation import import_path
from elasticd_agent.system.nvml import NvmlClient, find_pynvml
from elasticd_agent.system.waker import Waker

MAX_PARALLEL = 4
"""Plugins and directories checked at the same time: their cost is taken from a job that trains."""
NVML_TIMEOUT_S = 10.0
"""Without a persistent driver, finding the GPUs takes a second or two each."""
DIRECTORY_TIMEOUT_S = 5.0
CLOSE_S = 2.0
MEMORY = "memory"
MIN_FREE_SHARE = 0.05
MIN_FREE_BYTES = 1 << 30
"""Of a large machine; a worker that has imported torch takes a quarter of it."""


@dataclass(frozen=True, slots=True)
class CheckTargets:
    node: str
    slots: int
    devices: tuple[str, ...]
    """CUDA_VISIBLE_DEVICES of each slot; () if slots are not GPUs."""
    own_directories: tuple[Path, ...]
    """The agent creates these if they are missing."""
    directories: tuple[Path, ...]
    disk_free_min_bytes: float
    plugins_dir: Path
    plugin_timeout_s: float
    visible_gpus: tuple[str, ...] | None = None
    """The GPUs that the agent may use; None: all."""
    expected_gpus: int | None = None
    """None: unknown."""
    python: str = sys.executable


class NodeChecks:
    def __init__(self, targets: CheckTargets, environ: Mapping[str, str], on_event: Callable[[], None]) -> None:
        """`on_event` is called from another thread when a run would find something new."""
        self._targets = targets
        self._environ = environ
        self._on_event = on_event
        self._nvml = NvmlClient("events", self._on_nvml_event)
        self._events: queue.SimpleQueue[CheckResult] = queue.SimpleQueue()
        self._stuck: dict[str, tuple[int, int, str]] = {}
        self._stop = Waker()

    def stop(self) -> None:
        """From any thread: a run in progress ends soon."""
        self._stop.wake()
        self._nvml.stop()

    def update(self, targets: CheckTargets) -> None:
        self._targets = targets

    def close(self) -> None:
        self._nvml.close()
        self._stop.close()

    def run(self, idle: bool, most_gpus: int) -> list[CheckResult]:
        """Except the all-reduce. `idle`: no job runs here. `most_gpus`: the most that were ever seen here."""
        return [check_memory(idle), *self._gpus(most_gpus), *self._directories_and_plugins()]

    def all_reduce(self) -> CheckResult:
        targets = self._targets
        slots, devices = range(targets.slots), targets.devices[: targets.slots]
        return check_all_reduce(targets.python, slots, devices, self._environ, stop=self._stop.fileno())

    # ---- GPUs

    def _gpus(self, most: int) -> list[CheckResult]:
        targets = self._targets
        expected = len(targets.devices) if targets.visible_gpus is not None else max(most, len(targets.devices))
        expected = targets.expected_gpus if targets.expected_gpus is not None else expected
        if not expected and not targets.devices:
            return [skipped(gpu_checks.PRESENT, "this machine has no GPUs")]
        if not find_pynvml():
            why = f"{expected} GPUs, unchecked: pynvml is not installed (pip install 'elasticd[gpu]')"
            return [skipped(gpu_checks.PRESENT, why)]
        began = time.monotonic()
        answer = self._nvml.request({"do": "gpus"}, NVML_TIMEOUT_S)
        return [
            *gpu_checks.gpu_results(answer, expected, targets.visible_gpus, time.monotonic() - began),
            *self._xid_result(),
        ]

    def _on_nvml_event(self, what: Mapping[str, Any]) -> None:
        result = gpu_checks.event_result(what, self._targets.visible_gpus)
        if result is not None:
            self._events.put(result)
            self._on_event()

    def _xid_result(self) -> list[CheckResult]:
        found: list[CheckResult] = []
        while not self._events.empty():
            found.append(self._events.get())
        if not found:
            return [CheckResult(gpu_checks.XIDS, "passed", "none since the last check")]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return [CheckResult(gpu_checks.XIDS, "failed", found[0].why + more, certain=True)]

    # ---- directories and plugins

    def _directories_and_plugins(self) -> list[CheckResult]:
        targets = self._targets
        found = plugins.find(targets.plugins_dir)
        results = [*found.refused]
        requested: dict[str, list[dict[str, Any]]] = {"directories": [], "plugins": []}
        for path, made in {
            **dict.fromkeys(targets.own_directories, True),
            **dict.fromkeys(targets.directories, False),
        }.items():
            one = {"check": f"disk {path}", "path": str(path), "free_min_bytes": targets.disk_free_min_bytes}
            requested["directories"].append({**one, "made": made})
        for path in found.run:
            requested["plugins"].append({"check": plugins.check_name(path), "path": str(path)})
        for kind, ones in requested.items():
            hanging = {one["check"]: why for one in ones if (why := self._hang_reason(one["check"]))}
            results += [failed(check, why) for check, why in hanging.items()]
            requested[kind] = [one for one in ones if one["check"] not in hanging]
        names = [one["check"] for ones in requested.values() for one in ones]
        if names:
            results += self._run_check_process(requested, names)
        order = {name: index for index, name in enumerate(names)}
        return sorted(results, key=lambda result: order.get(result.check, len(order)))

    def _hang_reason(self, check: str) -> str:
        pid, started, why = self._stuck.get(check, (0, 0, ""))
        process = procfs.stat(pid) if pid else None
        if process is None or process.started != started or process.state == "Z":
            self._stuck.pop(check, None)
            return ""
        return f"{why}; it still hangs"

    def _run_check_process(self, requested: Mapping[str, Any], names: Sequence[str]) -> list[CheckResult]:
        targets = self._targets
        request = {
            **requested,
            "at_once": MAX_PARALLEL,
            "directory_s": DIRECTORY_TIMEOUT_S,
            "plugin_s": targets.plugin_timeout_s,
            "environment": plugins.environment(targets.node, targets.slots),
        }
        turns = -(-len(names) // MAX_PARALLEL)
        within_s = turns * (max(DIRECTORY_TIMEOUT_S, targets.plugin_timeout_s) + 1.0) + CLOSE_S
        deadline = time.monotonic() + within_s
        helper = HelperProcess(
            [sys.executable, "-S", "-m", "elasticd_agent.node.health.check_process"],
            env={**self._environ, "PYTHONPATH": os.pathsep.join(import_path())},
            cwd="/",
        )
        found: dict[str, CheckResult] = {}
        try:
            helper.send(request, deadline)
            for message in helper.messages(deadline, cancel=self._stop.fileno()):
                if "result" in message:
                    result = CheckResult(**message["result"])
                    found[result.check] = result
                elif "stuck" in message:
                    stuck = message["stuck"]
                    self._stuck[stuck["check"]] = (stuck["pid"], stuck["started"], found[stuck["check"]].why)
        except HelperError:
            pass  # the results received so far count
        finally:
            helper.close(grace_s=CLOSE_S)  # it ends with its input, after everything it started
        missing = "its process ended before this check"
        return [found.get(name) or skipped(name, missing) for name in names]


def check_memory(idle: bool, path: str = "/proc/meminfo") -> CheckResult:
    """Judged only while no job runs here: the memory of a job is not the node's fault."""
    pattern = rb"^(\w+): +(\d+) kB"
    found = {name: int(kib) << 10 for name, kib in re.findall(pattern, procfs.read(path), re.MULTILINE)}
    total, free = found.get(b"MemTotal"), found.get(b"MemAvailable")
    if total is None or free is None:
        return skipped(MEMORY, f"{path} does not report the available memory")
    available = f"{format_size(free)} of {format_size(total)} available"
    if not idle:
        return skipped(MEMORY, f"{available}; not judged while jobs run here")
    if free < min(MIN_FREE_BYTES, MIN_FREE_SHARE * total):
        return failed(MEMORY, f"{available} although no job runs here: see which processes hold the rest")
    return passed(MEMORY, available)
