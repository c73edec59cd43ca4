"""The state directory: private, used by one agent at a time, with the identity that a restarted agent keeps.

The lock prevents two agents from managing the same runners; the identity makes an agent that was killed or upgraded
the same agent afterwards. Only its locks show which processes are alive. `DiskCleaner` removes the files of ended jobs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from elasticd.errors import UsageError
from elasticd_agent.system.files import read_plain, replace_file
from elasticd_agent.system.heaps import return_free_memory
from elasticd_daemon.runners import liveness
from elasticd_daemon.scheduler import retention

LOCK_FILE = "agent.lock"
IDENTITY_FILE = "node.json"
COOKIE_KEY_FILE, COOKIE_KEY_BYTES = "cookie.key", 32
CLEANUP_INTERVAL_S = 600.0
FIRST_CLEANUP_S = 60.0
"""The start of the agent has priority."""
LOCK_WAIT_S = 3.0
"""An agent that was just killed, or is replacing itself, releases the lock within this time."""


@contextlib.contextmanager
def exclusive_use(state: Path) -> Iterator[None]:
    """Create and lock the directory. Raises UsageError."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = state.stat()
        if status.st_uid not in (0, os.geteuid()) or stat.S_IMODE(status.st_mode) & 0o022:
            raise UsageError(f"state_dir {state}: other users can write there; chown it to this user and chmod it 0700")
        if stat.S_IMODE(status.st_mode) & 0o066:
            state.chmod(0o700)
        lock = _take_lock(state / LOCK_FILE)
    except OSError as error:
        raise UsageError(f"state_dir {state}: {error.strerror}") from None
    if lock is None:
        other = liveness.lock_owner(state / LOCK_FILE)
        who = f"pid {other.pid}" if other is not None else "it is starting or ending"
        raise UsageError(f"state_dir {state}: another agent uses it ({who}); give each agent its own")
    try:
        yield
    finally:
        os.close(lock)


def _take_lock(path: Path) -> int | None:
    """Take the agent's lock, waiting a moment for an agent that was just killed. None: a live agent has it."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while (lock := liveness.take_lock(path)) is None and time.monotonic() < deadline:
        other = liveness.lock_owner(path)
        if other is not None and other.pid != os.getpid() and time.monotonic() > deadline - LOCK_WAIT_S + 0.5:
            break  # a live agent that keeps running
        time.sleep(0.02)
    return lock


def persistent_incarnation(state: Path, node: str) -> str:
    """This agent's identity, constant for this directory, node name and boot: a copy of the directory that another
    machine has, from a disk image or a backup, is another agent's. Raises UsageError.
    """
    path, boot = state / IDENTITY_FILE, liveness.boot_id()
    try:
        known = json.loads(path.read_bytes())
        if known["node"] == node and isinstance(known["incarnation"], str) and known["incarnation"]:
            return f"{known['incarnation']}-{boot}"
    except (OSError, ValueError, TypeError, KeyError):
        pass
    made = secrets.token_hex(8)
    try:
        replace_file(path, json.dumps({"node": node, "incarnation": made}).encode())
    except OSError as error:
        # On a full disk only this process has it: the next one waits until its leases have expired.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise UsageError(f"{path}: {error.strerror}") from None
    return f"{made}-{boot}"


def cookie_key(state: Path) -> bytes:
    """The key of the dashboard's cookies, kept so that they outlive the agent; a new one where it cannot be kept."""
    path = state / COOKIE_KEY_FILE
    with contextlib.suppress(OSError):
        if len(known := read_plain(path, COOKIE_KEY_BYTES)) == COOKIE_KEY_BYTES:
            return known
    made = secrets.token_bytes(COOKIE_KEY_BYTES)
    with contextlib.suppress(OSError):
        replace_file(path, made)
    return made


class DiskCleaner:
    """A thread that removes the files of ended jobs after their retention time, and returns the memory they needed.

    `in_use` returns the (job, number) whose files must be kept, `keep_s` the retention time in seconds.
    """

    def __init__(
        self,
        state: Path,
        in_use: Callable[[], Collection[tuple[str, int]]],
        keep_s: Callable[[], float],
        log: Callable[[str], None],
    ) -> None:
        self._state = state
        self._in_use = in_use
        self._keep_s = keep_s
        self._log = log
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticd-cleanup", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. The wait is bounded, since the disk may hang."""
        self._closing.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        pause_s = FIRST_CLEANUP_S
        while not self._closing.wait(pause_s):
            pause_s = CLEANUP_INTERVAL_S
            try:
                for sentence in retention.remove_files(self._state, self._in_use(), time.time(), self._keep_s()):
                    self._log(sentence)
            except Exception as error:  # noqa: BLE001 or the disk would fill up in the months to come
                self._log(f"the files of ended jobs cannot be removed: {error!r}")
            return_free_memory()
