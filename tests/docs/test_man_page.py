"""docs/man/elasticd.1 is what the parsers say, and a man page."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from docs.generate import man
from elasticd_agent.cli.main import COMMANDS
from tests.docs.pages import DOCS


def test_man_page_is_up_to_date() -> None:
    assert (DOCS / "man" / "elasticd.1").read_text() == man.page(), "make docs"
    assert [line.split()[2] for line in man.page().splitlines() if line.startswith(".SS ")] == list(COMMANDS)


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff")
def test_man_page_formats_without_a_warning() -> None:
    command = ["groff", "-man", "-Tutf8", "-ww", "-K", "utf8", str(DOCS / "man" / "elasticd.1")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
