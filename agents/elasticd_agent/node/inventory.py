"""The static part of this node's status. It imports no torch."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from elasticd_agent.config.agent_settings import NodeSettings
from elasticd_agent.model.version import version
from elasticd_agent.node.records import NodeStatus
from elasticd_agent.system import procfs
from elasticd_agent.system.devices import cpu_count


def inventory(settings: NodeSettings, incarnation: str, environ: Mapping[str, str]) -> NodeStatus:
    return NodeStatus(
        node=settings.node,
        incarnation=incarnation,
        slots=settings.slot_count(environ),
        gpus=settings.devices(environ),
        cpus=cpu_count(),
        memory_bytes=_memory(),
        elasticd=version(),
        python=platform.python_version(),
        torch=_torch(),
        driver=_driver(),
        labels=settings.labels,
    )


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 0


def _torch() -> str:
    """The version in the agent's environment; a job may use another one."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    found = re.search(rb"Kernel Module(?: for \S+)?\s+([0-9.]+)", procfs.read(str(path)))
    return found[1].decode() if found else ""
