"""The round's store as a process of its own, for groups that were not forked from a template.

Runs with the job's interpreter as `python store.py HOST LISTEN_FD CHANNEL_FD`; `serve` is also what the
template's forked store calls. It ends when the owner closes the channel or dies, and by no signal that means the job:
the workers' last words before a stop go through it.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def serve(tcp_store: Callable[..., Any] | None, host: str, listen_fd: int, channel: socket.socket) -> None:
    """Serve a TCPStore on an already listening socket until the channel's end of file.

    Clients may connect before this is called: they wait in the listening socket's backlog. Without torch (None) there
    is nothing to serve and nobody who could ask for it: the job is no training job, and runs all the same.
    """
    for number in IGNORED_SIGNALS:  # batch systems signal every process of a job
        signal.signal(number, signal.SIG_IGN)
    store = None if tcp_store is None else start(tcp_store, host, listen_fd)
    while channel.recv(4096):
        pass
    del store


def start(tcp_store: Callable[..., Any], host: str, listen_fd: int) -> Any:
    """The store, listening. It closes the descriptor when it goes."""
    with socket.socket(fileno=os.dup(listen_fd)) as listener:
        port = listener.getsockname()[1]
    given = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listen_fd}
    return serving(tcp_store)(host, port, timeout=timedelta(seconds=60), **given)


def serving(tcp_store: Callable[..., Any]) -> Callable[..., Any]:
    """`tcp_store` for a socket that listens already, which torch 2.6 serves by its older backend only."""

    def made(*place: Any, **how: Any) -> Any:
        try:
            return tcp_store(*place, **how)
        except NotImplementedError:
            return tcp_store(*place, **how, use_libuv=False)

    return made


def main() -> None:
    host, listen_fd, channel_fd = sys.argv[1:]
    try:
        tcp_store = importlib.import_module("torch.distributed").TCPStore
    except ModuleNotFoundError:
        tcp_store = None
    serve(tcp_store, host, int(listen_fd), socket.socket(fileno=int(channel_fd)))


if __name__ == "__main__":
    main()
