r"""The agent's end of the c10d helper process: starts it, keeps one client of it connected, and bounds every call.

torch's client ignores its timeouts while the server is frozen. So every wait here has a deadline of its own, and a
client that missed one is abandoned: the connection's thread kills and replaces it. An outage is logged once, and its
end. torch is never imported here.

Three processes take part. The agent (this module) must answer other agents within milliseconds, so no call of torch may
run in it. The helper (fork_server.py) has imported torch's TCPStore and forks. A client (client_process.py) is such a
fork: it carries out the verbs of Store on one connection, and may be killed at any instruction without harm to the
others.

    agent --control: connect, serve, end, alive--> helper --fork--> client --TCP--> the store
      \____________channel: one JSON line a request, an answer, a change______________/

The thread `c10d-link` owns the helper and the clients. It runs one client after the other for as long as the connection
is open, with a pause between two attempts that doubles and is jittered, so that the agents of a job do not come back in
step after an outage. Callers are any other threads. They share with it only what lies under `_state`.

A call
1. It waits until a client is ready. The first calls wait for the start of torch, up to `start_timeout_s`; later ones no
   longer than `timeout_s`.
2. It gets a number, is entered in `_calls` and written to the channel, all within its deadline.
3. The thread reads the answer with that number and wakes the caller. The end of a client wakes all of them without an
   answer: the outcome of these requests is unknown, which is what StoreUnavailable says.
4. A call without an answer in time abandons the client, unless it has spent most of its time waiting for a connection:
   then its silence says nothing about the client.

The store may change its place: another agent takes over where its host died (see rendezvous/takeover.py). `pin`, `move`
and `host` set the wanted target; the thread sees that it differs from the used one, ends its client and begins anew. A
store counts only with the expected term: at the same address, another agent may have begun to host an empty one, and to
believe it would mean to have lost every Round.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elasticd import channel as messages
from elasticd.errors import StoreRefused, StoreUnavailable
from elasticd_agent.store.c10d.tcp_store import parse_marker
from elasticd_agent.system.installation import import_path, program
from elasticd_agent.system.network.addresses import format_endpoint
from elasticd_agent.system.network.sockets import shut_down
from elasticd_agent.system.processes.helper_process import HelperError, LineReader, end_process

CONNECT_DEADLINE_S = 8.0
"""A client that is not ready by then is replaced; while the host is frozen, it would wait for ever."""
BIND_DEADLINE_S = 2.0
"""A host that died a moment ago may still hold its port."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 0.8
"""Between two attempts, doubling, jittered; the longest is below a third of the lease's 3 s."""
MAX_RESTART_PAUSE_S = 8.0
"""Before another helper is started: importing torch takes a second of a core that the workers need."""
IMPORT_DEADLINE_S = 120.0
"""torch from a cold network file system; the callers have their own, shorter deadlines."""
REQUEST_DEADLINE_S = 5.0
"""A fork takes milliseconds, on a crowded machine some hundred."""
END_DEADLINE_S = 2.0


class HelperLost(Exception):
    """The helper process does not answer, or has ended."""


class Helper:
    """One helper process. Used by the connection's thread only: the helper ends with the thread that started it."""

    def __init__(self, python: str) -> None:
        """Start the helper with an end of its control socket. Raises StoreRefused if the interpreter cannot be run."""
        self._python = python
        self._ready = False
        self._control, theirs = messages.pair()
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [python, "-u", program("c10d_fork_server"), str(theirs.fileno()), str(os.getpid()), *import_path()],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                self._control.close()
                raise StoreRefused(f"cannot run {python} to reach the c10d store: {error}") from None

    def wait_until_ready(self) -> None:
        """Wait until it has imported torch. Raises StoreRefused without a usable torch, HelperLost
        if it ends before.
        """
        message = self._receive(IMPORT_DEADLINE_S)
        if "error" in message:
            raise StoreRefused(
                f"{self._python} has no torch that can serve or reach a c10d store "
                f"({message['error']}); install torch there, or use etcd"
            )
        self._ready = True

    def ask(self, request: messages.Message, *passed: socket.socket) -> messages.Message:
        """Send one request, with descriptors, and return its answer. Raises HelperLost."""
        try:
            self._control.settimeout(REQUEST_DEADLINE_S)
            messages.send(self._control, request, *(sock.fileno() for sock in passed))
        except OSError as error:
            raise HelperLost(f"the helper process is gone: {error}") from None
        return self._receive(REQUEST_DEADLINE_S)

    def _receive(self, seconds: float) -> messages.Message:
        try:
            self._control.settimeout(seconds)
            message = messages.receive(self._control)
        except OSError as error:
            raise HelperLost(f"the helper process does not answer: {error}") from None
        if message is None:
            raise HelperLost("the helper process has ended")
        return message

    def interrupt(self) -> None:
        """End every wait for the helper. Safe from another thread."""
        try:
            self._control.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def end(self) -> None:
        """It ends its children first; if it does not end in time, it is killed, and they with it."""
        self.interrupt()
        # Until it is ready it imports torch, reads nothing, and has no children.
        end_process(self.process, grace_s=END_DEADLINE_S if self._ready else 0.0, within_s=END_DEADLINE_S)
        self._control.close()


@dataclass(frozen=True, slots=True)
class _Target:
    """The store to use."""

    host: str
    port: int
    term: int
    serve: bool = False
    listener: socket.socket | None = None  #: to serve on
    keep_own_server: bool = False  #: a store that was hosted here before continues


@dataclass(slots=True)
class _Call:
    answer: messages.Message | None = None
    done: threading.Event = field(default_factory=threading.Event)


class C10dConnection:
    """A connection to the c10d store of a job, with a thread that keeps it.

    `serve`: host the store, on all addresses; port 0 takes a free one. `standalone`: host it as no agent of a job.
    `listener`: the store's socket, if it listens already. `term`: of the store that is hosted, as in StoreLife; 0: no
    other agent may host the next. `python` must have torch. `timeout_s` bounds every call, `start_timeout_s` the first
    ones.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        serve: bool,
        standalone: bool = False,
        listener: socket.socket | None = None,
        term: int = 0,
        python: str = sys.executable,
        timeout_s: float = 0.9,
        start_timeout_s: float = 30.0,
        log: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.standalone = standalone  #: the host is no agent of a job, as its marker says; False before it has answered
        self.term = term  #: the term of the store that answered last, or that is hosted here
        self._expected: int | None = None  #: the only term of a store that is used
        self._python = python
        self._timeout_s = timeout_s
        self._log = log
        self._start_by = time.monotonic() + start_timeout_s
        self._state = threading.Condition()
        self._sending = threading.Lock()
        self._channel: socket.socket | None = None
        self._ready = False
        self._was_ready = False
        self._in_outage = False
        self._refused = ""
        self._why = "it has not answered yet"
        self._closing = threading.Event()
        self._calls: dict[int, _Call] = {}
        self._last_id = 0
        self._prefixes: dict[str, int] = {}
        self.helper: Helper | None = None
        self._server = 0
        self._server_channel: socket.socket | None = None
        """The server ends when it is closed."""
        self._listener = listener
        if serve and listener is None:
            # At once, so that the port is known, and early clients wait instead of being refused.
            with contextlib.suppress(OSError):  # the thread tries again and reports it
                self._listener = listen(port)
                port = self._listener.getsockname()[1]
        self._wanted = self._used = _Target(host, port, term, serve)
        """They differ until the thread has seen that there is another store to use."""
        self._hurry = threading.Event()
        """Ends the pause between two attempts: there is another store, or the end."""
        self._thread = threading.Thread(target=self._run, name="c10d-link", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._wanted.port

    @property
    def where(self) -> str:
        return format_endpoint(self._wanted.host, self._wanted.port)

    @property
    def hosts(self) -> bool:
        """This agent hosts the store that it uses."""
        return self._wanted.serve

    @property
    def answers(self) -> bool:
        """There is a connection; False is no proof of anything."""
        return self._ready

    # ---- another store: see rendezvous/takeover.py

    def pin(self, term: int) -> None:
        """Use no store of another term until `move` or `host`."""
        self._expected = term

    def move(self, endpoint: tuple[str, int], term: int, keep_own_server: bool) -> None:
        """Use the store of this term there from now on. One that was hosted here ends, unless it is to serve on."""
        self._set_target(_Target(*endpoint, term, keep_own_server=keep_own_server))

    def host(self, term: int) -> None:
        """Host an empty store of this term, at `port`, and use it. One that was hosted here ends. Raises OSError."""
        try:
            listener = listen(self.port)  # a firewall may expect it
        except OSError:
            listener = listen(0)
        self._set_target(_Target("127.0.0.1", listener.getsockname()[1], term, True, listener))

    def _set_target(self, target: _Target) -> None:
        with self._state:
            self._wanted = target
            self._expected = self.term = target.term
            self._ready = False
            self._why = "it has not answered yet"
            if self._channel is not None:
                shut_down(self._channel)
        self._hurry.set()

    def _take_target(self) -> None:
        """Begin to use another store. Called in the thread, while there is no client."""
        with self._state:
            target, before = self._wanted, self._used
            self._used = target
            self._hurry.clear()
        if target is before:
            return
        if not target.keep_own_server:
            self._end_server()
        self._server = 0
        if self._listener is not None:
            self._listener.close()
        self._listener = target.listener

    # ---- for callers, from any thread

    def call(self, op: str, **args: Any) -> Any:
        """Carry out one of client_process.Operations. Raises StoreUnavailable, StoreRefused."""
        deadline = time.monotonic() + self._timeout_s
        with self._state:
            start_by = deadline if self._was_ready else max(deadline, self._start_by)
            while not self._ready:
                if self._refused:
                    raise StoreRefused(self._refused)
                left = start_by - time.monotonic()
                if self._closing.is_set() or left <= 0 or not self._state.wait(left):
                    self._begin_outage()
                    raise StoreUnavailable(self._outage_sentence())
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
            # A call that spent its time waiting for the connection is no evidence against it.
            if (not call.done.is_set() or not sent) and within > self._timeout_s / 2:
                self._why = f"no answer within {self._timeout_s:g} s"
                self._abandon(channel)
            raise StoreUnavailable(self._outage_sentence())

    def follow(self, prefix: str) -> None:
        """Report changes below `prefix` from now on; during an outage, from its end on."""
        with self._state:
            self._prefixes[prefix] = self._prefixes.get(prefix, 0) + 1
            if self._prefixes[prefix] > 1 or not self._ready:
                return
        try:
            self.call("watch", prefix=prefix)
        except (StoreUnavailable, StoreRefused):
            pass  # the next connection registers it

    def unfollow(self, prefix: str) -> None:
        """End one of the follows of `prefix`; the last one ends the watch, without waiting for an answer."""
        with self._state:
            self._prefixes[prefix] -= 1
            if self._prefixes[prefix]:
                return
            del self._prefixes[prefix]
            channel = self._channel if self._ready else None
        if channel is not None:
            self._send_without_answer(channel, "unwatch", prefix, self._timeout_s)

    def on_change(self, prefix: str, key: str) -> None:
        """Called from the connection's thread; the prefix as key stands for all keys below it."""
        raise NotImplementedError

    def close(self) -> None:
        """End the client, the helper and the thread. Waiting calls raise StoreUnavailable. A store that is hosted here
        ends with its helper.
        """
        self._closing.set()
        self._hurry.set()
        with self._state:
            if self._channel is not None:
                self._abandon(self._channel)
            if self.helper is not None:
                self.helper.interrupt()
            self._state.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * END_DEADLINE_S)

    def _send_without_answer(self, channel: socket.socket, op: str, prefix: str, within: float) -> None:
        data = json.dumps({"id": 0, "op": op, "args": {"prefix": prefix}, "within": within}).encode() + b"\n"
        self._send(channel, data, time.monotonic() + within)

    def _send(self, channel: socket.socket, data: bytes, deadline: float) -> bool:
        """False: it could not be sent in time; a part that was sent makes the channel useless."""
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
        """Under the lock. The thread sees the end of the channel and connects again."""
        if self._channel is channel:
            self._begin_outage()
            self._ready = False
            shut_down(channel)

    def _begin_outage(self) -> None:
        """Log the begin of an outage, once, with the reason that is known. Called under the lock."""
        if not self._in_outage and not self._closing.is_set():
            self._in_outage = True
            self._log(f"{self._outage_sentence()}; retrying, running workers continue")

    def _outage_sentence(self) -> str:
        if self._wanted.serve:
            host, hint = "hosted here" if self.standalone else "hosted by this agent", ""
        else:
            server = "its host" if self.standalone else "its host's agent"
            host, hint = "of this job", f"; check that {server} runs and that no firewall blocks the port"
        return f"the c10d store {host} at {self.where} does not answer ({self._why}){hint}"

    # ---- the thread

    def _run(self) -> None:
        """Keep a client connected until the connection is closed.

        A client that was ready resets the pause: its loss is news, and the next attempt is made at once. A helper that
        was lost costs a second of a core to start again, so the pause after it may grow longer than the one after a
        client. A refusal (no torch, another protocol) ends the thread if nothing has ever worked, since then it is a
        mistake of the set-up; later it is tried again, since a job depends on the store.
        """
        pause = MIN_PAUSE_S
        while not self._closing.is_set():
            was_ready = False
            self._take_target()
            try:
                was_ready = self._run_client()
                longest = MAX_PAUSE_S
            except HelperLost as lost:
                self._end_helper()
                self._why, longest = str(lost), MAX_RESTART_PAUSE_S
            except StoreRefused as refused:
                self._why, longest = str(refused), MAX_RESTART_PAUSE_S
                if not self._was_ready:  # otherwise it may work again, and a job depends on it
                    with self._state:
                        self._refused = str(refused)
                        self._state.notify_all()
                    break
            except OSError as error:  # e.g. no file descriptor is left: only this thread ever connects again
                self._why, longest = error.strerror or str(error), MAX_PAUSE_S
            pause = MIN_PAUSE_S if was_ready else min(2 * pause, longest)
            self._hurry.wait(pause * random.uniform(0.5, 1.0))
        self._end_helper()
        if self._listener is not None:
            self._listener.close()

    def _end_helper(self) -> None:
        with self._state:
            helper, self.helper, self._server = self.helper, None, 0
        if helper is not None:
            helper.end()
        self._end_server()

    def _run_client(self) -> bool:
        """Run one client until it ends. True if it became ready."""
        if self._used.serve and not self._server:
            self._bind()  # before a second of a core is spent on the helper
        helper = self.helper
        if helper is None:
            helper = Helper(self._python)
            with self._state:
                self.helper = helper
            if self._closing.is_set():
                return False
            helper.wait_until_ready()
        if self._used.serve:
            self._ensure_server(helper)
        mine, theirs = socket.socketpair()
        with mine:
            with theirs:
                host = "127.0.0.1" if self._used.serve else self._used.host
                request = {"do": "connect", "host": host, "port": self._used.port, "timeout_s": CONNECT_DEADLINE_S}
                pid = helper.ask(request, theirs)["pid"]
            with self._state:
                self._channel = mine
                wanted = self._wanted is self._used
            try:
                return self._read_messages(mine) if wanted else False
            finally:
                with self._state:
                    self._channel = None
                    self._ready = False
                    for call in self._calls.values():
                        call.done.set()
                if not self._closing.is_set():
                    helper.ask({"do": "end", "pid": pid})

    def _ensure_server(self, helper: Helper) -> None:
        """Have the helper fork the process that serves the store, unless it lives. The listening socket goes to it, so
        that early clients wait in the backlog instead of being refused.
        """
        if self._server and helper.ask({"do": "alive", "pid": self._server})["alive"]:
            return
        listening = self._bind()
        self._end_server()
        self._server_channel, theirs = socket.socketpair()
        with listening as listener, theirs:
            self._listener = None
            request = {"do": "serve", "standalone": self.standalone, "term": self._used.term}
            self._server = helper.ask(request, listener, theirs)["pid"]

    def _bind(self) -> socket.socket:
        """Listen at the store's port. A host that died a moment ago may hold the port for `BIND_DEADLINE_S`. Raises
        StoreRefused after that.
        """
        give_up_at = time.monotonic() + BIND_DEADLINE_S
        while self._listener is None:
            try:
                self._listener = listen(self._used.port)
            except OSError as error:
                if time.monotonic() >= give_up_at or self._closing.is_set():
                    raise StoreRefused(
                        f"cannot host the c10d store at port {self._used.port}: {error.strerror or error}; "
                        "free the port, or give --rdzv-endpoint another port on every node"
                    ) from None
                self._closing.wait(0.1)
        return self._listener

    def _end_server(self) -> None:
        channel, self._server_channel = self._server_channel, None
        if channel is not None:
            channel.close()

    def _read_messages(self, channel: socket.socket) -> bool:
        """Handle the client's messages until its end. True if it became ready."""
        ready = False
        deadline = time.monotonic() + CONNECT_DEADLINE_S
        lines = LineReader(channel.fileno())
        hosted = self._server_channel if self._used.serve else None
        server = None if hosted is None else hosted.fileno()  # readable: it has ended
        while True:
            try:
                message: messages.Message = json.loads(lines.next_line(math.inf if ready else deadline, server))
            except HelperError:
                break
            match message:
                case {"ready": start}:
                    if not self._accepts(start):
                        break
                    ready = True
                    self._on_connected(channel)
                case {"id": number}:
                    with self._state:
                        call = self._calls.get(number)
                    if call is not None:
                        call.answer = message
                        call.done.set()
                case {"changed": prefix, "key": key}:
                    self.on_change(prefix, key)
                case {"lost": why}:
                    self._why = why
                case {"refused": why}:
                    raise StoreRefused(f"{self.where}: {why}; check --rdzv-endpoint and the versions of elasticd")
        if not ready and self._why == "it has not answered yet":
            self._why = "connected, but no answer: another program may have the port"
        with self._state:
            if ready and not self._closing.is_set():
                self._begin_outage()
        return ready

    def _accepts(self, start: str) -> bool:
        """True if the store is the one to use: another agent may have begun to host one at this address."""
        standalone, term = parse_marker(start)
        with self._state:
            if self._wanted is not self._used:
                return False
            if self._expected not in (None, term):
                self._why = "another agent has begun to host a store there"
                return False
            self.standalone, self.term = standalone, term
            return True

    def _on_connected(self, channel: socket.socket) -> None:
        """Register all watches with the new client, then let callers in, then report every prefix as changed: changes
        during the outage had no watch.
        """
        with self._state:
            prefixes = list(self._prefixes)
        for prefix in prefixes:
            self._send_without_answer(channel, "watch", prefix, CONNECT_DEADLINE_S)
        with self._state:
            if self._wanted is not self._used:
                return  # `_set_target` has ended the channel
            back = self._in_outage
            self._ready = self._was_ready = True
            self._in_outage = False
            self._state.notify_all()
        if back:
            self._log(f"the c10d store at {self.where} answers again")
        for prefix in prefixes:
            self.on_change(prefix, prefix)


def listen(port: int) -> socket.socket:
    """A socket that listens on all addresses of this machine, of both families if it has both."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=4096)
