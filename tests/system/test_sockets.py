"""Bytes of real TCP sockets, the sockets of this process, and the store that is given one."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from elasticd_agent.system.network.sockets import tcp_bytes_by_inode
from elasticd_agent.system.network.tcp_store import with_listening_socket
from elasticd_agent.system.processes.procfs import socket_inodes


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_sent_and_received_bytes(address: str, until: Callable[[Callable[[], object], float], object]) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=family)
    with server, socket.create_connection(server.getsockname()[:2]) as client, server.accept()[0] as peer:
        ends = [os.fstat(end.fileno()).st_ino for end in (client, peer)]
        assert set(ends) <= socket_inodes([os.getpid()])
        listening = os.fstat(server.fileno()).st_ino
        assert tcp_bytes_by_inode()[listening].queued == 0
        client.sendall(b"x" * 50_000)
        until(
            lambda: all(
                inode in tcp_bytes_by_inode() and tcp_bytes_by_inode()[inode].moved >= 50_000 for inode in ends
            ),
            20,
        )


def test_bytes_that_the_peer_does_not_take_are_unsent(until: Callable[[Callable[[], object], float], object]) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as client, server.accept()[0] as peer:
        client.setblocking(False)
        sent = client.send(b"x" * (1 << 24))
        inode = os.fstat(client.fileno()).st_ino
        assert tcp_bytes_by_inode()[inode].queued > 0
        while sent:
            sent -= len(peer.recv(1 << 20))
        until(lambda: tcp_bytes_by_inode()[inode].queued == 0, 20)


def test_bytes_that_are_not_read_are_queued(until: Callable[[Callable[[], object], float], object]) -> None:
    """They have arrived, and wake up whoever waits for them as soon as its thread gets a processor."""
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as client, server.accept()[0] as peer:
        ours, theirs = (os.fstat(end.fileno()).st_ino for end in (client, peer))
        client.sendall(b"123")
        until(lambda: [tcp_bytes_by_inode()[inode].queued for inode in (ours, theirs)] == [0, 3], 20)
        client.close()
        until(lambda: tcp_bytes_by_inode()[theirs].queued == 3, 20)
        assert peer.recv(3) == b"123"
        assert tcp_bytes_by_inode()[theirs].queued == 0, "the end of a connection is no data"


def test_ended_process_has_no_sockets() -> None:
    assert socket_inodes([2**22 + 1]) == set()


@pytest.mark.parametrize(
    ("version", "options"), [("2.7.1+cu126", {"use_libuv": False}), ("2.8.0a0+git1", {}), ("2.13.0+cpu", {})]
)
def test_older_torch_gets_no_listening_socket_in_its_newer_backend(
    version: str, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would print an error at each start."""
    monkeypatch.setitem(sys.modules, "torch.version", SimpleNamespace(__version__=version))  # type: ignore[arg-type]
    assert with_listening_socket(dict)() == options
