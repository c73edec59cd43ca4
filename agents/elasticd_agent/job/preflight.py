"""Checks on this machine, before anything is started, that a job can run.

A missing script, a directory that is a file or a port in use is one line within a tenth of a second, and not a
traceback from four workers. Nothing is changed: no file is created, no port kept, no module of the user imported.

A check refuses only what would certainly fail. Where the answer may change until the workers start, or differs between
this process and them (another interpreter, a file system that is read-only for a moment, a directory that its first
writer creates), the check passes: a false refusal would keep a healthy job from starting, and a failure later has a
sentence as well.

Each check names the option and quotes the value, since a wrong value often looks right: a trailing space, a relative
path in another directory.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from elasticd.checkpointing.storage.object_url import missing_package_reason
from elasticd.errors import UsageError
from elasticd_agent.model.job import EntrypointMode, JobSpec, RunnerSettings, Tls
from elasticd_agent.store import tls as certificate_files


def check(spec: JobSpec, settings: RunnerSettings, environ: Mapping[str, str]) -> None:
    """Check everything that the job needs on this machine. Raises UsageError for the first obstacle."""
    path = environ.get("PATH")
    _check_workdir(spec.cwd)
    if spec.mode is not EntrypointMode.EXEC and shutil.which(spec.python, path=path) is None:
        raise UsageError(f"the Python interpreter {spec.python!r} (PYTHON_EXEC) cannot be found or executed")
    if spec.mode is EntrypointMode.SCRIPT:
        _check_script(spec)
    elif spec.mode is EntrypointMode.MODULE:
        _check_module(spec)
    else:
        _check_program(spec, path)
    if spec.mode is not EntrypointMode.EXEC:
        _check_preloaded(spec, environ)
    _check_directory("--checkpoint-dir", spec.checkpoint_dir, read_only=True)
    if spec.checkpoint_dir is not None and (why := missing_package_reason(spec.checkpoint_dir)):
        raise UsageError(f"--checkpoint-dir: {why}")
    if spec.log_dir != Path(os.devnull):
        _check_directory("--log-dir", spec.log_dir)
    _check_appendable("--event-log", settings.event_log, spec.log_dir)
    if spec.master_port is not None or spec.master_addr != "localhost":
        _check_port("the workers' store", spec.master_addr, spec.master_port or 0, may_come=True)
    if settings.metrics_port is not None:
        _check_port("--metrics-port", settings.metrics_addr, settings.metrics_port)
    if spec.rendezvous.backend != "memory" and spec.rendezvous.local_addr is not None:
        _check_port("--local-addr", spec.rendezvous.local_addr, 0)
    if spec.rendezvous.tls is not None:
        _check_tls(spec.rendezvous.tls)


def _check_workdir(path: Path) -> None:
    """Check that the working directory exists and can be entered."""
    try:
        mode = _file_mode(path)
    except PermissionError:
        mode = stat.S_IFDIR  # behind a directory without access
    if not stat.S_ISDIR(mode):
        raise UsageError(f"the working directory {str(path)!r} {'is a file' if mode else 'does not exist'}")
    if not os.access(path, os.X_OK, effective_ids=True):
        raise UsageError(f"the working directory {str(path)!r} cannot be entered: permission denied")


def _file_mode(path: Path) -> int:
    """0 if there is nothing. Raises PermissionError where a directory on the way has no access; the methods of Path
    answer False to that from Python 3.14 on.
    """
    try:
        return path.stat().st_mode
    except PermissionError:
        raise
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return 0
    except OSError as error:  # as of a file server that is away
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}") from None


def _check_script(spec: JobSpec) -> None:
    """Check that the script exists and can be read; a directory needs a `__main__.py`, as for Python itself."""
    try:
        _check_script_file(spec)
    except PermissionError:
        raise UsageError(f"the script {spec.entrypoint!r} cannot be reached: permission denied") from None


def _check_script_file(spec: JobSpec) -> None:
    script = spec.cwd / spec.entrypoint
    if stat.S_ISDIR(_file_mode(script)):
        if not (script / "__main__.py").is_file():
            raise UsageError(f"the script {spec.entrypoint!r} is a directory without a __main__.py")
        script /= "__main__.py"
    if spec.entrypoint.startswith("-"):
        raise UsageError(f"the script's name is missing before {spec.entrypoint!r}")
    mode = _file_mode(script)
    if not mode:
        raise UsageError(f"the script {spec.entrypoint!r} does not exist{_cwd_phrase(spec)}")
    if not stat.S_ISREG(mode):
        raise UsageError(f"the script {spec.entrypoint!r} is not a file")
    if not os.access(script, os.R_OK):
        raise UsageError(f"the script {spec.entrypoint!r} cannot be read: permission denied")


def _check_module(spec: JobSpec) -> None:
    """Check that `-m NAME` is a module's name, and that its package can be found without importing anything."""
    name = spec.entrypoint
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"-m {name!r}: a module's name looks like pkg.module; without -m it is a script's path")
    if name.endswith(".py") and (spec.cwd / name).is_file():
        raise UsageError(f"-m {name}: that is a file, -m takes a module's name; write -m {name[:-3]}, or leave -m out")
    if not _module_may_exist(spec, name, [str(spec.cwd)]):
        raise UsageError(
            f"-m {name}: there is no module {_top_package(name)!r} in {str(spec.cwd)!r} or on Python's path"
        )


def _check_preloaded(spec: JobSpec, environ: Mapping[str, str]) -> None:
    """Check the names of `--preload` before the modules ahead of them, such as torch, have been imported."""
    script = spec.cwd / spec.entrypoint
    first = spec.cwd if spec.mode is EntrypointMode.MODULE else script if script.is_dir() else script.resolve().parent
    folders = [str(first), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    for name in spec.preload:
        if not _module_may_exist(spec, name, folders):
            raise UsageError(
                f"--preload {name}: there is no module {_top_package(name)!r} in {folders[0]!r} or on Python's path"
            )


def _module_may_exist(spec: JobSpec, name: str, folders: list[str]) -> bool:
    """False if the module's package is neither in the folders nor on Python's path. It imports nothing."""
    if spec.python != sys.executable:
        return True  # another interpreter has other modules
    import importlib.machinery
    import importlib.util

    if importlib.machinery.PathFinder.find_spec(_top_package(name), folders) is not None:
        return True
    try:
        return importlib.util.find_spec(_top_package(name)) is not None  # for a name without dots this imports nothing
    except ValueError:  # it is loaded but has no spec, as __main__
        return True


def _top_package(name: str) -> str:
    return name.partition(".")[0]


def _check_program(spec: JobSpec, path: str | None) -> None:
    name = spec.entrypoint
    program = shutil.which(str(spec.cwd / name) if os.sep in name else name, path=path)
    if program is None:
        raise UsageError(f"the program {name!r} (--no-python) cannot be found or is not executable")


def _cwd_phrase(spec: JobSpec) -> str:
    return "" if os.path.isabs(spec.entrypoint) else f" in {str(spec.cwd)!r}"


def _check_directory(option: str, path: Path | None, *, read_only: bool = False) -> None:
    """It need not exist: its first writer creates it. `read_only`: its file system may be, for a while."""
    if path is None:
        return
    try:
        for place in (path, *path.parents):
            mode = _file_mode(place)
            if stat.S_ISDIR(mode):
                writable = os.access(place, os.W_OK | os.X_OK, effective_ids=True)
                if not writable and not (read_only and os.statvfs(place).f_flag & os.ST_RDONLY):
                    raise UsageError(f"{option} {str(path)!r}: no permission to write to {str(place)!r}")
                return
            if mode:
                raise UsageError(f"{option} {str(path)!r}: {str(place)!r} is a file, not a directory")
    except PermissionError:
        raise UsageError(f"{option} {str(path)!r} cannot be reached: permission denied") from None


def _check_appendable(option: str, path: Path | None, made: Path | None) -> None:
    """Check that a file can be appended to. `made` is a directory that will be created, so a file
    in it may be missing.
    """
    if path is None or (path.parent == made and not made.exists()):
        return
    if path.is_dir():
        raise UsageError(f"{option} {str(path)!r} is a directory; name a file")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {str(path)!r}: there is no directory {str(path.parent)!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {str(path)!r} cannot be written: permission denied")


def _check_tls(tls: Tls) -> None:
    """Check that the TLS files exist, can be read, and fit together: a key that is not the
    certificate's is found here.
    """
    for name, path in (("cacert", tls.ca), ("cert", tls.cert), ("key", tls.key)):
        if path is not None:
            _check_readable(f"--rdzv-conf {name}", path)
    if (problem := certificate_files.find_problem(tls)) is not None:
        which, why = problem
        raise UsageError(f"--rdzv-conf {'cacert' if which == 'ca' else which} {why}")


def _check_readable(option: str, path: Path) -> None:
    if not path.exists():
        raise UsageError(f"{option} {str(path)!r} does not exist")
    if not path.is_file():
        raise UsageError(f"{option} {str(path)!r} is not a file")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{option} {str(path)!r} cannot be read: permission denied")


def _check_port(what: str, address: str, port: int, *, may_come: bool = False) -> None:
    """Check that a port can be bound on the address, or that the address is this machine's where the port is 0.

    `may_come`: a name that is not known yet passes, as the job waits for it.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        if may_come and isinstance(error, OSError):
            return
        raise UsageError(f"{what}: the address {address!r} cannot be resolved") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind(target)
        except OSError as error:
            raise UsageError(f"{what}: {_port_error_phrase(error, address, port)}") from None


def _port_error_phrase(error: OSError, address: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {address} is in use; choose another, or leave it out for a free one"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{address} is not an address of this machine"
    return f"port {port} on {address} cannot be used: {error.strerror}"
