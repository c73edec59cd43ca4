"""The checkpoint directory of a job on this node: locked while the job runs, and what is in it at the start."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from elasticd.errors import DirectoryInUse, UsageError
from elasticd_agent.model.job import JobSpec
from elasticd_agent.model.records import is_later_run
from elasticd_agent.system.installation import library_file
from elasticd_agent.workers.logs import earlier_run_that_logs

RETRY_S = 0.5
_STORE_TIMEOUT_S = 90.0
"""The time in which an object store answers a few requests, or fails to."""


@dataclass(frozen=True, slots=True)
class DirectoryContent:
    """The content of the directory when the job began."""

    highest_round: int = 0
    newest_checkpoint: tuple[int, int] | None = None  #: the (round, step) of the newest checkpoint


def wait_for_earlier_run(
    spec: JobSpec, within_s: float, stopped: Callable[[], bool], log: Callable[[str], None]
) -> None:
    """Wait while an earlier run of this job holds its directory of checkpoints or logs: nodes of it may have to end, or
    to be noticed, first.

    Returns early once `stopped`. What is held by another run then is refused where it is used.
    """
    deadline, said = time.monotonic() + within_s, False
    while not stopped() and time.monotonic() < deadline and (why := _held_by_earlier_run(spec)):
        if not said:
            log(f"{why}. Waiting for {within_s:g} s")
        said = True
        time.sleep(RETRY_S)


def _held_by_earlier_run(spec: JobSpec) -> str:
    """Which directory an earlier run holds, in words, or ""."""
    if spec.log_dir is not None and (why := earlier_run_that_logs(spec.log_dir, spec.job_id, spec.run)):
        return why
    if spec.checkpoint_dir is None:
        return ""
    from elasticd.checkpointing.storage.directory_lock import DirectoryLock

    lock = DirectoryLock(spec.checkpoint_dir, spec.job_id, spec.run, claims=False)
    try:
        lock.acquire()
    except DirectoryInUse as error:
        is_earlier = error.holder.get("job") == spec.job_id and is_later_run(spec.run, error.holder.get("run", ""))
        return str(error) if is_earlier else ""
    except OSError:
        return ""
    lock.release()
    return ""


@contextlib.contextmanager
def lock_directory(spec: JobSpec, log: Callable[[str], None]) -> Iterator[DirectoryContent]:
    """Locked for as long as the job runs. Raises UsageError."""
    if spec.checkpoint_dir is None:
        yield DirectoryContent()
        return
    from elasticd.checkpointing.storage.directory_lock import DirectoryLock
    from elasticd.checkpointing.storage.lineage import highest_round, lineage
    from elasticd.checkpointing.storage.object_store import store_of
    from elasticd.checkpointing.storage.object_url import path_or_url

    in_store = store_of(spec.checkpoint_dir) is not None
    lock = DirectoryLock(spec.checkpoint_dir, spec.job_id, spec.run, claims=False)
    try:
        lock.acquire()
    except DirectoryInUse as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"--checkpoint-dir {path_or_url(spec.checkpoint_dir)}: {error.strerror or error}") from None
    try:
        if not in_store:
            entries, _ = lineage(spec.checkpoint_dir)
            newest = entries[0].manifest if entries else None
            used = highest_round(spec.checkpoint_dir)
            yield DirectoryContent(used, (newest.round, newest.step) if newest is not None else None)
            return
        opened = _run_store_process("open", spec)
        if "error" in opened:
            raise UsageError(f"--checkpoint-dir: {opened['error']}")
        if opened["taken"]:
            log(opened["taken"])
        yield DirectoryContent(opened["highest_round"], opened["newest"] and tuple(opened["newest"]))
    finally:
        lock.release()


def release_object_store(spec: JobSpec, log: Callable[[str], None]) -> None:
    """The job has ended: the next run takes an object store without a warning."""
    from elasticd.checkpointing.storage.object_store import store_of

    if spec.checkpoint_dir is None or store_of(spec.checkpoint_dir) is None:
        return
    if "error" in (answer := _run_store_process("release", spec)):
        log(answer["error"])


def _run_store_process(verb: str, spec: JobSpec) -> dict[str, Any]:
    """Run the store's process with the job's environment, which may hold its credentials."""
    program = library_file("elasticd.checkpointing.storage.object_store_process")
    argv = [sys.executable, "-I", program, verb, str(spec.checkpoint_dir), spec.job_id, spec.run]
    environment = dict(spec.base_environment(os.environ))
    try:
        done = subprocess.run(
            argv, env=environment, capture_output=True, encoding="utf-8", errors="replace", timeout=_STORE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"{spec.checkpoint_dir}: no answer in {_STORE_TIMEOUT_S:g} s"}
    if done.returncode:
        return {"error": done.stderr.strip().rpartition("\n")[2]}
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
