"""Threads that a module asks for before it imports torch, in a worker forked from a template that has torch."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from elasticd_agent.workers.launcher.requests import VARIABLES_READ_AT_IMPORT
from elasticd_agent.workers.launcher.template import apply_environment_changes

MKL, OMP = "MKL_NUM_THREADS", "OMP_NUM_THREADS"
SETS: dict[str, dict[str, str]] = {
    "mkl": {MKL: "2"},
    "omp": {OMP: "2"},
    "both": {OMP: "3", MKL: "2"},
    "omp beside an mkl that is no number": {OMP: "2", MKL: "0"},
}
"""Each makes two threads."""


def threads_after(sets: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    given: list[int] = []
    monkeypatch.delenv(MKL, raising=False)
    monkeypatch.setenv(OMP, "1")
    before = dict(os.environ)
    for name, value in sets.items():
        monkeypatch.setenv(name, value)
    apply_environment_changes(SimpleNamespace(set_num_threads=given.append), VARIABLES_READ_AT_IMPORT.pattern, before)
    return given


@pytest.mark.parametrize("name", SETS)
def test_threads_follow_a_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(threads_after(SETS[name], monkeypatch)) == {2}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.system] * (n != "both")) for n in SETS])
def test_a_fresh_interpreter_has_as_many_threads(name: str) -> None:
    code = f"import os; os.environ.update({SETS[name]!r}); import torch; print(torch.get_num_threads())"
    assert subprocess.check_output([sys.executable, "-c", code], env={OMP: "1"}, text=True) == "2\n"


def test_threads_are_left_alone_without_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads_after({OMP: "1"}, monkeypatch) == []
