"""TCPStore without torch's Python modules, and with them where that does not work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults.job import REPOSITORY

PROGRAM = """
import os, sys
sys.path[:0] = sys.argv[2:]
from elasticd_agent.store.c10d import torch_import
if sys.argv[1] == "crash":
    torch_import.load_from_extension = os.abort
make = torch_import.load_tcp_store()
host = make("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = make("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
client.set("a", "b")
try:
    client.set_timeout(__import__("datetime").timedelta(seconds=0.1))
    client.multi_get(["missing"])
except RuntimeError:
    caught = "caught"
client.set_timeout(__import__("datetime").timedelta(seconds=60))
memory = [line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("Private_Dirty")]
print(client.get("a").decode(), caught, "torch.nn" in sys.modules, int(memory[0]) // 1000, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(("how", "whole"), [("works", "False"), ("crash", "True")])
def test_tcp_store(how: str, whole: str) -> None:
    paths = [str(REPOSITORY), str(REPOSITORY / "agents")]
    done = subprocess.run([sys.executable, "-c", PROGRAM, how, *paths], capture_output=True, text=True, timeout=60)
    said = done.stdout.split()
    assert said[:3] == ["b", "caught", whole], done.stdout + done.stderr
    assert (int(said[3]) < 100) == (how == "works"), "MB that no other process shares"
