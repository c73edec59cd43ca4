"""Which evidence there is: a log directory, a round's folder, or a folder of evidence -> folders, newest last.

People give whatever path they have at hand. The search goes two folders deep.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from elasticd_agent.hangs.collector.request import VERDICT_FILE
from elasticd_agent.system import bounded_io as files

_ROUND = re.compile(r"round-([1-9][0-9]{0,9})")
_FOLDERS = ("evidence", "dump")
_OURS = re.compile(r"verdict\.json|reports-.*\.jsonl|evidence-.*\.json|rank-\d+\.(?:json|flight\.json)")
"""rank-R.json is of an earlier version."""


@dataclass(frozen=True, slots=True)
class EvidenceFolder:
    """A folder that holds evidence. `logs`: the folder its round's folder is in, if that can be told."""

    round: int
    path: Path
    names: tuple[str, ...]
    logs: Path | None = None

    @property
    def has_verdict(self) -> bool:
        return VERDICT_FILE in self.names

    @property
    def is_dump(self) -> bool:
        return self.path.name.startswith("dump")

    @property
    def what(self) -> str:
        return "hung" if self.has_verdict else "dumped" if self.is_dump else "suspected"


def find_folders(directory: Path) -> list[EvidenceFolder]:
    """Every folder of evidence at or below `directory`, by round."""
    inside = files.entry_names(directory)
    if any(_is_evidence(name) for name in inside):
        return [_place(directory, inside)]
    folders = _in_round(directory, inside)
    for name in inside:
        if _ROUND.fullmatch(name):
            folders += _in_round(directory / name, files.entry_names(directory / name))
    return sorted(folders, key=lambda folder: (folder.round, not folder.is_dump))


def choose_folder(found: list[EvidenceFolder]) -> EvidenceFolder | None:
    """The one to show by default: the newest that was judged, else the newest suspicion, else a dump."""
    return max(found, key=lambda folder: (folder.has_verdict, not folder.is_dump, folder.round), default=None)


def _in_round(directory: Path, inside: list[str]) -> list[EvidenceFolder]:
    folders = []
    for name in inside:
        if name in _FOLDERS:
            names = files.entry_names(directory / name)
            if any(_is_evidence(name) for name in names):
                folders.append(_place(directory / name, names))
    return folders


def _place(path: Path, names: list[str]) -> EvidenceFolder:
    known = _ROUND.fullmatch(path.absolute().parent.name)
    if known is None:
        return EvidenceFolder(0, path, tuple(names))
    return EvidenceFolder(int(known[1]), path, tuple(names), path.absolute().parent.parent)


def _is_evidence(name: str) -> bool:
    return _OURS.fullmatch(name) is not None
