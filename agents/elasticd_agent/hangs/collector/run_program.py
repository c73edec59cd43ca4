"""A program is run for what it prints, until a deadline; nobody waits for one that does not end.

`subprocess.run` waits for a killed program without a bound, and one that hangs in the kernel does not die. Here it is
left behind, in the helper's session, which is killed as a whole.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How it went. `code` None: it did not end in time, or could not be started; `trouble` says which."""

    code: int | None
    stdout: bytes = b""
    stderr: str = ""
    trouble: str = ""


def run_program(command: Sequence[str], until: float) -> ProgramResult:
    """Until `until` on time.monotonic(). It inherits no descriptors."""
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "RUST_BACKTRACE": "0"},  # of py-spy's errors only the words are read
        )
    except OSError as error:
        return ProgramResult(None, trouble=f"cannot be started: {error.strerror or error}")
    try:
        out, said = process.communicate(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return ProgramResult(None, trouble=f"did not answer within {time.monotonic() - began:.1f} s")
    return ProgramResult(process.returncode, out, said.decode("utf-8", "replace"))
