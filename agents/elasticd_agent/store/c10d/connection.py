"""The agent's end of the c10d helper: starts it, keeps one client of it connected, and bounds every call.

torch's client ignores its timeouts while the server is frozen; so nothing here waits for the helper without a deadline
of its own, and a client that missed one is abandoned: killed and replaced by the link's thread. An outage is said once,
its end too. This never imports torch and knows nothing of keys and leases.
"""

from __future__ import annotations

import json
import random
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elasticd.errors import StoreRefused, StoreUnavailable
from elasticd_agent.store import Traffic
from elasticd_agent.store.c10d.envelope import STANDALONE
from elasticd_agent.store.c10d.helper import END_DEADLINE_S, Helper, HelperLost, listen

CONNECT_DEADLINE_S = 8.0
"""A client that is not ready by then is tried anew; while the host is frozen, it would wait for ever."""
BIND_DEADLINE_S = 2.0
"""A host that died a moment ago may hold its port still."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 0.8
"""Between two attempts, doubling, jittered; the longest is below a third of the lease's 3 s."""
MAX_RESTART_PAUSE_S = 8.0
"""Before another helper is started, since importing torch takes a second of a core that the workers need."""
CHUNK = 1 << 16


@dataclass(slots=True)
class _Call:
    answer: dict[str, Any] | None = None
    done: threading.Event = field(default_factory=threading.Event)


class C10dConnection:
    """`hear` is called from the link's thread with (watched prefix, key); a prefix as the key means: look at it all."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        serve: bool,
        standalone: bool,
        python: str,
        timeout_s: float,
        start_timeout_s: float,
        log: Callable[[str], None],
        on_change: Callable[[str, str], None],
    ) -> None:
        self.traffic = Traffic()
        self.standalone = standalone
        """Whether the host is no agent of a job, as it says itself."""
        self._host, self._port, self._serve, self._python = host, port, serve, python
        self._timeout_s, self._say, self._hear = timeout_s, log, on_change
        self._start_by = time.monotonic() + start_timeout_s
        self._state = threading.Condition()
        self._sending = threading.Lock()
        self._channel: socket.socket | None = None
        self._ready = self._was_ready = self._in_outage = False
        self._refused = ""
        self._why = "it has not answered yet"
        self._closing = threading.Event()
        self._calls: dict[int, _Call] = {}
        self._last_id = 0
        self._prefixes: dict[str, int] = {}
        self._helper: Helper | None = None
        self._server = 0
        self._server_channel: socket.socket | None = None
        """Whose end is the server's end."""
        self._listener: socket.socket | None = None
        if serve:  # at once, so that the port is known, and who comes early waits instead of being refused
            try:
                self._listener = listen(port)
                self._port = self._listener.getsockname()[1]
            except OSError:  # tried again, and complained of, by the thread
                pass
        self._thread = threading.Thread(target=self._run, name="c10d-link", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._port

    @property
    def where(self) -> str:
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    # What callers use, from any thread

    def call(self, op: str, **args: Any) -> Any:
        """Carry out one of c10d_client.Operations. Raises StoreUnavailable, StoreRefused."""
        deadline = time.monotonic() + self._timeout_s
        with self._state:
            start_by = deadline if self._was_ready else max(deadline, self._start_by)
            while not self._ready:
                if self._refused:
                    raise StoreRefused(self._refused)
                left = start_by - time.monotonic()
                if self._closing.is_set() or left <= 0 or not self._state.wait(left):
                    self._begin_outage()
                    raise StoreUnavailable(self._sentence())
            if start_by > deadline:
                deadline = time.monotonic() + self._timeout_s
            channel = self._channel
            assert channel is not None
            self._last_id += 1
            number, call = self._last_id, _Call()
            self._calls[number] = call
        within = max(0.0, deadline - time.monotonic())
        data = json.dumps({"id": number, "op": op, "args": args, "within": within}).encode() + b"\n"
        sent = self._send(channel, data, deadline)
        call.done.wait(max(0.0, deadline - time.monotonic()))
        with self._state:
            self._calls.pop(number, None)
            if call.answer is not None and "ok" in call.answer:
                return call.answer["ok"]
            # A call that spent its time on waiting for the connection says nothing against it.
            if (not call.done.is_set() or not sent) and within > self._timeout_s / 2:
                self._why = f"no answer within {self._timeout_s:g} s"
                self._abandon(channel)
            raise StoreUnavailable(self._sentence())

    def watch(self, prefix: str) -> None:
        """Hear of changes below `prefix` from now on, or, while the store is away, from its return on."""
        with self._state:
            self._prefixes[prefix] = self._prefixes.get(prefix, 0) + 1
            if self._prefixes[prefix] > 1 or not self._ready:
                return
        try:
            self.call("watch", prefix=prefix)
        except (StoreUnavailable, StoreRefused):  # the reconnect will
            pass

    def unwatch(self, prefix: str) -> None:
        with self._state:
            self._prefixes[prefix] -= 1
            if self._prefixes[prefix]:
                return
            del self._prefixes[prefix]
            channel = self._channel if self._ready else None
        if channel is not None:
            self._send_without_answer(channel, "unwatch", prefix, self._timeout_s)

    def close(self) -> None:
        self._closing.set()
        with self._state:
            if self._channel is not None:
                self._abandon(self._channel)
            if self._helper is not None:
                self._helper.interrupt()
            self._state.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * END_DEADLINE_S)

    def _send_without_answer(self, channel: socket.socket, op: str, prefix: str, within: float) -> None:
        """Ask without waiting for the answer."""
        data = json.dumps({"id": 0, "op": op, "args": {"prefix": prefix}, "within": within}).encode() + b"\n"
        self._send(channel, data, time.monotonic() + within)

    def _send(self, channel: socket.socket, data: bytes, deadline: float) -> bool:
        """False: it could not be sent in time; what was sent of it makes the channel useless."""
        if not self._sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return False
        try:
            poll = select.poll()
            poll.register(channel, select.POLLOUT)
            left = memoryview(data)
            while left:
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    return False
                left = left[channel.send(left, socket.MSG_DONTWAIT) :]
            return True
        except OSError:
            return False
        finally:
            self._sending.release()

    def _abandon(self, channel: socket.socket) -> None:
        """With the lock. The thread sees the end of the channel, and starts anew."""
        if self._channel is channel:
            self._begin_outage()
            self._ready = False
            try:
                channel.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _begin_outage(self) -> None:
        if not self._in_outage and not self._closing.is_set():
            self._in_outage = True
            self._say(f"{self._sentence()}; trying on, what runs goes on meanwhile")

    def _sentence(self) -> str:
        what = (
            "hosted here" if self._serve and self.standalone else "this agent hosts" if self._serve else "of this job"
        )
        who = "its host" if self.standalone else "its host's agent"
        hint = "" if self._serve else f"; see that {who} runs and that nothing blocks the port"
        return f"the c10d store {what} at {self.where} does not answer ({self._why}){hint}"

    # What the thread does

    def _run(self) -> None:
        pause = MIN_PAUSE_S
        while not self._closing.is_set():
            was_ready = False
            try:
                was_ready = self._connection()
                longest = MAX_PAUSE_S
            except HelperLost as lost:
                self._end_helper()
                self._why, longest = str(lost), MAX_RESTART_PAUSE_S
            except StoreRefused as refused:
                self._why, longest = str(refused), MAX_RESTART_PAUSE_S
                if not self._was_ready:  # else what worked once may work again, and a job depends on it
                    with self._state:
                        self._refused = str(refused)
                        self._state.notify_all()
                    break
            except OSError as error:  # no file descriptor left, say: nobody else would ever connect again
                self._why, longest = error.strerror or str(error), MAX_PAUSE_S
            pause = MIN_PAUSE_S if was_ready else min(2 * pause, longest)
            self._closing.wait(pause * random.uniform(0.5, 1.0))
        self._end_helper()
        if self._listener is not None:
            self._listener.close()

    def _end_helper(self) -> None:
        with self._state:
            helper, self._helper, self._server = self._helper, None, 0
        if helper is not None:
            helper.end()
        self._drop_server_channel()

    def _connection(self) -> bool:
        """One client's life. True if it got as far as being ready."""
        if self._serve and not self._server:
            self._bind()  # before a second of a core is spent on the helper
        helper = self._helper
        if helper is None:
            helper = Helper(self._python)
            with self._state:
                self._helper = helper
            if self._closing.is_set():
                return False
            helper.wait_until_ready()
        if self._serve:
            self._ensure_server(helper)
        mine, theirs = socket.socketpair()
        with mine:
            with theirs:
                host = "127.0.0.1" if self._serve else self._host
                request = {"do": "connect", "host": host, "port": self._port, "timeout_s": CONNECT_DEADLINE_S}
                pid = helper.ask(request, theirs)["pid"]
            with self._state:
                self._channel = mine
            try:
                return self._read_messages(mine)
            finally:
                with self._state:
                    self._channel = None
                    self._ready = False
                    for call in self._calls.values():
                        call.done.set()
                if not self._closing.is_set():
                    helper.ask({"do": "end", "pid": pid})

    def _ensure_server(self, helper: Helper) -> None:
        if self._server and helper.ask({"do": "living", "pid": self._server})["living"]:
            return
        listening = self._bind()
        self._drop_server_channel()
        self._server_channel, theirs = socket.socketpair()
        with listening as listener, theirs:
            self._listener = None
            self._server = helper.ask({"do": "serve", "apart": self.standalone}, listener, theirs)["pid"]

    def _bind(self) -> socket.socket:
        give_up_at = time.monotonic() + BIND_DEADLINE_S
        while self._listener is None:
            try:
                self._listener = listen(self._port)
            except OSError as error:
                if time.monotonic() >= give_up_at or self._closing.is_set():
                    raise StoreRefused(
                        f"cannot host the c10d store at port {self._port}: {error.strerror or error}; end what uses "
                        "the port, or give --rdzv-endpoint another one on every node"
                    ) from None
                self._closing.wait(0.1)
        return self._listener

    def _drop_server_channel(self) -> None:
        channel, self._server_channel = self._server_channel, None
        if channel is not None:
            channel.close()

    def _read_messages(self, channel: socket.socket) -> bool:
        """Hand out what the client says until it has no more to say."""
        ready = False
        deadline = time.monotonic() + CONNECT_DEADLINE_S
        lines = _LineReader(channel, self._server_channel)
        while (text := lines.next(None if ready else deadline - time.monotonic())) is not None:
            message: dict[str, Any] = json.loads(text)
            self._count(message.get("counts", (0, 0, 0)))
            match message:
                case {"ready": start}:
                    ready = True
                    self.standalone = start.endswith(STANDALONE)
                    self._connected(channel)
                case {"id": number}:
                    with self._state:
                        call = self._calls.get(number)
                    if call is not None:
                        call.answer = message
                        call.done.set()
                case {"changed": prefix, "key": key}:
                    self._hear(prefix, key)
                case {"lost": why}:
                    self._why = why
                case {"refused": why}:
                    raise StoreRefused(f"{self.where}: {why}; check --rdzv-endpoint and the versions of elasticd")
        if not ready and self._why == "it has not answered yet":
            self._why = "a connection, but no answer"
        with self._state:
            if ready and not self._closing.is_set():
                self._begin_outage()
        return ready

    def _connected(self, channel: socket.socket) -> None:
        with self._state:
            prefixes = list(self._prefixes)
        for prefix in prefixes:
            self._send_without_answer(channel, "watch", prefix, CONNECT_DEADLINE_S)
        with self._state:
            back = self._in_outage
            self._ready = self._was_ready = True
            self._in_outage = False
            self._state.notify_all()
        if back:
            self._say(f"the c10d store at {self.where} answers again")
        for prefix in prefixes:
            self._hear(prefix, prefix)

    def _count(self, counts: list[int]) -> None:
        self.traffic.requests += counts[0]
        self.traffic.sent_bytes += counts[1]
        self.traffic.received_bytes += counts[2]


class _LineReader:
    """The lines of a stream, which counts as ended with `other`, on which nothing is said."""

    def __init__(self, channel: socket.socket, other: socket.socket | None) -> None:
        self._channel = channel
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        if other is not None:
            self._poll.register(other, select.POLLIN)
        self._complete: deque[bytes] = deque()
        self._rest = b""

    def next(self, seconds: float | None) -> bytes | None:
        """None: the stream has ended, or the time is up."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._complete:
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            ready = self._poll.poll(left)
            if not any(fd == self._channel.fileno() for fd, _ in ready):
                return None
            try:
                data = self._channel.recv(CHUNK)
            except OSError:
                return None
            if not data:
                return None
            *complete, self._rest = (self._rest + data).split(b"\n")
            self._complete.extend(complete)
        return self._complete.popleft()
