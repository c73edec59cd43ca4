"""Where our own files are. The only module that knows which programs are started by path.

A running job starts helpers long after it began, also after the installation was replaced under it: `snapshot` copies
what it may need. Everything is found beside this file, so a process that runs from a snapshot stays in it.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

_AGENT = Path(__file__).parents[1]
_PROGRAMS = {
    "owner": "workers/launcher/owner.py",
    "template": "workers/launcher/template.py",
    "hidden_modules": "workers/launcher/hidden_modules.py",
    "debug_hooks": "workers/launcher/debug_hooks.py",
    "start_up_hook": "workers/launcher/hook",
    "tcp_store": "system/tcp_store.py",
    "nvml": "system/nvml_process.py",
    "evidence_collector": "hangs/collector/__main__.py",
    "c10d_fork_server": "store/c10d/helper_process.py",
    "all_reduce": "node/health/all_reduce_process.py",
}


def program(name: str) -> str:
    """The path of a file of ours that another interpreter runs or loads. Raises KeyError for an unknown name."""
    return str(_AGENT / _PROGRAMS[name])


def library_file(module: str) -> str:
    """The path of a module of the library, "elasticd.heartbeat.record"."""
    return str(_library() / f"{module.partition('.')[2].replace('.', '/')}.py")


def import_path() -> list[str]:
    """The directories on sys.path from which elasticd_agent and elasticd are imported: one or two."""
    return list(dict.fromkeys([str(_AGENT.parent), str(_library().parent)]))


def snapshot(directory: Path) -> str:
    """Copy both packages into `directory`. Returns what to put first on PYTHONPATH to run from the copy."""
    for package in (_AGENT, _library()):
        shutil.copytree(package, directory / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    return str(directory)


def _library() -> Path:
    spec = find_spec("elasticd")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
