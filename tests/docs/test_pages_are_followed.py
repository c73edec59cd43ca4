"""Each block of shell commands on the pages that a new user follows is run by a test, or this names the reason why not.

A block that is added to a page turns this red until a test follows it.
"""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT, blocks

QUICKSTART = "tests/docs/test_quickstart.py"
BOOTED = "tests/systemd/test_pages.py"
PARSED = "tests/docs/test_operations.py"
KUBERNETES = "tests/deploy/k8s/test_page.py"

FOLLOWED = {
    "quickstart.md": {
        "The demo": [QUICKSTART],
        "Your own environment": [QUICKSTART],
        "A laptop": [QUICKSTART, QUICKSTART, QUICKSTART],
        "Two nodes": [QUICKSTART, QUICKSTART],
        "A service": [QUICKSTART, QUICKSTART],
        "A service under systemd": [BOOTED, BOOTED],
    },
    "systemd.md": {"The agent as a systemd service": [BOOTED]},
    "operations.md": {
        "Install": [BOOTED, BOOTED],
        "Watch": ["tests/deploy/prometheus/test_rules.py"],
        "Upgrade": [BOOTED, PARSED],
    },
}


@pytest.mark.parametrize("page", FOLLOWED)
def test_every_block_of_the_page_has_a_test(page: str) -> None:
    found = {heading: len(commands) for heading, commands in blocks(page).items()}
    expected = {heading: len(tests) for heading, tests in FOLLOWED[page].items()}
    assert {heading: found.get(heading) for heading in expected} == expected
    if page != "operations.md":  # its runbook is parsed by test_operations
        assert found.keys() == expected.keys()
    for tests in FOLLOWED[page].values():
        assert all((ROOT / test).exists() for test in tests)


def test_kubernetes_page_runs_as_a_whole() -> None:
    assert re.search(r"made\.run\(.*blocks\(\)", (ROOT / KUBERNETES).read_text())
