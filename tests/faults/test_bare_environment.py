"""Jobs where nothing is installed but what `pip install .` brings: no numpy."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests import bare_environment
from tests.faults.conftest import StartJob
from tests.faults.job import REPOSITORY, Fault


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = bare_environment.make(tmp_path_factory.mktemp("bare"))
    missing = subprocess.run([found, "-c", "import numpy"], stderr=subprocess.PIPE, text=True)
    assert "No module named 'numpy'" in missing.stderr
    return found


SYSTEM = pytest.mark.system


@pytest.mark.parametrize("kind", ["ddp", *(pytest.param(kind, marks=SYSTEM) for kind in ("fsdp", "zero"))])
def test_ranks_start_warm_and_save_their_states_without_numpy(job: StartJob, python: Path, kind: str) -> None:
    """A dead rank's part of a sharded model is lost, so the state is that of the only save: no other can delay it."""
    script = ("donor.py",) if kind == "ddp" else ("sharded.py", "--kind", kind, "--every", "10")
    how = {"flags": ["--checkpoint-dir", "checkpoints"], "python": python}
    run = job(*script, "--steps", "30", faults=[Fault(1, 14, "SIGKILL")], **how)
    assert run.wait() == 0
    assert [event["warm"] for event in run.events("group_started")] == [True, True]
    resumed = run.event("resumed", round=2)
    assert resumed["step"] == (13 if kind == "ddp" else 10), resumed
    assert ("after the fault" in resumed["reason"]) == (kind == "ddp")


def test_library_calls_no_function_of_torch_that_needs_numpy() -> None:
    """Integrations may: the packages that they are for depend on numpy."""
    library = REPOSITORY / "elasticd"
    needs = re.compile(r".*(?:\.numpy\(|dist\.\w+_object).*")
    files = [path for path in library.rglob("*.py") if path.parent.name != "integrations"]
    assert files
    assert [f"{path.name}: {line}" for path in files for line in needs.findall(path.read_text())] == []
