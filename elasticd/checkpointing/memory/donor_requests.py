"""The writer's part of a save at a fault: it passes the launcher's request on to the ranks, and their answers back."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection

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
        self._steps: dict[socket.socket, tuple[int, int]] = {}
        """The newest steps, for each launcher, of which a rank holds the state, and of which it has saved it."""

    @property
    def are_awaited(self) -> bool:
        """A launcher waits for ranks."""
        return bool(self._waiting)

    def add_donor(self, rank: socket.socket, round: int) -> None:
        self._rounds[rank] = round

    def request_saves(self, launcher: socket.socket, round: int, signum: int, stay: Collection[int]) -> None:
        """Have every rank of the round save its state before it gets this signal. With `stay`, only the processes with
        these pids, which hold their state instead, if they can.
        """
        self._waiting[launcher] = set()
        for rank, own in self._rounds.items():
            if own == round and peer.is_running(rank) and (not stay or peer.pid(rank) in stay):
                with contextlib.suppress(OSError):  # its end of file follows
                    channel.send(rank, {"save": round, "signum": signum, "stays": len(stay)})
                    self._waiting[launcher].add(rank)
        self._report_to_launchers()

    def mark_begun(self, rank: socket.socket) -> None:
        self._begun.add(rank)
        self._report_to_launchers()

    def mark_done(self, rank: socket.socket, held: int, saved: int) -> None:
        """A rank has answered, with or without success. `held`: the step of the state that it holds, `saved`: of the
        one that it knows to be in memory; 0 for none.
        """
        for launcher in [launcher for launcher, ranks in self._waiting.items() if rank in ranks]:
            self._answered.add(launcher)
            held_before, saved_before = self._steps.get(launcher, (0, 0))
            self._steps[launcher] = max(held, held_before), max(saved, saved_before)
        self._stop_waiting_for(rank)

    def _stop_waiting_for(self, rank: socket.socket) -> None:
        self._begun.discard(rank)
        for ranks in self._waiting.values():
            ranks.discard(rank)
        self._report_to_launchers()

    def drop_connection(self, connection: socket.socket) -> None:
        self._rounds.pop(connection, None)
        self._waiting.pop(connection, None)
        self._answered.discard(connection)
        self._steps.pop(connection, None)
        self._stop_waiting_for(connection)

    def _report_to_launchers(self) -> None:
        for launcher, ranks in list(self._waiting.items()):
            if not ranks:
                del self._waiting[launcher]
            state = {"busy": len(ranks & self._begun), "left": len(ranks), "answered": launcher in self._answered}
            held, saved = self._steps.get(launcher, (0, 0))
            with contextlib.suppress(OSError):
                channel.send(launcher, state if ranks else {"held": held, "saved": saved})
