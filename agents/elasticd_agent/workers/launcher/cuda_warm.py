"""Makes a parked worker's CUDA context and cuBLAS handle before it is needed (--cuda-warm).

Loaded in a parked worker only: a context does not survive a fork, so the template never has one.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

COMPUTE_MODE = 20
"""cuda.h: CU_DEVICE_ATTRIBUTE_COMPUTE_MODE; 0 is the mode in which several processes may use a GPU."""
MODES = {1: "exclusive-thread", 2: "prohibited", 3: "exclusive-process"}
GIB = 1 << 30


def make_context(torch: Any, device: int, reserve_bytes: int) -> dict[str, Any]:
    """{"free": bytes left on the GPU, "seconds"}, or {"why": what was in the way}. It never raises.

    `device` is the number that a script gives to torch. The current device stays what it was.
    """
    began = time.monotonic()
    try:
        why = refusal(device)
        if why:
            return {"why": why}
        with torch.cuda.device(device):
            torch.cuda.current_blas_handle()
            torch.cuda.synchronize()
            free, _ = torch.cuda.mem_get_info()
    except Exception as error:  # noqa: BLE001 of the driver, of torch, or of a torch without CUDA
        return {"why": f"{type(error).__name__}: {error}"}
    if free < reserve_bytes:
        return {"why": f"GPU {device} would have {free / GIB:.1f} GiB left, less than {reserve_bytes / GIB:g} GiB"}
    return {"free": free, "seconds": time.monotonic() - began}


def refusal(device: int) -> str:
    """Why no other process may use the GPU, "" if it may. Makes no context."""
    cuda, handle, mode = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
    code = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(handle), device)
        or cuda.cuDeviceGetAttribute(ctypes.byref(mode), COMPUTE_MODE, handle)
    )
    if code:
        return f"CUDA's driver returned error {code} for GPU {device}"
    if not mode.value:
        return ""
    name = MODES.get(mode.value, str(mode.value))
    return f"GPU {device} is in compute mode {name}, in which a second process cannot use it"
