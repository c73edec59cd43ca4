"""A node to check: its directories, plugins and GPUs are the test's own."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest
from msgspec.structs import replace

from elasticd_agent.config.quantities import Size
from elasticd_daemon.config.agent_settings import HealthSettings, NodeSettings
from elasticd_daemon.health.checks import NodeChecks
from elasticd_daemon.health.result import CheckResult

PATIENCE_S = 30.0


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.01)
    return found


class TestedSettings(NodeSettings, frozen=True, kw_only=True):
    """`gpus_of_slots`: the GPU of each slot, whatever this machine has."""

    gpus_of_slots: tuple[str, ...] = ()

    def devices(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        return self.gpus_of_slots


class Node:
    """What is looked at; `look` looks."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.directory, self.plugins = tmp / "state", tmp / "health.d"
        for path in (self.directory, self.plugins):
            path.mkdir(mode=0o755)
        health = HealthSettings(disk_free_min_bytes=Size(1), plugins_dir=self.plugins)
        self.settings = TestedSettings(node="node-1", slots=2, state_dir=self.directory, health=health)
        self.environ: dict[str, str] = {}
        self.received: list[None] = []
        self._checks: list[NodeChecks] = []

    def plugin(self, name: str, script: str, mode: int = 0o755) -> Path:
        path = self.plugins / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(mode)
        return path

    def with_settings(self, **settings: Any) -> Node:
        self.settings = replace(self.settings, **settings)
        return self

    def with_health(self, **health: Any) -> Node:
        return self.with_settings(health=replace(self.settings.health, **health))

    def checks(self) -> NodeChecks:
        if not self._checks:
            self._checks.append(
                NodeChecks(self.settings, {**os.environ, **self.environ}, lambda: self.received.append(None))
            )
        return self._checks[0]

    def run(self, most_gpus: int = 0) -> dict[str, CheckResult]:
        return {reading.check: reading for reading in self.checks().run(True, most_gpus)}

    def close(self) -> None:
        for checks in self._checks:
            checks.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


class Says(Protocol):
    def __call__(self, *gpus: list[int] | None, broken: str = "", facts: dict[str, Any] | None = None) -> None: ...


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """Makes the fake NVML say so from now on. Two GPUs at first."""
    library = tmp_path / "library"
    library.mkdir()
    shutil.copy(Path(__file__).parents[2] / "system" / "nvml" / "pynvml.py", library)
    monkeypatch.syspath_prepend(str(library))
    monkeypatch.setenv("FAKE_NVML", str(tmp_path))

    def says(*gpus: list[int] | None, broken: str = "", facts: dict[str, Any] | None = None) -> None:
        new = tmp_path / "new"
        new.write_text(json.dumps({"gpus": gpus, "broken": broken, "facts": facts or {}}))
        new.rename(tmp_path / "gpus.json")

    says([], [])
    return says
