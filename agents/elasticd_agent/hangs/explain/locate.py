"""Which evidence there is: a log directory, a round's folder, or a folder of evidence -> folders, newest last.

People give whatever path they have at hand. The search goes two folders deep.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from elasticd_agent.hangs.collector.request import VERDICT_FILE
from elasticd_agent.system import bounded_io as files

_ROUND_NAME = re.compile(r"round-([1-9][0-9]{0,9})")
_FOLDER_NAMES = ("evidence", "dump")
_EVIDENCE_FILES = re.compile(r"verdict\.json|reports-.*\.jsonl|evidence-.*\.json|rank-\d+\.(?:json|flight\.json)")
"""rank-R.json is of an earlier version."""


@dataclass(frozen=True, slots=True)
class EvidenceFolder:
    """A folder that holds evidence. `log_dir`: the folder its round's folder is in, if that can be told."""

    round: int
    path: Path
    file_names: tuple[str, ...]
    log_dir: Path | None = None

    @property
    def has_verdict(self) -> bool:
        return VERDICT_FILE in self.file_names

    @property
    def is_dump(self) -> bool:
        return self.path.name.startswith("dump")

    @property
    def reason_in_words(self) -> str:
        return "hung" if self.has_verdict else "dumped" if self.is_dump else "suspected"


def find_folders(directory: Path) -> list[EvidenceFolder]:
    """Every folder of evidence at or below `directory`, by round."""
    inside = files.entry_names(directory)
    if any(_is_evidence_file(name) for name in inside):
        return [_folder_at(directory, inside)]
    folders = _folders_in(directory, inside)
    for name in inside:
        if _ROUND_NAME.fullmatch(name):
            folders += _folders_in(directory / name, files.entry_names(directory / name))
    return sorted(folders, key=lambda folder: (folder.round, not folder.is_dump))


def choose_default_folder(found: list[EvidenceFolder]) -> EvidenceFolder | None:
    """The one to show by default: the newest that was judged, else the newest suspicion, else a dump."""
    return max(found, key=lambda folder: (folder.has_verdict, not folder.is_dump, folder.round), default=None)


def _folders_in(directory: Path, inside: list[str]) -> list[EvidenceFolder]:
    folders = []
    for name in inside:
        if name in _FOLDER_NAMES:
            names = files.entry_names(directory / name)
            if any(_is_evidence_file(name) for name in names):
                folders.append(_folder_at(directory / name, names))
    return folders


def _folder_at(path: Path, names: list[str]) -> EvidenceFolder:
    known = _ROUND_NAME.fullmatch(path.absolute().parent.name)
    if known is None:
        return EvidenceFolder(0, path, tuple(names))
    return EvidenceFolder(int(known[1]), path, tuple(names), path.absolute().parent.parent)


def _is_evidence_file(name: str) -> bool:
    return _EVIDENCE_FILES.fullmatch(name) is not None
