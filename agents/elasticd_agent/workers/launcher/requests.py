"""Composes requests to the owner: command lines, environments, and the start-up hook's configuration. Pure."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from elasticd_agent.model.job import JobSpec, Mode
from elasticd_agent.system.installation import library_file, program
from elasticd_agent.workers.launcher.preload import Preload

LAUNCHER_FILES = ("template", "tcp_store", "hidden_modules", "debug_hooks")
LIBRARY = (
    "elasticd.errors",
    "elasticd.heartbeat.exit_report",
    "elasticd.heartbeat.record",
    "elasticd.heartbeat.collectives",
    "elasticd.heartbeat.optimizer_hook",
    "elasticd.heartbeat.thread",
)
"""Modules of the library that every worker loads by path, each after those that it imports."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker to start; `env` is its difference from the job's base environment."""

    env: dict[str, str]
    stdout: str | None
    stderr: str | None
    heartbeat: str


class LaunchRequests:
    """Composes one job's requests."""

    def __init__(self, spec: JobSpec, base_env: dict[str, str], preload: Preload) -> None:
        self._spec, self._preload = spec, preload
        self._base_env = {**base_env, "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(spec.signals)}

    def template(self) -> dict[str, Any]:
        """The fields of "template"."""
        spec = self._spec
        module = spec.mode is Mode.MODULE
        launch = self._launch_config(
            mode="template",
            preload=self._preload.modules,
            required=self._preload.required,
            script_dir=str(spec.cwd if module else (spec.cwd / spec.entrypoint).resolve().parent),
        )
        env = {**self._base_env, "PYTHONPATH": self._hooked_path()}
        return {"argv": self._argv(0), "env": env, "cwd": str(spec.cwd), "launch": launch}

    def cold(self, workers: tuple[WorkerSpec, ...], *, with_store: bool) -> dict[str, Any]:
        """The fields of "exec", without the group and its store's address."""
        spec, hook = self._spec, {}
        if spec.mode is not Mode.EXEC:
            hook = {"PYTHONPATH": self._hooked_path(), "ELASTICD_LAUNCH": json.dumps(self._launch_config(mode="cold"))}
        return {
            "cwd": str(spec.cwd),
            "env": self._base_env,
            "store": {"argv": [spec.python, "-u", program("tcp_store")]} if with_store else None,
            "workers": [
                {"argv": self._argv(rank), "env": {**hook, **w.env}, "stdout": w.stdout, "stderr": w.stderr}
                for rank, w in enumerate(workers)
            ],
        }

    def _argv(self, local_rank: int) -> list[str]:
        spec = self._spec
        args = [arg.replace("${local_rank}", str(local_rank)) for arg in spec.args]
        if spec.mode is Mode.EXEC:
            return [spec.entrypoint, *args]
        return [spec.python, "-u", *(["-m"] if spec.mode is Mode.MODULE else []), spec.entrypoint, *args]

    def _launch_config(self, **launch: Any) -> dict[str, Any]:
        """The start-up hook's configuration; `agent` and its descendants may trace the workers."""
        files = {name: program(name) for name in LAUNCHER_FILES}
        ours = {"library": {name: library_file(name) for name in LIBRARY}, "agent": os.getpid()}
        return {**files, **ours, "pythonpath": self._base_env.get("PYTHONPATH"), **launch}

    def _hooked_path(self) -> str:
        """A PYTHONPATH on which the interpreter finds our start-up hook first."""
        return os.pathsep.join(filter(None, [program("start_up_hook"), self._base_env.get("PYTHONPATH")]))
