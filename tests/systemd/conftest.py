"""`machine` boots; `rootfs` is the tree of all machines. The tests skip with a reason where no machine can boot."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.systemd.machine import Nspawn

REPOSITORY = Path(__file__).resolve().parents[2]
_HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these are the slow kind; the limit is for the first, which may have to make the tree."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.system)
            item.add_marker(pytest.mark.timeout(300 if item.get_closest_marker("timeout") is None else 900))


@pytest.fixture(scope="session")
def rootfs() -> Path:
    kept = REPOSITORY / ".venv" / "booted"
    made = subprocess.run([str(_HERE / "make-rootfs"), str(kept), sys.executable], stderr=subprocess.PIPE, text=True)
    if made.returncode == 3:
        pytest.skip(f"no systemd can be booted here: {made.stderr.strip().splitlines()[-1]}")
    assert made.returncode == 0, made.stderr
    return kept / "root"


@pytest.fixture(scope="module")
def machine(rootfs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nspawn]:
    """One that all tests of a module share. This interpreter, with all that is installed for it, runs there as well."""
    layer = tmp_path_factory.mktemp("machine")
    shows = [Path(sys.base_prefix), REPOSITORY]
    with Nspawn(rootfs, layer, shows=[path for path in shows if not path.is_relative_to("/usr")]) as made:
        # A home may be closed to others, and an interpreter below it with it.
        for folder in {parent for path in shows for parent in path.parents if parent != Path("/")}:
            made.run("chmod", "o+x", str(folder))
        yield made
    shutil.rmtree(layer, ignore_errors=True)
