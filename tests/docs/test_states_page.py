"""docs/states.md and the diagram in docs/architecture.md, compared with the table of transitions."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from docs.generate import states
from elasticd_agent.job.state_machine import TRANSITIONS
from elasticd_agent.model.messages import Phase

DOCS = Path(__file__).parents[2] / "docs"


def test_states_page_matches_the_table() -> None:
    assert (DOCS / "states.md").read_text() == states.page(), "make docs"


def test_architecture_diagram_matches_the_table() -> None:
    text = (DOCS / "architecture.md").read_text()
    assert text.count(states.FROM) == text.count(states.TO) == 1
    assert text == states.with_diagram(text), "make docs"
    assert "    Stopping --> Running\n" in text


def test_table_names_every_phase() -> None:
    assert set(TRANSITIONS) == set(get_args(Phase))
