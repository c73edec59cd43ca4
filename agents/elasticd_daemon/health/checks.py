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
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from elasticd_agent.system.gpus.nvml import NvmlClient, find_pynvml
from elasticd_agent.system.installation import import_path
from elasticd_agent.system.processes import procfs
from elasticd_agent.system.processes.helper_process import HelperCancelled, HelperError, HelperProcess, HelperTimeout
from elasticd_agent.system.waker import Waker
from elasticd_daemon import health
from elasticd_daemon.config.agent_settings import NodeSettings
from elasticd_daemon.health import gpu_checks, network_ports, plugins
from elasticd_daemon.health.directories import format_size
from elasticd_daemon.health.kubernetes_node import KubernetesNode
from elasticd_daemon.health.policy import HealthVerdict
from elasticd_daemon.health.result import CheckOutcome, CheckResult, GpuUsage, failed, passed, skipped

ALL_REDUCE_CHECK = "all-reduce"
ALL_REDUCE_TIMEOUT_S = 30.0
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
    within_s: float = ALL_REDUCE_TIMEOUT_S,
    import_s: float = IMPORT_TIMEOUT_S,
    stop: int | None = None,
) -> CheckResult:
    """Run an all-reduce over all slots of this node, as a job would: it shows a GPU or a link that is ill and says
    nothing.

    `devices`: CUDA_VISIBLE_DEVICES of each slot, none for CPUs. `within_s`: for the all-reduce; `import_s`: for torch
    before it. `stop`: a descriptor that is readable to give up.

    The result is skipped where nothing can be compared (one slot without a GPU), or where the interpreter has no torch.
    """
    if not devices and len(slots) < 2:
        return skipped(ALL_REDUCE_CHECK, "a single slot without a GPU has no peer")
    with TemporaryDirectory(prefix="elasticd-health-") as directory:
        request = {
            "slots": list(slots),
            "devices": list(devices),
            "backend": "nccl" if devices else "gloo",
            "directory": directory,
            "within_s": within_s,
            "sum": len(slots) * (len(slots) + 1) / 2,
        }
        return _run_all_reduce(python, request, environ, within_s + import_s + CLOSE_S, stop)


def _run_all_reduce(
    python: str, request: Mapping[str, Any], environ: Mapping[str, str], within_s: float, stop: int | None
) -> CheckResult:
    began = time.monotonic()
    env = {**environ, "OMP_NUM_THREADS": "1"}
    try:
        helper = HelperProcess([python, "-u", str(Path(health.__path__[0], "all_reduce_process.py"))], env=env, cwd="/")
    except OSError as error:
        return skipped(ALL_REDUCE_CHECK, f"{python} cannot be run: {error.strerror}")
    outcome: CheckOutcome = "failed"
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
    return CheckResult(ALL_REDUCE_CHECK, outcome, f"{why}; {left}" if left else why, time.monotonic() - began)


MAX_PARALLEL_CHECKS = 4
"""Plugins and directories checked at the same time: their cost is taken from a job that trains."""
NVML_TIMEOUT_S = 10.0
"""Without a persistent driver, finding the GPUs takes a second or two each."""
DIRECTORY_TIMEOUT_S = 5.0
MEMORY_CHECK = "memory"
MIN_FREE_MEMORY_SHARE = 0.05
MIN_FREE_MEMORY_BYTES = 1 << 30
"""The limit on a large machine; a worker that has imported torch takes a quarter of it."""


class NodeChecks:
    """All checks of this node, by its settings. A run takes the results of what must not run now
    from the run before.
    """

    def __init__(self, settings: NodeSettings, environ: Mapping[str, str], on_event: Callable[[], None]) -> None:
        """Prepare the checks. `on_event` is called from another thread when a run would find something new, such as an
        Xid.
        """
        self._settings = settings
        self._environ = environ
        self._devices = settings.devices(environ)  # those that jobs get, whatever appears later
        self._on_event = on_event
        self._nvml = NvmlClient(({"do": "events", "gpus": ()},), self._on_nvml_event)
        self._events: queue.SimpleQueue[CheckResult] = queue.SimpleQueue()
        self.gpu_usage: tuple[GpuUsage, ...] = ()
        self.time_limit_s = 0.0  #: that of the directories and plugins of the newest run
        self._most_links: dict[str, int] = {}
        self._ports: dict[str, Any] = {}
        self._kubernetes = KubernetesNode(settings.node)
        self._stuck: dict[str, tuple[int, int, str]] = {}
        self._stop = Waker()

    def stop(self) -> None:
        """End a run in progress soon; from any thread."""
        self._stop.wake()
        self._nvml.cancel_request()

    def update(self, settings: NodeSettings) -> None:
        self._settings = settings

    def close(self) -> None:
        self._nvml.close()
        self._stop.close()

    def run(self, idle: bool, max_gpus_seen: int) -> list[CheckResult]:
        """Except the all-reduce. `idle`: no job runs here."""
        of_kubernetes = self._kubernetes.check(self._settings.health)
        return [check_memory(idle), *self._check_gpus(max_gpus_seen), *of_kubernetes, *self._in_check_process()]

    def report_to_kubernetes(self, verdict: HealthVerdict) -> None:
        """Tell others of the verdict that follows from the results."""
        self._kubernetes.write_condition(self._settings.health, verdict)

    def all_reduce(self) -> CheckResult:
        slots = self._settings.slot_count(self._environ)
        devices = self._devices[:slots]
        return check_all_reduce(sys.executable, range(slots), devices, self._environ, stop=self._stop.fileno())

    def _check_gpus(self, max_gpus_seen: int) -> list[CheckResult]:
        devices, visible = self._devices, self._visible_gpus()
        expected = self._settings.health.gpus
        if expected is None:
            expected = max(max_gpus_seen, len(devices))
            if visible is not None:  # fewer may have been chosen than before, but not none of those that are named
                expected = len(devices) or (max_gpus_seen if self._environ["CUDA_VISIBLE_DEVICES"] else 0)
            if any(name.startswith("MIG-") for name in devices):
                expected = 1  # of how many GPUs these are parts only the driver knows
        if not expected and not devices:
            return [skipped(gpu_checks.PRESENCE_CHECK, "this machine has no GPUs")]
        now = len(self._settings.devices(self._environ))
        if len(devices) < min(expected, now):  # the driver came late: jobs would share GPUs, or CPUs be slots
            why = f"{now} GPUs found, but {len(devices)} at the agent's start: replace it (SIGUSR2)"
            return [failed(gpu_checks.PRESENCE_CHECK, why)]
        if not find_pynvml():
            if not devices:  # as without a driver: CPUs would be slots in place of the GPUs
                return [failed(gpu_checks.PRESENCE_CHECK, gpu_checks.missing_gpus_reason(0, expected))]
            why = f"{expected} GPUs, unchecked: pynvml is not installed (pip install 'elasticd[gpu]')"
            return [skipped(gpu_checks.PRESENCE_CHECK, why)]
        began = time.monotonic()
        answer = self._nvml.request({"do": "gpus"}, NVML_TIMEOUT_S)
        self.gpu_usage = gpu_checks.gpu_usage(answer, visible)
        return [
            *gpu_checks.gpu_results(answer, expected, visible, time.monotonic() - began, self._most_links),
            *self._take_xid_result(),
        ]

    def _visible_gpus(self) -> tuple[str, ...] | None:
        """The GPUs that the agent may use; None: all."""
        return self._devices if "CUDA_VISIBLE_DEVICES" in self._environ else None

    def _on_nvml_event(self, what: Mapping[str, Any]) -> None:
        result = gpu_checks.event_result(what, self._visible_gpus())
        if result is not None:
            self._events.put(result)
            self._on_event()

    def _take_xid_result(self) -> list[CheckResult]:
        failures: list[CheckResult] = []
        while not self._events.empty():
            failures.append(self._events.get())
        if not failures:
            return [CheckResult(gpu_checks.XID_CHECK, "passed", "none since the last check")]
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        return [CheckResult(gpu_checks.XID_CHECK, "failed", failures[0].why + more, certain=True)]

    def _in_check_process(self) -> list[CheckResult]:
        settings, health = self._settings, self._settings.health
        own = [path for path in (settings.state_dir, settings.log_dir) if path is not None]  # the agent makes them
        executables, results = plugins.find(health.plugins_dir)
        requested: dict[str, list[dict[str, Any]]] = {"directories": [], "ports": [], "plugins": []}
        requested["ports"].append({"check": network_ports.CHECK_NAME, "before": self._ports})
        for path, made in {**dict.fromkeys(health.directories, False), **dict.fromkeys(own, True)}.items():
            asked = {"check": f"disk {path}", "path": str(path), "free_min_bytes": health.disk_free_min_bytes}
            requested["directories"].append({**asked, "made": made})
        for path in executables:
            requested["plugins"].append({"check": plugins.check_name(path), "path": str(path)})
        for kind, ones in requested.items():
            hanging = {asked["check"]: why for asked in ones if (why := self._hang_reason(asked["check"]))}
            results += [failed(check, why) for check, why in hanging.items()]
            requested[kind] = [asked for asked in ones if asked["check"] not in hanging]
        names = [asked["check"] for ones in requested.values() for asked in ones]
        if names:
            results += self._run_check_process(requested, names)
        shared = {f"disk {path}": str(path) for path in health.directories if path not in own}
        results = [replace(result, directory=shared.get(result.check, result.directory)) for result in results]
        order = {name: index for index, name in enumerate(names)}
        return sorted(results, key=lambda result: order.get(result.check, len(order)))

    def _hang_reason(self, check: str) -> str:
        pid, started, why = self._stuck.get(check, (0, 0, ""))
        process = procfs.stat(pid) if pid else None
        if process is None or process.start_ticks != started or process.state == "Z":
            self._stuck.pop(check, None)
            return ""
        return f"{why}; it still hangs"

    def _run_check_process(self, requested: Mapping[str, Any], names: Sequence[str]) -> list[CheckResult]:
        settings, plugin_s = self._settings, float(self._settings.health.plugin_timeout_s)
        request = {
            **requested,
            "at_once": MAX_PARALLEL_CHECKS,
            "directory_s": DIRECTORY_TIMEOUT_S,
            "plugin_s": plugin_s,
            "environment": plugins.environment(settings.node, settings.slot_count(self._environ)),
        }
        turns = -(-len(names) // MAX_PARALLEL_CHECKS)
        within_s = turns * (max(DIRECTORY_TIMEOUT_S, plugin_s) + 1.0) + CLOSE_S
        self.time_limit_s = within_s
        deadline = time.monotonic() + within_s
        helper = HelperProcess(
            [sys.executable, "-S", "-m", "elasticd_daemon.health.check_process"],
            env={**self._environ, "PYTHONPATH": os.pathsep.join(import_path())},
            cwd="/",
        )
        results: dict[str, CheckResult] = {}
        try:
            helper.send(request, deadline)
            for message in helper.messages(deadline, cancel=self._stop.fileno()):
                if "result" in message:
                    result = CheckResult(**message["result"])
                    results[result.check] = result
                elif "ports" in message:
                    self._ports = message["ports"]
                elif "stuck" in message:
                    stuck = message["stuck"]
                    self._stuck[stuck["check"]] = (stuck["pid"], stuck["started"], results[stuck["check"]].why)
        except HelperError:
            pass  # the results received so far count
        finally:
            helper.close(grace_s=CLOSE_S)  # it ends with its input, after everything it started
        missing = "its process ended before this check"
        return [results.get(name) or skipped(name, missing) for name in names]


def check_memory(idle: bool, path: str = "/proc/meminfo") -> CheckResult:
    """Judged only while no job runs here: the memory of a job is not the node's fault."""
    pattern = rb"^(\w+): +(\d+) kB"
    sizes = {name: int(kib) << 10 for name, kib in re.findall(pattern, procfs.read(path), re.MULTILINE)}
    total, free = sizes.get(b"MemTotal"), sizes.get(b"MemAvailable")
    if total is None or free is None:
        return skipped(MEMORY_CHECK, f"{path} does not report the available memory")
    available = f"{format_size(free)} of {format_size(total)} available"
    if not idle:
        return skipped(MEMORY_CHECK, f"{available}; not judged while jobs run here")
    if free < min(MIN_FREE_MEMORY_BYTES, MIN_FREE_MEMORY_SHARE * total):
        return failed(MEMORY_CHECK, f"{available} although no job runs here: see which processes hold the rest")
    return passed(MEMORY_CHECK, available)
