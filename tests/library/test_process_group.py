"""The process group that a session makes."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elasticd import process_group
from tests.library.conftest import free_port


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


def test_rank_connects_again_where_the_store_before_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 ends its store while another rank connects to it, for the next session."""
    ending = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, use_libuv=False)
    port, later = free_port(), []
    listener = socket.create_server(("127.0.0.1", port))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    given: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda **arguments: given.update(arguments))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def serve() -> None:
        """The first exchange by the one store, then a reset, then another store at its port."""
        with listener, listener.accept()[0] as client, socket.create_connection(("127.0.0.1", ending.port)) as server:
            server.sendall(client.recv(1024))
            client.sendall(server.recv(1024))
            client.recv(1024)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        later.append(dist.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False, use_libuv=False))
        later[0].set("elasticd/group/2/serves", "")

    thread = threading.Thread(target=serve)
    thread.start()
    environment, timeout = process_group.read_environment(), timedelta(seconds=60)
    process_group.join(environment, timeout, torch.device("cpu"))
    assert "store" not in given
    process_group.join(environment, timeout, torch.device("cpu"))
    thread.join(60)
    given.pop("store").set("key", "value")  # torch closes what is not referred to any more
    assert (given["rank"], given["world_size"], later[0].get("elasticd/group/2/key")) == (1, 2, b"value")
