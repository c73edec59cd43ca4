"""InfiniBand and RoCE ports, from /sys/class/infiniband. Reading asks the adapter's firmware: only in a child process.

A port that was never active here may have no cable, so only one that was is missed. A link that went down and came back
fails one run; the policy makes the node unhealthy when that repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from elasticd_daemon.health.result import CheckResult, failed, passed, skipped

CHECK_NAME = "network ports"
INFINIBAND_SYSFS = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Port:
    state: str  #: the kernel's word: "ACTIVE", "DOWN", "INIT", "ARMED"; "" if it is gone
    link_downed: int = 0  #: the times that its link went down since the driver was loaded; -1: unknown
    was_active: bool = False


def read_ports(root: Path = INFINIBAND_SYSFS) -> dict[str, dict[str, Any]]:
    """The ports by name, as "mlx5_0 port 1"; one without a readable state is left out."""
    ports = {}
    for path in sorted(root.glob("*/ports/*")):
        try:
            state = (path / "state").read_text(errors="replace").rpartition(":")[2].strip()  # "4: ACTIVE"
        except OSError:
            continue
        try:
            downed = int((path / "counters" / "link_downed").read_bytes())
        except (OSError, ValueError):
            downed = -1
        ports[f"{path.parent.parent.name} port {path.name}"] = asdict(Port(state, downed, state == "ACTIVE"))
    return ports


def judge_ports(
    before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> tuple[CheckResult, dict[str, dict[str, Any]]]:
    """The result, and what the next run gets as `before`."""
    then = {name: Port(**port) for name, port in before.items()}
    ports = {name: Port(**port) for name, port in now.items()}
    whys = []
    for name, old in then.items():
        port = ports.setdefault(name, Port("", old.link_downed))
        ports[name] = port = replace(port, was_active=port.was_active or old.was_active)
        if old.was_active and port.state != "ACTIVE":
            whys.append(f"{name} is {port.state or 'gone'} and was ACTIVE")
        elif 0 <= old.link_downed < port.link_downed:
            whys.append(f"{name}'s link went down since the last check, {port.link_downed - old.link_downed} times")
    remembered = {name: asdict(port) for name, port in ports.items()}
    if whys:
        return failed(CHECK_NAME, "; ".join(whys)), remembered
    if not ports:
        return skipped(CHECK_NAME, "no InfiniBand or RoCE port"), remembered
    active = sum(port.state == "ACTIVE" for port in ports.values())
    return passed(CHECK_NAME, f"{active} of {len(ports)} ports active"), remembered
