"""A worker that anybody of its user may trace. An argument ${local_rank} makes its start cold, which here is quick."""

from __future__ import annotations

import ctypes
import os
import time

import faults

PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)

ctypes.CDLL(None).prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)
faults.write(f"ready-{faults.RANK}", f"{os.getpid()}\n")
time.sleep(3600)
