"""Reads bad_settings.txt and bad_jobs.txt: files in which something is wrong, and the sentence each of them gets."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def cases_of(name: str, **parts: str) -> list[tuple[str, str]]:
    """The text and the sentence of each case; a line that is the name of a part stands for that part."""
    found = []
    for case in (HERE / name).read_text().split("\n\n")[1:]:
        text, _, says = case.rpartition("=> ")
        for part, meaning in parts.items():
            text = re.sub(rf"^{part}\n", lambda _, meaning=meaning: meaning, text)
        found.append((text, says.rstrip("\n")))
    return found
