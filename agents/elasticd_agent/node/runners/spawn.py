"""Starts a runner as the user that its job runs as: what it inherits, and why that user cannot.

It exists so that what a job's process must not get from the daemon (its variables, its user, its descriptors) is
decided in one place. It follows nobody and ends nobody.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticd.errors import UsageError
from elasticd_agent.model.job_dir import JobFiles
from elasticd_agent.node.runners.spec import StoreSecrets
from elasticd_agent.system.files import open_plain

MAX_RUNNER_LOG_BYTES = 1 << 20
_AGENT_PREFIXES = (
    "ELASTICD_",
    "PET_",
    "LISTEN_",
    "NOTIFY_",
    "WATCHDOG_",
    "JOURNAL_",
    "INVOCATION_",
    "CREDENTIALS_",
    "GRPC_",
)
"""Variables that are meant for the daemon: no job shall speak for it, or see where its secrets are."""


class NotAllowed(UsageError):
    """This node will never be able to start the job as its user."""


@dataclass(frozen=True, slots=True)
class Account:
    """As whom a runner runs."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str

    @classmethod
    def of(cls, name: str | None) -> Account:
        """`name` None: the daemon's own. Raises UsageError for one that this node does not have, or may not become."""
        try:
            entry = pwd.getpwuid(os.geteuid()) if name is None else pwd.getpwnam(name)
        except KeyError:
            if name is None:
                uid = os.geteuid()
                return cls(str(uid), uid, os.getegid(), os.environ.get("HOME", "/"), "/bin/sh")
            raise UsageError(f"user {name!r} does not exist on this node") from None
        if os.geteuid() not in (0, entry.pw_uid):
            raise UsageError(f"user {name!r}: this agent does not run as root, and can run jobs only as itself")
        return cls(entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir, entry.pw_shell)


def spawn(files: JobFiles, lock: int, account: Account, secrets: StoreSecrets) -> subprocess.Popen[bytes]:
    with contextlib.suppress(OSError):
        if files.output.stat().st_size > MAX_RUNNER_LOG_BYTES:
            os.rename(files.output, files.output.with_suffix(".log.1"))
    other = account.uid != os.geteuid()
    told = open_plain(files.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    handed = secrets.to_fd()
    try:
        if other:
            os.fchown(told, account.uid, account.gid)
        return subprocess.Popen(
            [sys.executable, "-m", "elasticd_agent", "job", str(files.root), str(lock), str(handed)],
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=told,
            cwd="/",
            env=runner_environment(account),
            pass_fds=[lock, handed],
            start_new_session=True,
            user=account.uid if other else None,
            group=account.gid if other else None,
            extra_groups=os.getgrouplist(account.name, account.gid) if other else None,
        )
    except PermissionError as error:
        executes = error.filename == sys.executable
        if not (executes or other):
            raise
        if os.fstat(told).st_size == 0:
            files.output.unlink(missing_ok=True)  # nobody has said anything here
        if not executes:
            raise UsageError(
                f"this agent may not become user {account.name!r}: it is root without CAP_SETUID, CAP_SETGID or "
                "CAP_CHOWN, which its unit takes from it (docs/systemd.md)"
            ) from error
        raise NotAllowed(
            f"user {account.name!r} may not execute {sys.executable}{blocked_directory(account, Path(sys.executable))}"
        ) from None
    finally:
        os.close(told)
        os.close(handed)


def blocked_directory(account: Account, program: Path) -> str:
    """Where the way to the program ends for this user, as far as modes tell: it may go through links."""
    groups = os.getgrouplist(account.name, account.gid)
    places = [*reversed(program.parents), *reversed(program.resolve().parents)]
    for place in dict.fromkeys(places):
        with contextlib.suppress(OSError):
            found = place.stat()
            mine = 0o100 if found.st_uid == account.uid else 0o010 if found.st_gid in groups else 0o001
            if not found.st_mode & mine:
                mode = stat.S_IMODE(found.st_mode)
                return f", as it may not pass through {place} (mode {mode:04o}); install where everybody can"
    return ", or pass through to it"


def runner_environment(account: Account, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a runner inherits: the daemon's own, but for what is meant for the daemon, and as its user's."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_AGENT_PREFIXES)}
    if account.uid != os.geteuid():
        kept |= {"HOME": account.home, "USER": account.name, "LOGNAME": account.name, "SHELL": account.shell}
    return kept
