"""`make recording`: runs the demo and draws what it printed, in its own time, as docs/demo.svg.

The picture is plain SVG with CSS: every line appears when it was printed, pauses are cut to two seconds. Where nothing
moves (a reader that asked for less motion), all lines are there at once.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path

Line = tuple[float, str]
"""Seconds since the start, and what was printed then."""
COLUMNS, ROWS, PAUSE_S = 120, 26, 2.0
WIDTH, HEIGHT, LEFT = 7.23, 17, 14
"""Of a character, a row and the margin, in pixels."""
COLORS = {"demo: SIGKILL": "#ff7b72", "demo:": "#7ee787", "warning:": "#ff7b72", "[rank": "#6e7681", "$": "#ffffff"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "demo.svg")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        code, lines = recorded([sys.executable, "-u", str(Path(__file__).with_name("demo.py"))], Path(folder))
    if code == 0:
        options.out.write_text(drawn([(0.0, "$ make demo"), *lines]))
        print(f"recording: {options.out}, {len(lines)} lines")
    return code


def recorded(command: list[str], folder: Path) -> tuple[int, list[Line]]:
    """The command's exit code and its output, both streams."""
    began, lines = time.monotonic(), []
    with subprocess.Popen(
        [*command, "--folder", str(folder / "demo-run"), "--picture", str(folder / "demo.png")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            for place in (folder, Path(__file__).parents[1]):
                line = line.replace(f"{place}/", "")
            lines.append((time.monotonic() - began, line.rstrip("\n")))
    return process.returncode, lines


def drawn(lines: list[Line]) -> str:
    shown = without_pauses(lines)
    width, height = round(COLUMNS * WIDTH + 2 * LEFT), (ROWS + 1) * HEIGHT + LEFT
    rows = [
        f'<text x="{LEFT}" y="{(number + 1) * HEIGHT}" style="animation-delay:{at:.2f}s" fill="{color(text)}">'
        f"{escape(cut(text))}</text>"
        for number, (at, text) in enumerate(shown)
    ]
    whole = max(at for at, _ in shown) + 0.01
    moves = "".join(
        f"{100 * at / whole:.2f}%{{transform:translateY({-HEIGHT * (number - ROWS + 1)}px)}}"
        for number, (at, _) in enumerate(shown)
        if number >= ROWS
    )
    end = -HEIGHT * max(0, len(shown) - ROWS)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<title>A recording of make demo</title>
<style>
text{{font:12px ui-monospace,Menlo,Consolas,monospace;white-space:pre;opacity:0;animation:shown 0s linear forwards}}
@keyframes shown{{to{{opacity:1}}}}
@keyframes moved{{0%{{transform:none}}{moves}100%{{transform:translateY({end}px)}}}}
#all{{animation:moved {whole:.2f}s step-end forwards}}
@media (prefers-reduced-motion:reduce){{text{{opacity:1;animation:none}}}}
</style>
<rect width="100%" height="100%" rx="8" fill="#0d1117"/>
<svg width="{width}" height="{height}"><g id="all">
{chr(10).join(rows)}
</g></svg>
</svg>
"""


def without_pauses(lines: list[Line]) -> list[Line]:
    shown: list[Line] = []
    before = at = 0.0
    for moment, text in lines:
        at += min(moment - before, PAUSE_S)
        before = moment
        shown.append((at, text))
    return shown


def cut(text: str) -> str:
    """In one row, and with the time of day alone."""
    text = re.sub(r"^\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d)[+-]\d{4} ", r"\1 ", text)
    return text if len(text) <= COLUMNS else text[: COLUMNS - 1] + "…"


def color(text: str) -> str:
    return next((one for words, one in COLORS.items() if words in text), "#c9d1d9")


if __name__ == "__main__":
    sys.exit(main())
