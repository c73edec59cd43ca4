"""Pure: NVML's answers about this node's GPUs -> one result for each check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elasticd_agent.node.health.result import CheckResult, failed, passed, skipped

PRESENT, ERRORS, ROWS, HEAT, XIDS = "gpus", "gpu ecc", "gpu rows", "gpu heat", "gpu xid"
XID_EVENT, DOUBLE_BIT_EVENT = 0x8, 0x2
"""nvml.h: nvmlEventTypeXidCriticalError, nvmlEventTypeDoubleBitEccError"""
HARDWARE_SLOWDOWNS = {0x40: "too hot (hardware thermal slowdown)", 0x80: "short of power (hardware power brake)"}
"""nvml.h, nvmlClocksThrottleReason…; slowdown by software (0x20, 0x4) is normal at full load."""
APPLICATION_XIDS = {
    13: "an exception in a kernel",
    31: "a page fault",
    43: "it stopped a program",
    45: "cleaning up after a program",
    68: "an exception of the video engine",
    109: "a context switch took too long",
}
"""XIDs that a faulty program can cause on a healthy GPU, as in NVIDIA's device plugin for Kubernetes."""


def gpu_results(
    answer: Mapping[str, Any], expected: int, chosen: Sequence[str] | None, seconds: float
) -> list[CheckResult]:
    """`answer`: NVML's to "gpus". `chosen`: indices and UUIDs that the agent may use; None: all."""
    if answer.get("trouble"):
        return [_no_answer(str(answer["trouble"]), expected, seconds)]
    gpus = [gpu for gpu in answer.get("gpus", ()) if _is_visible(gpu, chosen)]
    return [
        _present(gpus, expected, seconds),
        _each(ERRORS, gpus, _errors, "no uncorrectable errors"),
        _each(ROWS, gpus, _rows, "no memory row needs remapping"),
        _each(HEAT, gpus, _heat, "no hardware slowdown"),
    ]


def event_result(what: Mapping[str, Any], chosen: Sequence[str] | None) -> CheckResult | None:
    """The failure that an NVML event reports; None for an application's fault or another GPU."""
    if not _is_visible(what, chosen):
        return None
    if what["type"] == DOUBLE_BIT_EVENT:
        why = f"{_name(what)} had an uncorrectable memory error"
    elif what["type"] == XID_EVENT and what["data"] not in APPLICATION_XIDS:
        why = f"{_name(what)} had XID {what['data']}; see dmesg, and XID {what['data']} in NVIDIA's list of XID errors"
    else:
        return None
    return CheckResult(XIDS, "failed", why, certain=True)


def _no_answer(trouble: str, expected: int, seconds: float) -> CheckResult:
    if "pynvml is not installed" in trouble:
        return skipped(PRESENT, f"{expected} GPUs, unchecked: {trouble}", seconds)
    return failed(PRESENT, f"{trouble}; {expected} GPUs were expected", seconds)


def _present(gpus: Sequence[Mapping[str, Any]], expected: int, seconds: float) -> CheckResult:
    lost = [f"{_name(gpu)} does not answer: {gpu['error']}" for gpu in gpus if "error" in gpu]
    if len(gpus) < expected:
        lost.append(f"{len(gpus)} GPUs found, {expected} expected (health.gpus sets the number)")
    if lost:
        return failed(PRESENT, "; ".join(lost), seconds)
    names = sorted({str(gpu.get("name", "GPU")) for gpu in gpus})
    past = "; ".join(f"{_name(gpu)}: last XID {gpu['last_xid']}" for gpu in gpus if gpu.get("last_xid"))
    return passed(PRESENT, f"{len(gpus)} × {', '.join(names)}{' – ' * bool(past)}{past}", seconds)


def _each(check: str, gpus: Sequence[Mapping[str, Any]], look: Any, fine: str) -> CheckResult:
    found = [f"{_name(gpu)} {why}" for gpu in gpus if "error" not in gpu and (why := look(gpu))]
    return failed(check, "; ".join(found)) if found else passed(check, fine)


def _errors(gpu: Mapping[str, Any]) -> str:
    count = gpu.get("ecc_uncorrected", 0)
    return f"had {count} uncorrectable memory errors since its last reset; reset it" if count else ""


def _rows(gpu: Mapping[str, Any]) -> str:
    if gpu.get("remap_failed"):
        return "could not remap a faulty memory row; replace it"
    return "has a faulty memory row to remap; reset it" if gpu.get("remap_pending") else ""


def _heat(gpu: Mapping[str, Any]) -> str:
    reasons = int(str(gpu.get("throttle_reasons", "0x0")), 16)
    whys = [why for bit, why in HARDWARE_SLOWDOWNS.items() if reasons & bit]
    degrees = f" at {gpu['temperature_c']} °C" if "temperature_c" in gpu else ""
    return f"is slowed down{degrees}: {', '.join(whys)}" if whys else ""


def _is_visible(gpu: Mapping[str, Any], chosen: Sequence[str] | None) -> bool:
    if chosen is None or "index" not in gpu or any(name.startswith("MIG-") for name in chosen):
        return True
    uuid = str(gpu.get("uuid", ""))
    return str(gpu.get("index")) in chosen or any(uuid.startswith(one) for one in chosen if one.startswith("GPU-"))


def _name(gpu: Mapping[str, Any]) -> str:
    if "index" not in gpu:
        return "a GPU that has lost its index"
    return f"GPU {gpu['index']}" + (f" ({gpu['bus']})" if gpu.get("bus") else "")
