"""docs/states.md, and the diagram in docs/architecture.md, are what docs/states.py makes of the table of moves."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import get_args

from elasticd_agent.job.state_machine import TRANSITIONS
from elasticd_agent.model.messages import Phase

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_in_step_with_the_table() -> None:
    page = runpy.run_path(str(DOCS / "states.py"))["page"]
    assert (DOCS / "states.md").read_text() == page(), "run: python docs/states.py"


def test_the_diagram_on_the_page_about_architecture_is_in_step() -> None:
    made = runpy.run_path(str(DOCS / "states.py"))
    text = (DOCS / "architecture.md").read_text()
    assert text.count(made["FROM"]) == text.count(made["TO"]) == 1
    assert text == made["with_diagram"](text), "run: python docs/states.py"
    assert "    Stopping --> Running\n" in text


def test_the_table_names_every_phase() -> None:
    assert set(TRANSITIONS) == set(get_args(Phase))
