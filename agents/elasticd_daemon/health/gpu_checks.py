"""Pure: NVML's answers about this node's GPUs -> one result for each check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from elasticd_agent.system.gpus.nvml import APPLICATION_XIDS, XID_EVENT, describe_event, describe_gpu
from elasticd_daemon.health.result import CheckResult, GpuUsage, failed, passed, skipped

PRESENCE_CHECK, XID_CHECK = "gpus", "gpu xid"
FABRIC_COMPLETED, FABRIC_PENDING = 3, (1, 2)
"""nvml.h: NVML_GPU_FABRIC_STATE_…; pending: not started, in progress."""
HARDWARE_SLOWDOWNS = {0x40: "too hot (hardware thermal slowdown)", 0x80: "short of power (hardware power brake)"}
"""nvml.h, nvmlClocksThrottleReason…; slowdown by software (0x20, 0x4) is normal at full load."""


def gpu_results(
    answer: Mapping[str, Any],
    expected: int,
    visible: Sequence[str] | None,
    seconds: float,
    most_links: dict[str, int] | None = None,
) -> list[CheckResult]:
    """`answer`: NVML's to "gpus". `visible`: indices and UUIDs that the agent may use; None: all.

    `most_links` keeps the most active NVLinks of each GPU from one run to the next.
    """
    if answer.get("trouble"):
        return [_no_answer_result(str(answer["trouble"]), expected, seconds)]
    gpus = [gpu for gpu in answer.get("gpus", ()) if _is_visible(gpu, visible)]
    return [
        _presence_result(gpus, expected, seconds),
        *(_check_each(check, gpus, is_bad, fine) for check, is_bad, fine in GPU_CHECKS),
        _check_each(
            "gpu nvlink",
            gpus,
            partial(_nvlink_reason, most=most_links if most_links is not None else {}),
            "no link is down",
        ),
    ]


def gpu_usage(answer: Mapping[str, Any], visible: Sequence[str] | None) -> tuple[GpuUsage, ...]:
    """The use of the GPUs that answer, as far as NVML knows it."""
    gpus = [gpu for gpu in answer.get("gpus", ()) if "error" not in gpu and _is_visible(gpu, visible)]
    return tuple(
        GpuUsage(
            gpu=int(gpu["index"]),
            utilization_percent=gpu.get("utilization_percent"),
            memory_used_bytes=gpu.get("memory_used_bytes"),
            memory_total_bytes=gpu.get("memory_total_bytes"),
        )
        for gpu in gpus
        if "index" in gpu
    )


def event_result(what: Mapping[str, Any], visible: Sequence[str] | None) -> CheckResult | None:
    """The failure that an NVML event reports; None for an application's fault or another GPU."""
    if not _is_visible(what, visible):
        return None
    if what["type"] == XID_EVENT and what["data"] in APPLICATION_XIDS:
        return None
    why = describe_event(what)
    return CheckResult(XID_CHECK, "failed", why, certain=True) if why else None


def _no_answer_result(trouble: str, expected: int, seconds: float) -> CheckResult:
    if "pynvml is not installed" in trouble:
        return skipped(PRESENCE_CHECK, f"{expected} GPUs, unchecked: {trouble}", seconds)
    return failed(PRESENCE_CHECK, f"{trouble}; {expected} GPUs were expected", seconds)


def _presence_result(gpus: Sequence[Mapping[str, Any]], expected: int, seconds: float) -> CheckResult:
    lost = [f"{describe_gpu(gpu)} does not answer: {gpu['error']}" for gpu in gpus if "error" in gpu]
    if len(gpus) < expected:
        lost.append(missing_gpus_reason(len(gpus), expected))
    if lost:
        return failed(PRESENCE_CHECK, "; ".join(lost), seconds)
    names = sorted({str(gpu.get("name", "GPU")) for gpu in gpus})
    past = [f"{describe_gpu(gpu)}: last XID {gpu['last_xid']}" for gpu in gpus if gpu.get("last_xid")]
    notes = "; ".join([*past, *(note for bad, note in GPU_NOTES if any(map(bad, gpus)))])
    return passed(PRESENCE_CHECK, f"{len(gpus)} × {', '.join(names)}{' – ' * bool(notes)}{notes}", seconds)


def missing_gpus_reason(found: int, expected: int) -> str:
    return f"{found} GPUs found, {expected} expected (health.gpus sets the number)"


def _check_each(check: str, gpus: Sequence[Mapping[str, Any]], find_reason: Any, fine: str) -> CheckResult:
    bad = [f"{describe_gpu(gpu)} {why}" for gpu in gpus if "error" not in gpu and (why := find_reason(gpu))]
    return failed(check, "; ".join(bad)) if bad else passed(check, fine)


def _ecc_reason(gpu: Mapping[str, Any]) -> str:
    count = gpu.get("ecc_uncorrected", 0)
    return f"had {count} uncorrectable memory errors since its last reset; reset it" if count else ""


def _row_reason(gpu: Mapping[str, Any]) -> str:
    if gpu.get("remap_failed"):
        return "could not remap a faulty memory row; replace it"
    return "has a faulty memory row to remap; reset it" if gpu.get("remap_pending") else ""


def _slowdown_reason(gpu: Mapping[str, Any]) -> str:
    reasons = int(str(gpu.get("throttle_reasons", "0x0")), 16)
    whys = [why for bit, why in HARDWARE_SLOWDOWNS.items() if reasons & bit]
    degrees = f" at {gpu['temperature_c']} °C" if "temperature_c" in gpu else ""
    return f"is slowed down{degrees}: {', '.join(whys)}" if whys else ""


def _fabric_reason(gpu: Mapping[str, Any]) -> str:
    state, status = gpu.get("fabric", (0, 0))
    return f"was refused by the fabric manager (status {status})" if state == FABRIC_COMPLETED and status else ""


def _nvlink_reason(gpu: Mapping[str, Any], most: dict[str, int]) -> str:
    """A link that was never active may lead nowhere."""
    active, uuid = gpu.get("nvlinks_active"), str(gpu.get("uuid", gpu.get("index")))
    if active is None:
        return ""
    most[uuid] = max(most.get(uuid, 0), int(active))
    down = most[uuid] - int(active)
    return f"has lost {down} of {most[uuid]} NVLinks; see nvidia-smi nvlink -s" if down else ""


GPU_CHECKS = (
    ("gpu ecc", _ecc_reason, "no uncorrectable errors"),
    ("gpu rows", _row_reason, "no memory row needs remapping"),
    ("gpu heat", _slowdown_reason, "no hardware slowdown"),
    ("gpu fabric", _fabric_reason, "no GPU was refused"),
)
"""Name, when a GPU is bad and why, and what is said of good ones."""
GPU_NOTES: tuple[tuple[Callable[[Mapping[str, Any]], bool], str], ...] = (
    (lambda gpu: gpu.get("persistence") == 0, "persistence mode is off: the driver is loaded anew by each start"),
    (lambda gpu: gpu.get("mig") == 1, "MIG is on: a slot is one instance"),
    (lambda gpu: gpu.get("fabric", (0,))[0] in FABRIC_PENDING, "the fabric manager has not set up all GPUs"),
)
"""Facts that a person should know, of GPUs that can train."""


def _is_visible(gpu: Mapping[str, Any], visible: Sequence[str] | None) -> bool:
    if visible is None or "index" not in gpu or any(name.startswith("MIG-") for name in visible):
        return True
    uuid = str(gpu.get("uuid", ""))
    return str(gpu.get("index")) in visible or any(uuid.startswith(name) for name in visible if name.startswith("GPU-"))
