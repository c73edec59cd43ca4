"""Which evidence there is: a log directory, a round's folder, or a folder of evidence -> folders, newest last.

People give whatever path they have at hand. The search goes two folders deep. What was written to $TMPDIR, because its
own directory could not be written, is found by the note that the agent left there.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from elasticd_agent.hangs.collector.request import REDIRECTED, VERDICT, fallback_directory
from elasticd_agent.system import bounded_io as files

_ROUND = re.compile(r"round-([1-9][0-9]{0,9})")
_FOLDER = re.compile(r"(evidence|dump)(?:[.-](\d+))?")
_OURS = re.compile(r"verdict\.json|reports-.*\.jsonl|evidence-.*\.json|rank-\d+\.(?:json|flight\.json)")
"""rank-R.json is of an earlier version."""


@dataclass(frozen=True, slots=True)
class EvidenceFolder:
    """A folder that holds evidence. `logs`: the folder its round's folder is in, if that can be told."""

    round: int
    path: Path
    names: tuple[str, ...]
    logs: Path | None = None
    elsewhere: EvidenceFolder | None = None  #: another part of it, which could not be written here

    def file(self, name: str) -> Path:
        """The path of the file: the part that is elsewhere is newer."""
        there = self.elsewhere is not None and name in self.elsewhere.names
        return (self.elsewhere if there and self.elsewhere is not None else self).path / name

    @property
    def has_verdict(self) -> bool:
        return VERDICT in self.names

    @property
    def is_dump(self) -> bool:
        return self.path.name.startswith("dump")

    @property
    def what(self) -> str:
        return "hung" if self.has_verdict else "dumped" if self.is_dump else "suspected"


def find_all(directory: Path) -> list[EvidenceFolder]:
    """Every folder as find_folders returns it, and those that belong at or below `directory` and were written
    elsewhere."""
    folders = {place.path.absolute(): place for place in find_folders(directory)}
    for origin, other in _redirected(directory):
        here = folders.get(origin)
        if here is None:
            folders[origin] = replace(other, logs=origin.parent.parent)
        else:
            folders[origin] = replace(here, names=tuple(sorted({*here.names, *other.names})), elsewhere=other)
    return sorted(folders.values(), key=_order)


def _redirected(directory: Path) -> Iterator[tuple[Path, EvidenceFolder]]:
    """Folders of this user's evidence elsewhere, with the folder at or below `directory` that each belongs to."""
    where = {os.path.abspath(directory), os.path.realpath(directory)}
    for base in dict.fromkeys(map(fallback_directory, (Path(tempfile.gettempdir()), Path("/tmp")))):
        try:
            if os.lstat(base).st_uid != os.getuid():
                continue
        except OSError:
            continue
        for place in (place for name in files.entry_names(base) for place in find_folders(base / name)):
            note = files.read_json(place.path / REDIRECTED)[0] if REDIRECTED in place.names else None
            origin = Path(str((note or {}).get("directory", "")))
            for above in where.intersection(map(str, (origin, *origin.parents))):
                yield Path(os.path.abspath(directory)) / origin.relative_to(above), place


def find_folders(directory: Path) -> list[EvidenceFolder]:
    """Every folder of evidence at or below `directory`, by round."""
    inside = files.entry_names(directory)
    if any(_is_evidence(name) for name in inside):
        return [_place(directory, inside)]
    folders = _in_round(directory, inside)
    for name in inside:
        if _ROUND.fullmatch(name):
            folders += _in_round(directory / name, files.entry_names(directory / name))
    return sorted(folders, key=_order)


def _order(place: EvidenceFolder) -> tuple[int, bool, int]:
    return place.round, not place.is_dump, _age(place)


def choose_folder(found: list[EvidenceFolder]) -> EvidenceFolder | None:
    """The one to show by default: the newest that was judged, else the newest suspicion, else a dump."""
    return max(found, key=lambda p: (p.has_verdict, not p.is_dump, p.round, _age(p)), default=None)


def _in_round(directory: Path, inside: list[str]) -> list[EvidenceFolder]:
    folders = []
    for name in inside:
        if _FOLDER.fullmatch(name):
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


def _age(place: EvidenceFolder) -> int:
    """Rotated folders are older: `evidence.2` before `evidence.1` before `evidence`."""
    rotated = _FOLDER.fullmatch(place.path.name)
    return -int(rotated[2]) if rotated is not None and rotated[2] else 0
