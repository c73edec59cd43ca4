"""A process that cannot be ended: somebody traces it and does not wait for it.

It stands in for a worker that hangs in the kernel (state D after SIGKILL), which nobody can make to order: as there,
the signal has been sent, no code of the process runs any more, and its parent's wait does not return. The parent of a
traced process hears of its death only once the tracer has waited for it, or let it go. No special rights are needed:
the traced process says that anybody of its user may (PR_SET_PTRACER, for kernels with Yama).
"""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

TRACER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
PTRACE_SEIZE = 0x4206
for pid in map(int, sys.argv[1:]):
    if libc.ptrace(PTRACE_SEIZE, pid, None, None):
        raise SystemExit(f"cannot trace {pid}: errno {ctypes.get_errno()}")
print("traced", flush=True)
sys.stdin.read()
"""
ALLOW = "import ctypes; ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1), 0, 0, 0)"
"""What a Python process does to be traced by anybody of its user: PR_SET_PTRACER, PR_SET_PTRACER_ANY."""


class Tracer:
    """From its start until `let_go`, none of `pids` can be reaped by its parent."""

    def __init__(self, *pids: int) -> None:
        argv = [sys.executable, "-I", "-S", "-c", TRACER, *map(str, pids)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout.readline() == "traced\n"

    def let_go(self) -> None:
        self._process.communicate(timeout=20)

    def __enter__(self) -> Tracer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process.returncode is None:
            self.let_go()
