"""Another version of elasticd, made of this one's source: what two versions do to each other is seen by running both.

A copy whose records say another version and have a field more each, as a real one's will. Nothing else of it differs.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.faults.job import REPOSITORY

FIELD = "mood"
_RECORDS = {
    "agents/elasticd_agent/model/records.py": ("Member", "Exclusion", "BudgetState", "Round", "NodeRecord", "Failure"),
    "agents/elasticd_agent/rendezvous/probe.py": ("ProbeAlive",),
    "agents/elasticd_agent/model/reports.py": ("HangReport",),
}


def neighbour(directory: Path, version: str) -> str:
    """A PYTHONPATH on which that version of elasticd is found."""
    for package in ("elasticd", "agents/elasticd_agent"):
        shutil.copytree(REPOSITORY / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, records in _RECORDS.items():
        path = directory / name
        text = path.read_text()
        for record in records:
            # after the last field: before the first method, or at the end of the class
            pattern = rf"(class {record}\(\w+\):\n.*?)(?=\n\n    def|\n\n    @|\n\n\n|\n\Z)"
            text, found = re.subn(pattern, rf'\1\n    {FIELD}: str = "good"', text, count=1, flags=re.DOTALL)
            assert found == 1, f"{record} in {name}"
        path.write_text(text)
    _replace(directory / "agents/elasticd_agent/model/codec.py", r'^VERSION = ".*"$', f'VERSION = "{version}"')
    return f"{directory}:{directory / 'agents'}"


def _replace(path: Path, pattern: str, by: str) -> None:
    text, found = re.subn(pattern, by, path.read_text(), count=1, flags=re.MULTILINE)
    assert found == 1, f"{pattern} in {path}"
    path.write_text(text)
