"""The places of our own files, and the programs that are started by path.

A job starts helpers and imports modules long after its start, also after an upgrade has replaced the installation under
it. Therefore a runner works from a copy (docs/adr/0007): it is started from one, or `switch_to_copy` redirects it to
one.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import elasticd
import elasticd_agent

_PROGRAM_PATHS = {
    "owner": "workers/launcher/owner.py",
    "template": "workers/launcher/template.py",
    "hidden_modules": "workers/launcher/hidden_modules.py",
    "debug_hooks": "workers/launcher/debug_hooks.py",
    "console_streams": "workers/launcher/console_streams.py",
    "cpu_binding": "workers/launcher/cpu_binding.py",
    "start_up_hook": "workers/launcher/hook",
    "tcp_store": "system/network/tcp_store.py",
    "nvml": "system/gpus/nvml_process.py",
    "evidence_collector": "hangs/collector/__main__.py",
    "c10d_fork_server": "store/c10d/fork_server.py",
}
_MAIN_SOURCE = """\
import sys
from elasticd_agent.cli.main import main
sys.exit(main())
"""
_DAEMON_PACKAGE = "elasticd_daemon"
_COMPILED_SUFFIX = f".{sys.implementation.cache_tag}.pyc"


def program(name: str) -> str:
    """The path of a file of ours that another interpreter runs or loads. Raises KeyError for an unknown name."""
    return str(_packages()["elasticd_agent"] / _PROGRAM_PATHS[name])


def library_file(module: str) -> str:
    """The path of a module of the library, "elasticd.heartbeat.record"."""
    return str(_packages()["elasticd"] / f"{module.partition('.')[2].replace('.', '/')}.py")


def import_path() -> list[str]:
    """The directories on sys.path from which the packages are imported: one or two."""
    return list(dict.fromkeys(str(package.parent) for package in _packages().values()))


def digest() -> str:
    """Identifies the content of all packages. Raises OSError."""
    return _digest(_packages())


def is_copy(directory: Path, digest: str) -> bool:
    """True if `directory` is a complete copy with this digest."""
    try:
        return _digest({name: directory / name for name in _packages()}) == digest
    except OSError:
        return False


def copy_to(directory: Path) -> None:
    """Copy all packages into a new `directory`; `python DIRECTORY ...` is then the command `elasticd`.

    Every user may read the copy, only this one may change it. Compiled files come along, and stay valid because the
    sources keep their times: a process starts as fast as from the installation. Raises OSError.
    """
    _make_directory(directory)
    for name, package in _packages().items():
        for source, _, files in os.walk(package):
            target = directory / name / os.path.relpath(source, package)
            _make_directory(target)
            for file in files:
                if not file.endswith(".pyc") or file.endswith(_COMPILED_SUFFIX):
                    times = os.stat(os.path.join(source, file))
                    _write(target / file, Path(source, file).read_bytes())
                    os.utime(target / file, ns=(times.st_atime_ns, times.st_mtime_ns))
    _write(directory / "__main__.py", _MAIN_SOURCE.encode())
    try:  # `importlib.metadata` finds this version first, whatever is installed by then
        version = metadata.version("elasticd")
    except metadata.PackageNotFoundError:
        return
    _make_directory(info := directory / f"elasticd-{version}.dist-info")
    _write(info / "METADATA", f"Metadata-Version: 2.1\nName: elasticd\nVersion: {version}\n".encode())


def switch_to_copy(directory: Path) -> None:
    """Import and start programs from `directory` from now on: it is a copy of the code that this process runs."""
    packages = set(_packages())
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and hasattr(module, "__path__"):
            module.__path__[:] = [str(directory / name.replace(".", "/"))]


def _packages() -> dict[str, Path]:
    agent = Path(elasticd_agent.__path__[0])
    # The daemon is found, not imported: `elasticd run` does not need it.
    return {
        "elasticd": Path(elasticd.__path__[0]),
        "elasticd_agent": agent,
        _DAEMON_PACKAGE: agent.with_name(_DAEMON_PACKAGE),
    }


def _digest(packages: dict[str, Path]) -> str:
    total = hashlib.sha256()
    for name, package in packages.items():
        for file in sorted(_package_files(package)):
            total.update(f"{name}/{file.relative_to(package)}\0".encode())
            total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:16]


def _package_files(package: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(package):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(folder, file) for file in files)


def _make_directory(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o755)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o644)
