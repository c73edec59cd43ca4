"""`make recording` draws what a command has printed, each line at its time."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

from tests.examples.launching import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "examples"))
from recording import PAUSE_S, ROWS, drawn, recorded


def test_lines_appear_in_their_own_time(tmp_path: Path) -> None:
    prints = f"print('a < b, {tmp_path}/run, {REPOSITORY}/a.py'); import sys; sys.exit(3)"
    code, lines = recorded([sys.executable, "-c", prints], tmp_path)
    assert (code, [text for _, text in lines]) == (3, ["a < b, run, a.py"]), "no path of this machine"
    many = [
        (0.5, "2026-11-23 14:58:06+0000 elasticd: now"),
        (100.5, "x" * 200),
        *((101.0, str(n)) for n in range(ROWS)),
    ]
    root = ElementTree.fromstring(drawn(many))
    rows = [one for one in root.iter() if one.tag.endswith("}text")]
    assert [one.text for one in rows[:2]] == ["14:58:06 elasticd: now", "x" * 119 + "…"]
    delays = [float(re.findall(r"[\d.]+", one.attrib["style"])[0]) for one in rows]
    assert delays[:3] == [0.5, 0.5 + PAUSE_S, 1.0 + PAUSE_S]


def test_the_recording_shows_a_recovery() -> None:
    text = (REPOSITORY / "docs" / "demo.svg").read_text()
    assert "$ make demo" in text and "SIGKILL to rank" in text and "training again" in text and "exit code 0" in text
