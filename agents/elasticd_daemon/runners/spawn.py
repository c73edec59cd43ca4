"""Starts a runner as its job's user: its spec, environment, user and file descriptors.

The agent runs as root where jobs run as others. From root to the job's user there is one way, and it is taken in the
runner, after it has read what only root may read and before it opens anything that the user could have prepared. The
agent itself never acts as another user and never starts a program of theirs: a process of the user can stop its
parent's wait, and a file of the user's can be anything.

The interpreter is started so that no file of the job's user is imported by it: no user site directory, and PYTHONPATH
only where the agent itself was started with one.
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
from elasticd_agent.model.job import Rendezvous
from elasticd_agent.system.processes import procfs
from elasticd_daemon.config import allow_lists as limits
from elasticd_daemon.config.agent_settings import NodeSettings
from elasticd_daemon.config.job_file import from_json
from elasticd_daemon.job_dir import JobFiles
from elasticd_daemon.runners import liveness, versions
from elasticd_daemon.runners.reconcile import RunnerStart
from elasticd_daemon.runners.spec import RunnerSpec, StoreSecrets

_AGENT_VARIABLE_PREFIXES = (
    "ELASTICD_", "PET_", "LISTEN_", "NOTIFY_", "WATCHDOG_", "JOURNAL_", "INVOCATION_", "CREDENTIALS_", "GRPC_",
)  # fmt: skip
"""Variables for the agent only: a job must not notify systemd for it, or learn the location of its secrets."""

CAP_SETGID_AND_SETUID = 1 << 6 | 1 << 7
"""linux/capability.h"""


class NodeRefusesJob(UsageError):
    """This node can never start the job as its user."""


@dataclass(frozen=True, slots=True)
class Account:
    name: str
    uid: int
    gid: int
    home: str
    shell: str

    @classmethod
    def of(cls, name: str | None) -> Account:
        """`name` None: the agent's own. Raises UsageError for an unknown user, and if the agent is not root."""
        try:
            entry = pwd.getpwuid(os.geteuid()) if name is None else pwd.getpwnam(name)
        except KeyError:
            if name is None:
                uid = os.geteuid()
                return cls(str(uid), uid, os.getegid(), os.environ.get("HOME", "/"), "/bin/sh")
            raise UsageError(f"user {name!r} does not exist on this node") from None
        if os.geteuid() not in (0, entry.pw_uid):
            raise UsageError(f"user {name!r}: this agent does not run as root, so it can run jobs only as its own user")
        return cls(entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir, entry.pw_shell)


def spawn(
    files: JobFiles, lock: int, account: Account, secrets: StoreSecrets, code: Path | None = None
) -> subprocess.Popen[bytes]:
    """The runner, or its keeper if it is of another user.

    `code`: the copy of elasticd to start from; without it, or if it is gone, the installation. The runner starts as
    this process's user, and gives root up only once no other process can inspect it: before that its user cannot stop
    it either, while we wait for its start. Raises OSError, UsageError.
    """
    as_user = name_to_become(account)
    fds = [lock, secrets.to_fd()]
    command = elasticd_command()
    try:
        if as_user:
            if (keeper := liveness.take_lock(files.keeper_lock)) is None:
                raise UsageError(f"{files.root}: processes of an earlier start are left")
            fds.append(keeper)
        if code is not None:
            with contextlib.suppress(OSError):
                fds.append(versions.lock_copy(code))
                command = [*command[:2], str(code)]
        child = subprocess.Popen(
            [*command, "job", str(files.root), as_user, *map(str, fds)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # until the runner has opened its own log
            cwd="/",
            env=runner_environment(account),
            pass_fds=fds,
            start_new_session=True,
        )
        if as_user:
            liveness.write_owner(files.keeper_lock, child.pid)
        return child
    finally:
        for fd in fds[1:]:
            os.close(fd)


def elasticd_command() -> list[str]:
    """Starts elasticd, which imports no file of the job's user: neither its site directory nor, unless we use it,
    PYTHONPATH.
    """
    return [sys.executable, "-s" if "PYTHONPATH" in os.environ else "-I", "-m", "elasticd_agent"]


def name_to_become(account: Account) -> str:
    """The user that a program becomes which starts as this process's; "": it stays that. Raises UsageError if root
    may not.
    """
    if account.uid == os.geteuid():
        return ""
    effective = procfs.read("/proc/self/status").partition(b"\nCapEff:\t")[2][:16]
    if int(effective or b"0", 16) & CAP_SETGID_AND_SETUID != CAP_SETGID_AND_SETUID:
        raise UsageError(missing_capability_sentence(account))
    return account.name


def missing_capability_sentence(account: Account) -> str:
    return (
        f"this agent may not become user {account.name!r}: it is root without CAP_SETUID, CAP_SETGID or CAP_CHOWN, "
        "which its unit removes (elasticd docs systemd)"
    )


def become(account: Account) -> None:
    """Give root up for good. Raises OSError."""
    os.setgroups(os.getgrouplist(account.name, account.gid))
    os.setgid(account.gid)
    os.setuid(account.uid)


def check_interpreter(account: Account) -> None:
    """Check as this user that this interpreter starts, as the job's launcher will. Raises NodeRefusesJob.

    Never in the agent: the user can stop such a process, also before it has started a program.
    """
    try:
        done = subprocess.run([sys.executable, "-I", "-S", "-c", ""], stdin=subprocess.DEVNULL, capture_output=True)
        starts = done.returncode == 0
    except OSError:
        starts = False
    if not starts:
        where = blocked_directory_phrase(account, Path(sys.executable))
        raise NodeRefusesJob(f"user {account.name!r} may not execute {sys.executable}{where}")


def blocked_directory_phrase(account: Account, program: Path, advice: str = "install in an open directory") -> str:
    """The directory on the program's path that is closed to this user, as far as modes show; links are followed."""
    groups = os.getgrouplist(account.name, account.gid)
    directories = [*reversed(program.parents), *reversed(program.resolve().parents)]
    for directory in dict.fromkeys(directories):
        with contextlib.suppress(OSError):
            status = directory.stat()
            mine = 0o100 if status.st_uid == account.uid else 0o010 if status.st_gid in groups else 0o001
            if not status.st_mode & mine:
                mode = stat.S_IMODE(status.st_mode)
                return f", because {directory} (mode {mode:04o}) is closed to it; {advice}"
    return ", or cannot reach it"


def runner_environment(account: Account, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """A runner's environment: the agent's own without the agent's variables, with the values of its user."""
    variables = {name: value for name, value in environ.items() if not name.startswith(_AGENT_VARIABLE_PREFIXES)}
    if account.uid != os.geteuid():
        variables |= {"HOME": account.home, "USER": account.name, "LOGNAME": account.name, "SHELL": account.shell}
    return variables


@dataclass(frozen=True, slots=True)
class SpecBuilder:
    settings: NodeSettings
    rendezvous: Rendezvous
    devices: tuple[str, ...]

    def build(self, start: RunnerStart) -> RunnerSpec:
        job, settings, store = start.submission, self.settings, self.rendezvous
        return RunnerSpec(
            job.job,
            job.number,
            settings.node,
            start.slots,
            job.spec,
            submission=job.to_json().decode(),
            adopt_timeout_s=float(settings.adopt_timeout_s),
            drain_timeout_s=float(settings.drain_timeout_s),
            backend="etcd" if store.backend == "etcd" else "memory",
            endpoints=store.endpoints,
            tls=store.tls is not None,
            user=store.user,
            local_addr=store.local_addr,
            job_user=settings.user,
            commands=settings.limits.commands,
            directories=None if (below := settings.limits.directories) is None else tuple(map(str, below)),
            devices=self.devices,
            min_nodes=job.min_nodes,
            max_nodes=job.max_nodes,
        )

    def secrets(self) -> StoreSecrets:
        """Read each time, because certificates are replaced while the agent runs. Raises OSError."""
        tls = self.rendezvous.tls
        paths = (None, None, None) if tls is None else (tls.ca, tls.cert, tls.key)
        ca, cert, key = (None if path is None else path.read_text(encoding="utf-8", errors="replace") for path in paths)
        return StoreSecrets(self.rendezvous.password, ca, cert, key)

    def cgroup_limits(self, spec: RunnerSpec) -> dict[str, int]:
        """The limits of the job's control group by controller; {}: it needs none."""
        return limits.cgroup_limits(self.settings.limits, from_json(spec.job_file))

    def account(self, spec: RunnerSpec) -> Account:
        """The user it runs as. Raises UsageError for a job whose user this node may not or cannot run.

        The runner checks the job's paths: their file systems may never answer.
        """
        job = from_json(spec.job_file)
        if (refusal := limits.user_refusal(self.settings.limits, job, self.settings.user)) is not None:
            raise UsageError(str(refusal))
        return Account.of(job.user or self.settings.user)
