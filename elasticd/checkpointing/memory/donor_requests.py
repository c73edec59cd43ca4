"""The writer's part of a save at a fault: it passes the launcher's request on to the ranks, and their answers back."""

from __future__ import annotations

import contextlib
import socket

from elasticd import channel
from elasticd.checkpointing.memory import peer


class DonorRequests:
    """Requests by connections: of ranks that save at a fault, and of launchers that wait for them."""

    def __init__(self) -> None:
        self._rounds: dict[socket.socket, int] = {}
        self._waiting: dict[socket.socket, set[socket.socket]] = {}
        """The ranks for which a launcher waits."""
        self._begun: set[socket.socket] = set()
        self._answered: set[socket.socket] = set()
        """Launchers for which a rank is done."""

    @property
    def are_busy(self) -> bool:
        """A launcher waits for ranks."""
        return bool(self._waiting)

    def add(self, rank: socket.socket, round: int) -> None:
        self._rounds[rank] = round

    def request(self, launcher: socket.socket, round: int, ends: bool) -> None:
        """Have every rank of the round save its state; with `ends`, and train no further."""
        self._waiting[launcher] = set()
        for rank, own in self._rounds.items():
            if own == round and peer.runs(rank):
                with contextlib.suppress(OSError):  # its end of file follows
                    channel.send(rank, {"save": round, "ends": ends})
                    self._waiting[launcher].add(rank)
        self._report()

    def begun(self, rank: socket.socket) -> None:
        self._begun.add(rank)
        self._report()

    def done(self, rank: socket.socket) -> None:
        """A rank has answered, with or without success."""
        self._answered |= {launcher for launcher, ranks in self._waiting.items() if rank in ranks}
        self._leave(rank)

    def _leave(self, rank: socket.socket) -> None:
        self._begun.discard(rank)
        for ranks in self._waiting.values():
            ranks.discard(rank)
        self._report()

    def lost(self, connection: socket.socket) -> None:
        self._rounds.pop(connection, None)
        self._waiting.pop(connection, None)
        self._answered.discard(connection)
        self._leave(connection)

    def _report(self) -> None:
        for launcher, ranks in list(self._waiting.items()):
            if not ranks:
                del self._waiting[launcher]
            state = {"busy": len(ranks & self._begun), "left": len(ranks), "answered": launcher in self._answered}
            with contextlib.suppress(OSError):
                channel.send(launcher, state if ranks else {})
