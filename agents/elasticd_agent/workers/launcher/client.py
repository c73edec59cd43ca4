"""The agent's end of the owner: starts it, speaks with it, and cleans up after it should it be killed."""

from __future__ import annotations

import ctypes
import errno
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticd.errors import UsageError
from elasticd_agent.system.helper_process import end_process
from elasticd_agent.system.installation import program
from elasticd_agent.workers.launcher.reaping import end_children
from elasticd_agent.workers.launcher.sockets import PACKET, encode, pair

PR_SET_CHILD_SUBREAPER = 36
END_DEADLINE_S = 12.0
"""The owner gives SIGKILLed processes 10 s to vanish; then it says goodbye, whoever would not die."""


@dataclass(frozen=True, slots=True)
class OwnerMessage:
    """A message of the owner's, as owner.py's docstring lists them."""

    message: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OwnerLost:
    """The owner is gone, and with it, by PDEATHSIG, the workers."""


class OwnerClient:
    """One owner process. `post` is called with OwnerSaid and OwnerLost from a thread of this object's own."""

    def __init__(
        self, runtime_dir: Path, post: Callable[[OwnerMessage | OwnerLost], None], keep: Sequence[int] = ()
    ) -> None:
        """`keep`: file descriptors that the owner, too, has open until nothing is left of what it owns."""
        # Should the owner be killed, its descendants become ours to end.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._socket, theirs = pair()
        with theirs:
            owner = [sys.executable, "-I", "-S", program("owner"), str(theirs.fileno()), str(runtime_dir)]
            self._process = subprocess.Popen(
                [*owner, *map(str, keep)], pass_fds=[theirs.fileno(), *keep], start_new_session=True
            )
        self._post = post
        self._closing = False
        self._stuck: set[int] = set()  # the reader's: what the owner could not end, nobody can
        self._reader = threading.Thread(target=self._read, name="owner-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, **message: Any) -> None:
        """Say one thing to the owner. That it is gone shows as OwnerLost, not here.

        Raises UsageError for what is too large to be said.
        """
        packet = encode(message)
        try:
            if len(packet) > PACKET:
                raise OSError(errno.EMSGSIZE, f"{PACKET} bytes are the most")
            self._socket.send(packet)
        except OSError as error:
            if error.errno == errno.EMSGSIZE:  # where net.core.wmem_max is small, that is sooner
                raise UsageError(
                    f"the environment and the arguments take {len(packet)} bytes, more than a message to the launcher "
                    "can carry; make them smaller"
                ) from None

    def _read(self) -> None:
        while True:
            try:
                packet = self._socket.recv(PACKET)
            except OSError:
                packet = b""
            if not packet:
                break
            message = json.loads(packet)
            if message["is"] == "gone":
                self._stuck.update(stuck["pid"] for stuck in message["stuck"])
            elif message["is"] == "freed":
                self._stuck.discard(message["pid"])
            self._post(OwnerMessage(message))
        if not self._closing:
            self._post(OwnerLost())

    def close(self) -> None:
        """End the owner and with it every process it has; returns when all are gone, or after a deadline.

        Should it have been killed, its processes are ours, and end here; but for those that are known not to die.
        """
        self._closing = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        end_process(self._process, END_DEADLINE_S, END_DEADLINE_S)
        self._reader.join(END_DEADLINE_S)
        self._socket.close()
        end_children(END_DEADLINE_S, except_pids=self._stuck)  # what a killed owner has left to us
