"""Everything there is to look at on this node, once: for the daemon's thread, and for `elasticd doctor`.

It belongs to one thread, waits for each thing no longer than a deadline, and remembers only what hangs: what does not
answer and cannot be killed is not asked again as long as it lives, or a dead mount would cost a process a minute.
"""

from __future__ import annotations

import os
import queue
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticd_agent.node.health import all_reduce as reducing
from elasticd_agent.node.health import gpu_checks as gpus
from elasticd_agent.node.health import host_memory as memory
from elasticd_agent.node.health import plugins
from elasticd_agent.node.health.result import CheckResult, failed, skipped
from elasticd_agent.system import procfs
from elasticd_agent.system.helper_process import HelperError, HelperProcess
from elasticd_agent.system.installation import import_path
from elasticd_agent.system.nvml import NvmlClient, find_pynvml
from elasticd_agent.system.waker import Waker

MAX_PARALLEL = 4
"""Plugins and directories looked at side by side: what they cost is taken from a job that trains."""
NVML_TIMEOUT_S = 10.0
"""Where the driver does not stay loaded, finding the GPUs takes a second or two each."""
DIRECTORY_TIMEOUT_S = 5.0
CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class CheckTargets:
    """What is looked at. `own`: directories that the daemon makes where they are not there yet.

    `devices`: what CUDA_VISIBLE_DEVICES is for each slot, () where slots are no GPUs; `chosen`: the GPUs that the
    daemon may use, None for all; `gpus`: how many there should be, None if nobody says.
    """

    node: str
    slots: int
    devices: tuple[str, ...]
    own_directories: tuple[Path, ...]
    directories: tuple[Path, ...]
    disk_free_min_bytes: float
    plugins_dir: Path
    plugin_timeout_s: float
    visible_gpus: tuple[str, ...] | None = None
    expected_gpus: int | None = None
    python: str = sys.executable


class NodeChecks:
    """`look` and `close` belong to one thread. `heard` is called from another one: a look would find something now."""

    def __init__(self, places: CheckTargets, environ: Mapping[str, str], heard: Callable[[], None]) -> None:
        self._targets, self._environ, self._on_event = places, environ, heard
        self._nvml = NvmlClient("events", self._on_nvml_event)
        self._events: queue.SimpleQueue[CheckResult] = queue.SimpleQueue()
        self._stuck: dict[str, tuple[int, int, str]] = {}
        self._stop = Waker()

    def stop(self) -> None:
        """From any thread: a look that is under way ends soon."""
        self._stop.wake()
        self._nvml.stop()

    def update(self, places: CheckTargets) -> None:
        """Look at these from now on. Belongs to the thread that looks."""
        self._targets = places

    def close(self) -> None:
        self._nvml.close()
        self._stop.close()

    def run(self, idle: bool, most_gpus: int) -> list[CheckResult]:
        """All but the all-reduce. `idle`: no job runs here. `most_gpus`: as many were seen here once."""
        return [memory.check_memory(idle), *self._gpus(most_gpus), *self._directories_and_plugins()]

    def all_reduce(self) -> CheckResult:
        places = self._targets
        return reducing.check_all_reduce(
            places.python, range(places.slots), places.devices[: places.slots], self._environ, stop=self._stop.fileno()
        )

    # ---- GPUs

    def _gpus(self, most: int) -> list[CheckResult]:
        places = self._targets
        expected = len(places.devices) if places.visible_gpus is not None else max(most, len(places.devices))
        expected = places.expected_gpus if places.expected_gpus is not None else expected
        if not expected and not places.devices:
            return [skipped(gpus.PRESENT, "this machine has no GPUs")]
        if not find_pynvml():
            why = f"{expected} GPUs, and nobody looks after them: pynvml is not installed (pip install 'elasticd[gpu]')"
            return [skipped(gpus.PRESENT, why)]
        began = time.monotonic()
        said = self._nvml.request({"do": "gpus"}, NVML_TIMEOUT_S)
        return [
            *gpus.gpu_results(said, expected, places.visible_gpus, time.monotonic() - began),
            *self._xid_result(),
        ]

    def _on_nvml_event(self, what: Mapping[str, Any]) -> None:
        reading = gpus.event_result(what, self._targets.visible_gpus)
        if reading is not None:
            self._events.put(reading)
            self._on_event()

    def _xid_result(self) -> list[CheckResult]:
        found: list[CheckResult] = []
        while not self._events.empty():
            found.append(self._events.get())
        if not found:
            return [CheckResult(gpus.XIDS, "good", "none since the last look")]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return [CheckResult(gpus.XIDS, "bad", found[0].why + more, certain=True)]

    # ---- directories and plugins

    def _directories_and_plugins(self) -> list[CheckResult]:
        places = self._targets
        found = plugins.find(places.plugins_dir)
        readings = [*found.refused]
        asked: dict[str, list[dict[str, Any]]] = {"directories": [], "plugins": []}
        for path, made in {
            **dict.fromkeys(places.own_directories, True),
            **dict.fromkeys(places.directories, False),
        }.items():
            one = {"check": f"disk {path}", "path": str(path), "free_min_bytes": places.disk_free_min_bytes}
            asked["directories"].append({**one, "made": made})
        for path in found.run:
            asked["plugins"].append({"check": plugins.check_name(path), "path": str(path)})
        for kind, ones in asked.items():
            hanging = {one["check"]: why for one in ones if (why := self._hang_reason(one["check"]))}
            readings += [failed(check, why) for check, why in hanging.items()]
            asked[kind] = [one for one in ones if one["check"] not in hanging]
        names = [one["check"] for ones in asked.values() for one in ones]
        if names:
            readings += self._run_check_process(asked, names)
        order = {name: index for index, name in enumerate(names)}
        return sorted(readings, key=lambda reading: order.get(reading.check, len(order)))

    def _hang_reason(self, check: str) -> str:
        pid, started, why = self._stuck.get(check, (0, 0, ""))
        process = procfs.stat(pid) if pid else None
        if process is None or process.started != started or process.state == "Z":
            self._stuck.pop(check, None)
            return ""
        return f"{why}; still so"

    def _run_check_process(self, asked: Mapping[str, Any], names: Sequence[str]) -> list[CheckResult]:
        places = self._targets
        request = {
            **asked,
            "at_once": MAX_PARALLEL,
            "directory_s": DIRECTORY_TIMEOUT_S,
            "plugin_s": places.plugin_timeout_s,
            "environment": plugins.environment(places.node, places.slots),
        }
        turns = -(-len(names) // MAX_PARALLEL)
        within_s = turns * (max(DIRECTORY_TIMEOUT_S, places.plugin_timeout_s) + 1.0) + CLOSE_S
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
                if "reading" in message:
                    reading = CheckResult(**message["reading"])
                    found[reading.check] = reading
                elif "stuck" in message:
                    stuck = message["stuck"]
                    self._stuck[stuck["check"]] = (stuck["pid"], stuck["started"], found[stuck["check"]].why)
        except HelperError:
            pass  # the results received so far count
        finally:
            helper.close(grace_s=CLOSE_S)  # it ends with its input, and ends first what it has started
        missing = "the process that looks at directories and plugins did not get to it"
        return [found.get(name) or skipped(name, missing) for name in names]
