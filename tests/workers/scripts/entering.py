"""Speaks the launch channel's protocol by hand: enters, leaves its round when asked to, and waits for another release.

The second argument says which ranks of the first round are different: {"late": [1], "foul": [2]}.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

work, different = Path(sys.argv[1]), json.loads(sys.argv[2])
first_rank = int(os.environ["RANK"])
owner = socket.socket(fileno=int(os.environ["ELASTICD_LAUNCH"]))


def is_different(how: str) -> bool:
    return first_rank in different.get(how, [])


if is_different("parent"):  # its child becomes an orphan, in its session
    command = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid)"
    orphan = subprocess.check_output([sys.executable, "-I", "-S", "-c", command])
    (work / "orphan").write_bytes(orphan)
if "ELASTICD_NEWCOMER" in os.environ:
    (work / "newcomer").write_text(str(os.getpid()))
    while not (work / "come").exists():
        time.sleep(0.01)
    owner.send(b'{"type": "AtEntry", "step": 0}')
    packet = owner.recv(1 << 20)
    if not packet:
        sys.exit(0)
    del os.environ["ELASTICD_NEWCOMER"]
    os.environ.update(json.loads(packet)["env"])
while True:
    if is_different("foul"):
        owner.send(b"no JSON")
    elif not is_different("plain"):
        owner.send(b'{"type": "Entered"}')
    (work / f"entered-{os.environ['ELASTICD_ROUND']}-{os.environ['RANK']}").write_text(str(os.getpid()))
    if is_different("lost"):
        report = {
            "kind": "exception",
            "type": "RuntimeError",
            "message": "closed by peer",
            "traceback": "",
            "code": None,
        }
        owner.send(json.dumps({"type": "LostPeer", "report": json.dumps(report)}).encode())
        if is_different("doubted"):
            (work / "answer").write_bytes(owner.recv(1 << 20))
    if is_different("done"):
        owner.send(b'{"type": "Left"}')
        time.sleep(600)
    packet = owner.recv(1 << 20)
    if is_different("just done"):
        owner.send(b'{"type": "Left"}')
    if not packet or is_different("late") or is_different("just done"):
        time.sleep(600)
    (work / "why").write_text(json.loads(packet)["why"])
    owner.send(b'{"type": "AtEntry", "step": 7}')
    packet = owner.recv(1 << 20)
    if not packet:
        sys.exit(0)
    os.environ.update(json.loads(packet)["env"])
