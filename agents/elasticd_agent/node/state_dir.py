"""The state directory: one daemon's at a time, private, with the name under which the daemon comes back.

It exists so that two daemons never keep the same runners, and so that one that was killed or upgraded is the same
daemon afterwards. Nothing in it but a lock says that a process lives.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from elasticd.errors import UsageError
from elasticd_agent.node.runners import liveness as alive
from elasticd_agent.system.files import replace_file

LOCK, IDENTITY = "agent.lock", "node.json"
LOCK_WAIT_S = 3.0
"""A daemon that was killed a moment ago, or is replacing itself, lets go within this time."""


@contextlib.contextmanager
def exclusive(state: Path) -> Iterator[None]:
    """Have the directory, and have it alone. Raises UsageError."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = state.stat()
        if found.st_uid not in (0, os.geteuid()) or stat.S_IMODE(found.st_mode) & 0o022:
            raise UsageError(f"state_dir {state}: others may write there; chown it to this user and chmod 0700 it")
        if stat.S_IMODE(found.st_mode) & 0o066:
            state.chmod(0o700)
        lock = _take_lock(state / LOCK)
    except OSError as error:
        raise UsageError(f"state_dir {state}: {error.strerror}") from None
    if lock is None:
        other = alive.lock_owner(state / LOCK)
        who = f"pid {other.pid}" if other is not None else "it is starting or ending"
        raise UsageError(f"state_dir {state}: another agent uses it ({who}); one agent a directory")
    try:
        yield
    finally:
        os.close(lock)


def _take_lock(path: Path) -> int | None:
    deadline = time.monotonic() + LOCK_WAIT_S
    while (lock := alive.take_lock(path)) is None and time.monotonic() < deadline:
        other = alive.lock_owner(path)
        if other is not None and other.pid != os.getpid() and time.monotonic() > deadline - LOCK_WAIT_S + 0.5:
            break  # it lives and is not about to go
        time.sleep(0.02)
    return lock


def incarnation(state: Path, node: str) -> str:
    """This daemon's own, as long as the directory and the node's name stay. Raises UsageError."""
    path = state / IDENTITY
    try:
        known = json.loads(path.read_bytes())
        if known["node"] == node and isinstance(known["incarnation"], str) and known["incarnation"]:
            return str(known["incarnation"])
    except (OSError, ValueError, TypeError, KeyError):
        pass
    made = secrets.token_hex(8)
    try:
        replace_file(path, json.dumps({"node": node, "incarnation": made}).encode())
    except OSError as error:
        # On a full disk it is this process's alone: the next one waits until its leases are over.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise UsageError(f"{path}: {error.strerror}") from None
    return made
