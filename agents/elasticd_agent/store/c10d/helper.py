"""Starting the c10d helper process, asking it for clients and servers, ending it; and the port a server listens at.

Every answer is waited for with a deadline. It does not speak to the store; connection.py does, through what it starts.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from typing import Any

from elasticd.errors import StoreRefused
from elasticd_agent.system.helper_process import end_process
from elasticd_agent.system.installation import program

PACKET = 1 << 16
IMPORT_DEADLINE_S = 120.0
"""torch from a cold network file system; the callers have their own, shorter deadlines."""
REQUEST_DEADLINE_S = 5.0
"""A fork takes milliseconds, on a crowded machine some hundred."""
END_DEADLINE_S = 2.0


class HelperLost(Exception):
    """The helper, its client, or the store is gone; says which and why."""


class Helper:
    """One helper process. Used by the link's thread only, whose end would end the helper, too."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._ready = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [python, "-u", program("c10d_fork_server"), str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                self._control.close()
                raise StoreRefused(f"cannot run {python}, which is to reach the c10d store: {error}") from None

    def wait_until_ready(self) -> None:
        message = self._receive(IMPORT_DEADLINE_S)
        if "error" in message:
            raise StoreRefused(
                f"{self._python} has no torch that can serve or reach a c10d store "
                f"({message['error']}); install torch there or meet at etcd"
            )

        self._ready = True

    def ask(self, request: dict[str, Any], *passed: socket.socket) -> dict[str, Any]:
        try:
            self._control.settimeout(REQUEST_DEADLINE_S)
            socket.send_fds(self._control, [json.dumps(request).encode()], [sock.fileno() for sock in passed])
        except OSError as error:
            raise HelperLost(f"the helper process is gone: {error}") from None
        return self._receive(REQUEST_DEADLINE_S)

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            self._control.settimeout(seconds)
            packet = self._control.recv(PACKET)
        except OSError as error:
            raise HelperLost(f"the helper process does not answer: {error}") from None
        if not packet:
            raise HelperLost("the helper process has ended")
        message: dict[str, Any] = json.loads(packet)
        return message

    def interrupt(self) -> None:
        """From another thread: whoever waits for the helper waits no longer."""
        try:
            self._control.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def end(self) -> None:
        """It ends its children first, and waits for them; it is killed, and they with it, if it does not."""
        self.interrupt()
        # Until it is ready it imports torch, reads nothing, and has no children.
        end_process(self.process, grace_s=END_DEADLINE_S if self._ready else 0.0, within_s=END_DEADLINE_S)
        self._control.close()


def listen(port: int) -> socket.socket:
    """Listening on all addresses of this machine, of both families where it has both."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=4096)
