"""A TCP proxy on loopback that can let a request through and lose its answer."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time


class Proxy:
    """`lose_answers_to(words)`: once these bytes have gone to the server, nothing comes back until `heal()`."""

    def __init__(self, port: int, connects_in_s: float = 0.0) -> None:
        self._connects_in_s = connects_in_s
        self._server = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._wake, self._woken = socket.socketpair()
        self._words: bytes | None = None
        self.lost = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._carry, name="proxy")
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def lose_answers_to(self, words: bytes) -> None:
        self._words = words

    def heal(self) -> None:
        """Connections that lost something are ended: what they carry makes no sense any more."""
        self._words = None
        self._wake.send(b".")

    def close(self) -> None:
        self._closing = True
        self._wake.send(b".")
        self._thread.join(20)
        for sock in (self._listener, self._wake, self._woken):
            sock.close()

    def _carry(self) -> None:
        peers: dict[socket.socket, socket.socket] = {}
        clients: set[socket.socket] = set()

        def end(sock: socket.socket) -> None:
            for one in (sock, peers.pop(sock)):
                peers.pop(one, None)
                clients.discard(one)
                one.close()

        while not self._closing:
            ready, _, _ = select.select([self._listener, self._woken, *peers], [], [], 20)
            for sock in ready:
                if sock is self._woken:
                    sock.recv(1)
                    if self.lost.is_set() and self._words is None:
                        self.lost.clear()
                        for client in list(clients):
                            end(client)
                elif sock is self._listener:
                    client = sock.accept()[0]
                    time.sleep(self._connects_in_s)
                    server = socket.create_connection(self._server, 5)
                    peers |= {client: server, server: client}
                    clients.add(client)
                elif sock in peers:
                    with contextlib.suppress(OSError):
                        if data := sock.recv(65536):
                            if self._words and sock in clients and self._words in data:
                                self.lost.set()
                            if sock in clients or not self.lost.is_set():
                                peers[sock].sendall(data)
                            continue
                    end(sock)
        for client in list(clients):
            end(client)
