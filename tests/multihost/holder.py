"""A host's first process: holds the namespaces that make the host, for as long as the test run needs them.

It runs as a script of its own, in namespaces that `unshare --net --uts --mount` made for it, and waits for the end of
its standard input: that comes when the test run lets go of it or dies, by SIGKILL, too. Then it kills whatever is in
the network and ends, and with the last process the kernel takes the links, the addresses and the mounts. Nothing has a
name outside, so there is nothing to collide with and nothing to sweep. Standard library only; it never opens a socket.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

SETTLED = "TtDZX"
"""States in which a process that was sent SIGSTOP does nothing more. D: it waits for a stopped child's exec (vfork)."""

_GIVE_UP_S = 20.0
"""Only a process stuck in the kernel takes longer to stop or die."""


def network_of(pid: int) -> int:
    """The number of that process's network namespace; 0 when it has ended, zombies included."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return 0


def processes_in(network: int, but: int) -> set[int]:
    """Every process in that network, `but` its holder; wherever in the tree of processes it went."""
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return {pid for pid in pids if pid != but and network_of(pid) == network}


def freeze(network: int, but: int) -> None:
    """Stop them all; returns when none of them moves any more, the children they forked meanwhile included."""
    deadline = time.monotonic() + _GIVE_UP_S
    told: set[int] = set()
    while running := [p for p in processes_in(network, but) if p not in told or _state(p) not in SETTLED]:
        assert time.monotonic() < deadline, f"would not stop: {running}"
        for pid in running:
            send(pid, signal.SIGSTOP)
        told.update(running)


def kill(network: int, but: int) -> None:
    """Kill them all at once: stopped first, so that none of them sees another one die and acts on it."""
    freeze(network, but)
    deadline = time.monotonic() + _GIVE_UP_S
    while left := processes_in(network, but):
        assert time.monotonic() < deadline, f"would not die: {left}"
        for pid in left:
            send(pid, signal.SIGKILL)
        time.sleep(0.001)


def send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return "X"


def main(name: str, hosts: str) -> None:
    socket.sethostname(name)
    # its own memory, too, as machines have: what lies in there goes with the host
    for mount in (["--bind", hosts, "/etc/hosts"], ["-t", "tmpfs", "-o", "mode=1777", "shm", "/dev/shm"]):
        if os.spawnlp(os.P_WAIT, "mount", "mount", *mount) != 0:
            raise SystemExit(1)
    print("ready", flush=True)
    sys.stdin.read()
    kill(network_of(os.getpid()), os.getpid())


if __name__ == "__main__":
    main(*sys.argv[1:])
