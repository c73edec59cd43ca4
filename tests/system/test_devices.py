"""GPUs are counted by their device files and CUDA_VISIBLE_DEVICES is read as CUDA reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticd_agent.system.gpus.devices import visible_gpus

CASES = [
    (None, ("0", "1", "2", "3")),
    ("", ()),
    ("-1", ()),
    ("2", ("2",)),
    ("3, 0", ("3", "0")),
    ("0,1,9,2", ("0", "1")),
    ("0,x,2", ("0",)),
    ("1,1", ()),
    ("GPU-8f2e,MIG-1/2", ("GPU-8f2e", "MIG-1/2")),
    ("NoDevFiles", ()),
]


@pytest.mark.parametrize(("chosen", "wanted"), CASES)
def test_visible(tmp_path: Path, chosen: str | None, wanted: tuple[str, ...]) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia0x"):
        (tmp_path / name).touch()
    assert visible_gpus({} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}, tmp_path) == wanted


def test_a_machine_without_any(tmp_path: Path) -> None:
    assert visible_gpus({}, tmp_path) == ()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == ()
