"""The all-reduce of a node's slots: with the real torch, and with a broken one."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from elasticd_daemon.health import checks as reducing
from tests.daemon.health.conftest import until

# As much of torch as is needed, over files: each rank writes its number and reads the others'.
TORCH = """
import json, os, sys, time
class Numbers(list):
    def min(self): return min(self)
    def max(self): return max(self)
def full(shape, value, device): return Numbers([value])
def set_num_threads(n): pass
class distributed: pass
d = distributed
def init_process_group(backend, init_method, rank, world_size, timeout):
    d.rank, d.world, d.path = rank, world_size, init_method.removeprefix("file://")
    {init}
def barrier():
    {barrier}
def all_reduce(numbers):
    open(f"{{d.path}}.new{{d.rank}}", "w").write(str(numbers[0]))
    os.rename(f"{{d.path}}.new{{d.rank}}", f"{{d.path}}.{{d.rank}}")
    names = [f"{{d.path}}.{{rank}}" for rank in range(d.world)]
    while not all(map(os.path.exists, names)):
        time.sleep(0.01)
    numbers[:] = [sum(float(open(name).read()) for name in names)]
    {all_reduce}
d.init_process_group, d.barrier, d.all_reduce = init_process_group, barrier, all_reduce
sys.modules["torch.distributed"] = d
"""


def torch(directory: Path, init: str = "pass", barrier: str = "pass", all_reduce: str = "pass") -> dict[str, str]:
    (directory / "torch.py").write_text(TORCH.format(init=init, barrier=barrier, all_reduce=all_reduce))
    return {**os.environ, "PYTHONPATH": str(directory)}


def test_with_the_real_torch() -> None:
    found = reducing.check_all_reduce(sys.executable, range(2), (), os.environ)
    assert found.outcome == "passed", found.why
    assert found.why.startswith("2 slots, gloo, ")


@pytest.mark.parametrize(
    ("does", "outcome", "why"),
    [
        ({}, "passed", "3 slots, gloo, "),
        (
            {"init": "d.rank == 1 and time.sleep(1000)"},
            "failed",
            "slot 1 did not reach the all-reduce within 8 s (has its device); the others waited",
        ),
        pytest.param(
            {"init": "d.rank == 2 and os.kill(os.getpid(), 19)"},
            "failed",
            "slot 2 did not reach the all-reduce within 8 s (has its device); the others waited",
            marks=pytest.mark.system,
        ),
        pytest.param(
            {"init": "d.rank == 0 and os._exit(3)"},
            "failed",
            "slot 0 did not reach the all-reduce within 8 s (has its device); the others waited",
            marks=pytest.mark.system,
        ),
        ({"barrier": "raise RuntimeError('no such device\\nmore')"}, "failed", "slot 0: RuntimeError: no such device"),
        pytest.param(
            {"barrier": "time.sleep(1000)"},
            "failed",
            "the slots did not finish an all-reduce within 8 s",
            marks=pytest.mark.system,
        ),
        ({"all_reduce": "numbers[0] += d.rank == 1"}, "failed", "slot 1 added up 7.0, not 6.0"),
    ],
)
def test_failing_slot_is_named(tmp_path: Path, does: dict[str, str], outcome: str, why: str) -> None:
    environ = torch(tmp_path, **does)
    within_s = 8.0 if "within" in why else 60.0  # the others start meanwhile
    found = reducing.check_all_reduce(sys.executable, range(3), (), environ, within_s=within_s)
    assert (found.outcome, found.why[: len(why)]) == (outcome, why)


@pytest.mark.parametrize("source", ["raise ImportError('no torch here')", "raise OSError('libcudnn is missing')"])
def test_python_without_torch_is_skipped(tmp_path: Path, source: str) -> None:
    (tmp_path / "torch.py").write_text(source)
    found = reducing.check_all_reduce(sys.executable, range(2), (), {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert found.outcome == "skipped"
    assert f"torch cannot be imported by {sys.executable}" in found.why


def test_missing_python_is_skipped() -> None:
    assert (
        reducing.check_all_reduce("/no/python", range(2), (), os.environ).why
        == "/no/python cannot be run: No such file or directory"
    )


def test_single_slot_without_gpu_is_skipped() -> None:
    assert reducing.check_all_reduce(sys.executable, range(1), (), os.environ).outcome == "skipped"


def test_hanging_import_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducing, "CLOSE_S", 0.5)
    (tmp_path / "torch.py").write_text("import time; time.sleep(1000)")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = reducing.check_all_reduce(sys.executable, range(2), (), environ, within_s=0.1, import_s=0.1)
    assert (found.outcome, found.why) == ("failed", "no result within 0.7 s")


def test_run_can_be_cancelled(tmp_path: Path) -> None:
    import threading

    stop, stopping = os.pipe()
    environ = torch(tmp_path, init=f"open({str(tmp_path / 'here')!r}, 'w'); time.sleep(1000)")
    thread = threading.Thread(
        target=lambda: (until((tmp_path / "here").exists, "rank"), os.write(stopping, b"x")), daemon=True
    )
    thread.start()
    began = time.monotonic()
    reducing.check_all_reduce(sys.executable, range(2), (), environ, within_s=90.0, stop=stop)
    assert time.monotonic() - began < 60
    thread.join()
    for fd in (stop, stopping):
        os.close(fd)
