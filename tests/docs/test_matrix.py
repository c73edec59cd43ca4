"""README's table of Pythons and torches is the one that `make matrix` has written from what it ran."""

from __future__ import annotations

import json

from tests import matrix


def test_readme_has_the_table_of_the_results() -> None:
    text = matrix.README.read_text()
    assert matrix.with_table(text, json.loads(matrix.RESULTS.read_text())) == text, "python -m tests.matrix --table"


def test_a_cell_says_what_ran() -> None:
    ran = {"python": "3.12.1", "torch": "2.13.0+cpu", "passed": 1234, "passed_alone": [], "failed": []}
    assert matrix.told(ran) == "2.13.0: 1,234 passed"
    assert matrix.told(ran | {"passed_alone": ["a", "b"]}) == "2.13.0: 1,234 passed (2 on a second try)"
    assert matrix.told(ran | {"failed": ["a", "b"]}) == "2.13.0: 1,234 passed, 2 failed"
    assert matrix.told({"not_had": "no wheels"}) == "no such build"
    text = f"before {matrix.FROM}old{matrix.TO} after"
    table = matrix.with_table(text, {"3.12-2.13.0": ran, "3.14-2.6.0": {"not_had": "no wheels"}})
    assert "| 3.12.1 | not run | 2.13.0: 1,234 passed | not run |" in table and table.startswith("before ")
    assert "| 3.14 | no such build | not run | not run |" in table and "old" not in table
