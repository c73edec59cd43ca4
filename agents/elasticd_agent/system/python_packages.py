"""The version of a package that another Python would import, from directory names: nothing is imported or run."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

_SITE_PATTERNS = ("lib*/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")
"""Below a prefix: venv, conda and python.org; Debian's own and pip's there."""


def installed_version(package: str, python: str, environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Major and minor version; None if it is not found where `python` looks first."""
    for site in _site_directories(python, environ):
        for info in site.glob(f"{package}-*-info"):
            version = re.match(rf"{re.escape(package)}-(\d+)\.(\d+)", info.name)
            if version:
                return int(version[1]), int(version[2])
    return None


def _site_directories(python: str, environ: Mapping[str, str]) -> Iterator[Path]:
    yield from (Path(entry) for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry)
    program = shutil.which(python, path=environ.get("PATH"))
    if program is not None:
        prefix = Path(program).parent.parent
        yield from (site for pattern in _SITE_PATTERNS for site in prefix.glob(pattern))
