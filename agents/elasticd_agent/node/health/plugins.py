"""The operator's own checks: executables in a directory, as run-parts has them. Which are run, and which are refused.

They run as the daemon's user, which is often root, so nobody else may be able to put words into their mouths. Nothing
is run here.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from elasticd_agent.node.health.result import CheckResult, skipped

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
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
"""By editors and package managers: a person who edits a check does not mean its backup to run as well."""
MAX_PLUGINS = 64
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class PluginList:
    """`refused`: those that are not run, with a sentence each."""

    run: tuple[Path, ...]
    refused: tuple[CheckResult, ...]


def check_name(plugin: Path) -> str:
    return f"plugin {plugin.name}"


def find(directory: Path) -> PluginList:
    """By name. A directory that is not there has none."""
    try:
        why = _unsafe(directory, directory.stat())
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return PluginList((), ())
    except OSError as error:
        return PluginList((), (skipped("plugins", f"{directory} cannot be read: {error.strerror}"),))
    if why:
        return PluginList((), (skipped("plugins", f"none is run: {directory} {why}"),))
    run: list[Path] = []
    refused: list[CheckResult] = []
    for path in (directory / name for name in names if _NAME.fullmatch(name) and not name.endswith(_BACKUP_SUFFIXES)):
        try:
            what = path.stat()
        except OSError as error:
            refused.append(skipped(check_name(path), f"it is not run: {path} cannot be looked at: {error.strerror}"))
            continue
        if stat.S_ISDIR(what.st_mode):
            continue
        why = _unsafe(path, what) or ("is not a file" if not stat.S_ISREG(what.st_mode) else "")
        why = why or ("" if os.access(path, os.X_OK) else "is not executable; chmod +x it, or take it away")
        why = why or ("is one too many" if len(run) == MAX_PLUGINS else "")
        if why:
            refused.append(skipped(check_name(path), f"it is not run: {path} {why}"))
        else:
            run.append(path)
    return PluginList(tuple(run), tuple(refused))


def environment(node: str, slots: int) -> dict[str, str]:
    """All that a plugin gets."""
    return {"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/", "ELASTICD_NODE": node, "ELASTICD_SLOTS": str(slots)}


def _unsafe(path: Path, what: os.stat_result) -> str:
    if what.st_mode & stat.S_IWOTH:
        return f"can be written by everybody; chmod o-w {path}"
    if what.st_uid not in (0, os.geteuid()):
        return f"belongs to user {what.st_uid}, not to root or to the daemon's user"
    return ""
