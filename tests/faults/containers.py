"""What a job finds in a container: a memory limit, a small /dev/shm of its own, its agent as process 1.

The commands are heads: the job's command follows. A test is skipped where they need a right that it has not.
"""

from __future__ import annotations

import contextlib
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

CGROUPS = Path("/sys/fs/cgroup")
SMALL = 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"'


def in_a_small_dev_shm(*more: str) -> list[str]:
    """A /dev/shm of 64 MB; no command without the right to mount. `more`: of `unshare`'s options."""
    for unshare in (["unshare", "-m", *more], ["unshare", "-r", "-m", *more]):
        if not subprocess.run([*unshare, "sh", "-c", SMALL, "-", "true"], capture_output=True).returncode:
            return [*unshare, "sh", "-c", SMALL, "-"]
    return []


def as_process_1() -> list[str]:
    return in_a_small_dev_shm("--pid", "--fork", "--mount-proc") or pytest.skip("no namespaces can be made here")


@contextlib.contextmanager
def memory_limit(megabytes: int) -> Iterator[Path]:
    """A control group with so much memory."""
    first = CGROUPS / "memory" / "memory.limit_in_bytes"
    group = (first.parent if first.exists() else CGROUPS) / f"elasticd-test-{uuid.uuid4()}"
    try:
        group.mkdir()
        (group / (first.name if first.exists() else "memory.max")).write_text(str(megabytes << 20))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def inside(group: Path) -> Sequence[str]:
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "-"]
