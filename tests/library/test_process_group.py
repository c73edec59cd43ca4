"""The process group that a session makes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elasticd import process_group


@pytest.mark.parametrize("device", [torch.device("cuda", 3), torch.device("cpu")])
def test_group_is_bound_to_its_cuda_device(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """NCCL then connects in init_process_group, not in the first step, and sub-groups can split its communicator."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(process_group, "_set_device", lambda local_rank: device)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda **arguments: given.update(arguments))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    process_group.join(process_group.read_environment({"LOCAL_RANK": "3"}), None)
    assert given["backend"] == ("nccl" if device.type == "cuda" else "gloo")
    assert given.get("device_id") == (device if device.type == "cuda" else None)


@pytest.mark.parametrize("local_rank", [None, "1"])
def test_device_is_the_launchers_choice_or_the_scripts(monkeypatch: pytest.MonkeyPatch, local_rank: str | None) -> None:
    """A script that starts its ranks by torch.multiprocessing.spawn gives each a device, and no LOCAL_RANK."""
    chosen = [3]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: chosen[-1])
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    group = process_group.join(process_group.read_environment(), None)
    assert group.device == torch.device("cuda", int(local_rank or 3))
    assert chosen[-1] == group.device.index


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_child_that_imports_the_script_takes_part_as_no_rank(method: str, tmp_path: Path) -> None:
    """A DataLoader's workers, where the script has no `if __name__ == "__main__":`; all ranks would wait."""
    (tmp_path / "train.py").write_text(
        "import multiprocessing, elasticd\n"
        "def main():\n"
        f"    context = multiprocessing.get_context({method!r})\n"
        "    context.Process(target=print).start() if __name__ == '__main__' else elasticd.init()\n"
        "main()\n"
    )
    ran = subprocess.run([sys.executable, tmp_path / "train.py"], capture_output=True, text=True, timeout=60)
    assert "UsageError: init() in a process that multiprocessing has started" in ran.stderr


def test_runs_of_torchruns_default_id_are_different_runs() -> None:
    """Each has the directory of checkpoints for itself; all attempts of one torchrun are one run."""
    script = "from elasticd.process_group import read_environment; print(read_environment().run)"
    torchrun = f"import subprocess, sys\nfor _ in range(2): subprocess.run([sys.executable, '-c', {script!r}])"
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    runs = [
        subprocess.run([sys.executable, "-c", torchrun], env=environment, capture_output=True, text=True, timeout=60)
        for _ in range(2)
    ]
    (one, again), (other, _) = (done.stdout.split() for done in runs)
    assert one == again != other
