"""Finds the operator's own checks: executables in a directory, as with run-parts.

They run as the agent's user, often root, so only root and that user may be able to write them.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from elasticd_daemon.health.result import CheckResult, skipped

_PLUGIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_BACKUP_SUFFIXES = (
    ".bak",
    ".orig",
    ".rej",
    ".swp",
    ".dpkg-old",
    ".dpkg-dist",
    ".dpkg-new",
    ".rpmsave",
    ".rpmnew",
    ".md",
)
"""Left behind by editors and package managers."""
MAX_PLUGINS = 64
PATH_VARIABLE = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def check_name(plugin: Path) -> str:
    return f"plugin {plugin.name}"


def find(directory: Path) -> tuple[list[Path], list[CheckResult]]:
    """The plugins by name, none in a missing directory; and a skipped result for each one that is not run."""
    try:
        why = _unsafe_reason(directory, directory.stat())
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [skipped("plugins", f"{directory} cannot be read: {error.strerror}")]
    if why:
        return [], [skipped("plugins", f"none is run: {directory} {why}")]
    run: list[Path] = []
    refused: list[CheckResult] = []
    for path in (
        directory / name for name in names if _PLUGIN_NAME.fullmatch(name) and not name.endswith(_BACKUP_SUFFIXES)
    ):
        try:
            what = path.stat()
        except OSError as error:
            refused.append(skipped(check_name(path), f"not run: {path} cannot be read: {error.strerror}"))
            continue
        if stat.S_ISDIR(what.st_mode):
            continue
        why = _unsafe_reason(path, what) or ("is not a file" if not stat.S_ISREG(what.st_mode) else "")
        why = why or ("" if os.access(path, os.X_OK) else "is not executable; chmod +x it, or remove it")
        why = why or (f"is beyond the limit of {MAX_PLUGINS}" if len(run) == MAX_PLUGINS else "")
        if why:
            refused.append(skipped(check_name(path), f"not run: {path} {why}"))
        else:
            run.append(path)
    return run, refused


def environment(node: str, slots: int) -> dict[str, str]:
    """The whole environment of a plugin."""
    return {"PATH": PATH_VARIABLE, "LANG": "C.UTF-8", "HOME": "/", "ELASTICD_NODE": node, "ELASTICD_SLOTS": str(slots)}


def _unsafe_reason(path: Path, what: os.stat_result) -> str:
    if what.st_mode & stat.S_IWOTH:
        return f"is writable by everybody; chmod o-w {path}"
    if what.st_uid not in (0, os.geteuid()):
        return f"belongs to user {what.st_uid}, not to root or the agent's user"
    return ""
