"""The process group that a session makes."""

from __future__ import annotations

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
