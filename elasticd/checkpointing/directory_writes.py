"""A session's writes into its directory: by the node's writer, for which rank 0 may wait, or here and now.

The process that writes has the directory's lock, and each save is reported once, by the process that knows how it
ended: by the writer where it writes, by rank 0 where the save was waited for or the writer has died. At the end of the
script rank 0 waits for the writer, so a program that ends at once after its last step still has its last checkpoint.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from elasticd.checkpointing.context import SaveContext
from elasticd.checkpointing.memory.buffers import WRITER_KILLED_REASON
from elasticd.checkpointing.memory.writer_client import SnapshotRefused
from elasticd.checkpointing.storage import checkpoint_files
from elasticd.checkpointing.storage.atomic_write import Staging
from elasticd.checkpointing.storage.directory_lock import DirectoryLock
from elasticd.checkpointing.storage.manifest import Manifest, SizeAndChecksum
from elasticd.checkpointing.storage.object_store import store_of
from elasticd.checkpointing.storage.retention import retain
from elasticd.heartbeat.record import Phase

logger = logging.getLogger("elasticd")

PATIENCE_SHARE = 0.9
"""The share of their patience that the other ranks, which wait for rank 0's word about a save, leave for the disk."""


class DirectoryWrites:
    """The lock of the directory, and the last save that the writer has not been asked about."""

    def __init__(self, context: SaveContext) -> None:
        self._context = context
        self._lock: DirectoryLock | None = None
        self._expected: tuple[int, int] | None = None
        """The number and the step of a save that the writer writes, or has written; None: there is none."""
        self._has_reported_refusal = False
        self._pid = os.getpid()
        """A forked child has the same connection to the writer, whose answers are not for it."""

    def take_lock(self, path: Path) -> None:
        """Make the directory if it is missing, and lock it. Raises OSError, DirectoryInUse."""
        environment = self._context.environment
        launched = environment.round > 0
        lock = DirectoryLock(path, environment.job, environment.run, claims=not launched)
        lock.acquire()
        if launched and (store := store_of(path)) is not None:
            store.assume_claimed(environment.job, environment.run)
        self._lock = lock
        if lock.unlocked:
            self._context.events.write("message", lock.unlocked, None, path=str(path))

    def write_now(
        self,
        draft: Manifest,
        fill: Callable[[Staging], dict[str, SizeAndChecksum]],
        why: str,
        start: float,
        token: str = "",
    ) -> bool:
        """Write the checkpoint while training waits, as `checkpoint_files.write` does; False if that fails. `start` is
        when the save began.
        """
        context = self._context
        try:
            if self._lock is None:
                self.take_lock(context.chosen_directory)
            entry = checkpoint_files.write(context.chosen_directory, draft, fill, token)
            path, seconds = str(context.checkpoint_path(draft.step)), time.monotonic() - start
            fields = {"path": path, "bytes": entry.manifest.total_bytes, "seconds": seconds}
            context.events.write(
                "checkpoint_saved", f"checkpoint of step {draft.step} saved ({why})", draft.step, **fields
            )
        except OSError as error:
            context.warn_failed(draft.step, str(error))
            return False
        try:
            retain(context.chosen_directory, context.round, context.keep, context.keep_every)
        except OSError as error:
            context.warn("message", f"old checkpoints could not be deleted: {error}", step=draft.step)
        return True

    def expect_write(self, step: int) -> None:
        """Remember, on rank 0, that the writer has a copy of the present save's state and will write it."""
        self._has_reported_refusal = False
        if self._context.group.rank == 0:
            if self._expected is None:
                atexit.register(self._wait_at_exit)
            self._expected = self._context.save_count, step

    def report_refusal(self, why: str, step: int) -> None:
        """Report once, on rank 0, that the writer takes no copy."""
        if self._context.group.rank == 0 and not self._has_reported_refusal:
            self._has_reported_refusal = True
            self._context.report(f"checkpoints are written while training waits: {why}", step)

    def report_if_save_lost(self) -> None:
        """Report, on rank 0, that the writer has ended before it had every rank's share: no other process knows."""
        context = self._context
        if self._expected is None or context.writer is None:
            return
        number, step = self._expected
        with contextlib.suppress(OSError, SnapshotRefused):
            if all(snapshot.original_key != (context.round, number) for snapshot in context.writer.find_all()):
                self._expected = None
                context.warn_failed(step, WRITER_KILLED_REASON)

    def wait_until_saved(self) -> bool:
        """Wait, on rank 0, until the writer has finished with the last save; True if it is on the disk."""
        context = self._context
        if context.writer is None or self._expected is None or os.getpid() != self._pid:
            return False
        atexit.unregister(self._wait_at_exit)
        before = context.heartbeat.current_phase
        context.heartbeat.set_phase(Phase.CHECKPOINT)
        patience_s = PATIENCE_SHARE * context.channel.timeout_s
        try:
            result = context.writer.wait_for_result(context.round, self._expected[0], patience_s)
        except TimeoutError:
            result = {"saved": False, "why": f"it is not on the disk after {patience_s:g} s"}
        except (OSError, SnapshotRefused) as error:
            result = {"saved": False, "why": f"the writer does not answer: {error}"}
        finally:
            context.heartbeat.set_phase(before)
        if not result["saved"]:
            logger.warning("a checkpoint failed: %s", result["why"])
            if result["why"] == WRITER_KILLED_REASON:
                self.report_if_save_lost()
        self._expected = None
        return bool(result["saved"])

    def _wait_at_exit(self) -> None:
        """Wait where a script ends without `close()`; one that fails is not held up."""
        if not hasattr(sys, "last_value"):
            self.wait_until_saved()

    def close(self) -> None:
        """Close the connection to the writer and release the lock."""
        context = self._context
        if context.writer is not None:
            context.writer.close()
        if self._lock is not None:
            if context.environment.round == 0:
                self._lock.release_store()
            self._lock.release()
            self._lock = None
