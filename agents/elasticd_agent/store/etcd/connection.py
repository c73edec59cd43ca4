"""The connection to etcd: sends one request to a member that answers, within a deadline, or says why not.

It exists because etcd3's client gives up what an agent needs: the token is never renewed, errors are gRPC's own, there
is one endpoint. Here a member that fails is left for the next one; a token that has ended is renewed; errors become
StoreUnavailable or StoreRefused; an outage is said once, and its end. Only requests that may be repeated are retried.
Nothing here knows what a key means.
"""

from __future__ import annotations

import queue
import random
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn

import grpc
import tenacity

from elasticd.errors import StoreRefused, StoreUnavailable
from elasticd_agent.model.job import Tls
from elasticd_agent.store import Traffic
from elasticd_agent.store.etcd import diagnose as etcd_first_contact
from elasticd_agent.store.etcd.errors import ClassifiedError, ErrorKind, classify
from elasticd_agent.store.etcd.outage import OutageLog
from elasticd_agent.store.etcd.proto import rpc
from elasticd_agent.store.etcd.watch_stream import WatchStream

# A third of the default lease is 1 s; whoever comes back must be heard of well before that.
PAUSE_MIN_S, PAUSE_MAX_S = 0.02, 0.4

_OPTIONS = (
    # A frozen server or a vanished host keeps a watch silent: ask every 5 s (what etcd allows), wait 2 s. The same time
    # becomes TCP_USER_TIMEOUT, which ends a connection whose data nobody acknowledges.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC's own: 1 s, growing to 120 s.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", int(PAUSE_MAX_S * 1000)),
    # Several stores in one process are several clients.
    ("grpc.use_local_subchannel_pool", 1),
    # Agents meet inside a cluster, where a proxy for the web does not lead.
    ("grpc.enable_http_proxy", 0),
    # 1000 nodes' records are more than the default 4 MB may hold.
    ("grpc.max_receive_message_length", -1),
)
# A member that has lost its leader shall say so at once instead of keeping us waiting, on streams above all.
_HAS_LEADER = ("hasleader", "true")


class Method(Enum):
    RANGE = "Range"
    TXN = "Txn"
    DELETE = "DeleteRange"
    GRANT = "LeaseGrant"
    REVOKE = "LeaseRevoke"
    KEEP_ALIVE = "LeaseKeepAlive"
    AUTHENTICATE = "Authenticate"


@dataclass(eq=False, slots=True)
class _Member:
    """One endpoint. `met`: it has answered us before, so what it does now is an outage and no typing mistake."""

    host: str
    port: int
    channel: Any = None
    methods: dict[Method, Any] = field(default_factory=dict)
    watch: Any = None
    answered: bool = False
    streams: set[Any] = field(default_factory=set)

    @property
    def where(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class EtcdConnection:
    """Thread-safe. Every call ends within `timeout_s`, give or take the time a thread waits for a processor."""

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        tls: Tls | None,
        user: str | None,
        password: str | None,
        timeout_s: float,
        log: Callable[[str], None],
        traffic: Traffic,
    ) -> None:
        self.timeout_s = timeout_s
        self.traffic = traffic
        self.closing = threading.Event()
        self._say = log
        self._user = user
        self._password = password
        self._tls_context: ssl.SSLContext | None = etcd_first_contact.context(tls) if tls else None
        self._credentials = _credentials(tls, self._tls_context) if tls and self._tls_context else None
        self._members = [_Member(host, port) for host, port in endpoints]
        # Agents spread themselves over the members.
        self._at = random.randrange(len(self._members))
        self._ready: _Member | None = None
        self._token: str | None = None
        self._without_auth = False
        self._lock = threading.Lock()  # guards everything above, never held while waiting for etcd
        self._connecting = threading.Lock()  # one thread looks for a member, the others wait for what it finds
        self.outage = OutageLog(log, ", ".join(m.where for m in self._members))

    def call(self, verb: Method, request: Any, *, key: str = "", repeatable: bool = False) -> Any:
        """The answer. `repeatable`: to ask twice does no harm, so it is retried for as long as `timeout_s` allows.

        Raises StoreUnavailable, StoreRefused; LeaseGone when the request names a lease that has ended.
        """
        deadline = time.monotonic() + self.timeout_s
        try:
            if repeatable:
                answer = self._retrying()(self._try_once, verb, request, key, deadline, len(self._members) > 1)
            else:
                answer = self._try_once(verb, request, key, deadline, False)
        except StoreUnavailable as error:
            if not self.closing.is_set():
                self.outage.failed(str(error))
            raise
        self.outage.succeeded()
        return answer

    def follow(self) -> WatchStream:
        """Watch responses to what it is asked. Raises as `call`; itself it ends without a word when it breaks."""
        member = self._find_member(time.monotonic() + self.timeout_s)
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._lock:
            try:
                stream = self._with_channel(member).watch(
                    iter(requests.get, None), metadata=self._metadata(self._token)
                )
            except ValueError as error:  # the channel was closed meanwhile
                raise StoreUnavailable("the store has been closed") from error
            member.streams.add(stream)
        return WatchStream(
            stream, requests, self._count_sent, self._count_received, lambda: self._discard_stream(member, stream)
        )

    def close(self) -> None:
        self.closing.set()
        with self._lock:
            channels = [member.channel for member in self._members if member.channel is not None]
        for channel in channels:
            channel.close()

    def _discard_stream(self, member: _Member, stream: Any) -> None:
        with self._lock:
            member.streams.discard(stream)

    def _count_sent(self, message: Any) -> None:
        with self._lock:
            self.traffic.requests += 1
            self.traffic.sent_bytes += message.ByteSize()

    def _count_received(self, message: Any) -> None:
        with self._lock:
            self.traffic.received_bytes += message.ByteSize()

    def _retrying(self) -> tenacity.Retrying:
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StoreUnavailable),
            wait=tenacity.wait_random_exponential(multiplier=PAUSE_MIN_S, max=PAUSE_MAX_S),
            stop=tenacity.stop_before_delay(self.timeout_s) | tenacity.stop_when_event_set(self.closing),
            sleep=tenacity.sleep_using_event(self.closing),
            reraise=True,
        )

    def _try_once(self, verb: Method, request: Any, key: str, deadline: float, leave_time: bool) -> Any:
        member = self._find_member(deadline)
        if leave_time:
            # For one more member, should this one be frozen.
            deadline -= (deadline - time.monotonic()) / 2
        try:
            return self._send_authenticated(member, verb, request, deadline)
        except grpc.RpcError as error:
            self._raise_error(member, self._classify(error, member, key))

    def _send_authenticated(self, member: _Member, verb: Method, request: Any, deadline: float) -> Any:
        """With a good token. Raises grpc.RpcError."""
        token = self._current_token(member, deadline)
        try:
            return self._send(member, verb, request, token, deadline)
        except grpc.RpcError as error:
            if self._user is None or self._classify(error, member, "").kind is not ErrorKind.TOKEN:
                raise
        # Refused before it was looked at, so asking again cannot do it twice.
        with self._lock:
            if self._token == token:
                self._token = None
        return self._send(member, verb, request, self._current_token(member, deadline), deadline)

    def _current_token(self, member: _Member, deadline: float) -> str | None:
        with self._lock:
            token, asked = self._token, self._without_auth
        if token is not None or asked or self._user is None:
            return token
        request = rpc.AuthenticateRequest(name=self._user, password=self._password or "")
        try:
            token = str(self._send(member, Method.AUTHENTICATE, request, None, deadline).token)
        except grpc.RpcError as error:
            if self._classify(error, member, "").kind is not ErrorKind.AUTH_DISABLED:
                raise
            self._say(f"etcd at {member.where} asks nobody for a password; going on without")
            with self._lock:
                self._without_auth = True
            return None
        with self._lock:
            self._token = token
        return token

    def _send(self, member: _Member, verb: Method, request: Any, token: str | None, deadline: float) -> Any:
        left = deadline - time.monotonic()
        with self._lock:
            send = self._with_channel(member).methods[verb]
            self.traffic.requests += 1
            self.traffic.sent_bytes += request.ByteSize()
        try:
            answer = send(request, timeout=max(left, 0.001), metadata=self._metadata(token))
        except ValueError as error:  # the channel was closed meanwhile
            raise StoreUnavailable("the store has been closed") from error
        self._count_received(answer)
        return answer

    def _find_member(self, deadline: float) -> _Member:
        """A member that answers. Raises StoreUnavailable, or StoreRefused when every member refuses us."""
        if found := self._ready_member():
            return found
        if not self._connecting.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise StoreUnavailable(f"no etcd has answered within {self.timeout_s} s")
        try:
            if found := self._ready_member():
                return found
            with self._lock:
                order = self._members[self._at :] + self._members[: self._at]
            return self._check_members(order, deadline)
        finally:
            self._connecting.release()

    def _ready_member(self) -> _Member | None:
        with self._lock:
            return self._ready

    def _check_members(self, order: list[_Member], deadline: float) -> _Member:
        refused: list[StoreRefused] = []
        away: list[StoreUnavailable] = []
        for number, member in enumerate(order):
            share = (deadline - time.monotonic()) / (len(order) - number)
            try:
                self._check_member(member, time.monotonic() + share)
            except StoreRefused as error:
                refused.append(error)
            except StoreUnavailable as error:
                away.append(error)
            else:
                with self._lock:
                    member.answered = True
                    self._ready = member
                    self._at = self._members.index(member)
                return member
        # Once a member has had us, what another one says is no reason to give up while members are away.
        if refused and not (away and any(member.answered for member in order)):
            raise refused[0]
        raise away[0]

    def _check_member(self, member: _Member, deadline: float) -> None:
        """Ask for something that needs a leader and harms nobody. Raises StoreUnavailable or StoreRefused."""
        if self._tls_context is not None and not member.answered:
            left = deadline - time.monotonic()
            etcd_first_contact.check_tls(member.host, member.port, self._tls_context, left)
        try:
            self._send_authenticated(member, Method.RANGE, rpc.RangeRequest(key=b"\0", count_only=True), deadline)
        except grpc.RpcError as error:
            verdict = self._classify(error, member, "")
            if verdict.kind is ErrorKind.PERMISSION_DENIED:
                return
            if verdict.kind is ErrorKind.REFUSED:
                raise StoreRefused(verdict.sentence) from error
            self._raise_if_not_etcd(member, error, deadline)
            raise StoreUnavailable(verdict.sentence) from error

    def _raise_if_not_etcd(self, member: _Member, error: grpc.RpcError, deadline: float) -> None:
        """Raises StoreRefused if what is there has never been an etcd, or not one that we can talk to."""
        # What gRPC could not resolve would keep us waiting for longer than we have.
        if member.answered or self._tls_context or error.code() is not grpc.StatusCode.UNAVAILABLE:
            return
        if "failed to connect to all addresses" not in (error.details() or ""):
            return
        if why := etcd_first_contact.find_mismatch(member.host, member.port, max(deadline - time.monotonic(), 0.05)):
            raise StoreRefused(why) from error

    def _raise_error(self, member: _Member, verdict: ClassifiedError) -> NoReturn:
        if verdict.kind is ErrorKind.LEASE_NOT_FOUND:
            raise LeaseNotFound(verdict.sentence)
        if verdict.kind in (ErrorKind.REFUSED, ErrorKind.PERMISSION_DENIED):
            raise StoreRefused(verdict.sentence)
        self._abandon(member)
        raise StoreUnavailable(verdict.sentence)

    def _abandon(self, member: _Member) -> None:
        """The next request looks for a member anew, beginning with another one; streams go with it."""
        streams: list[Any] = []
        with self._lock:
            if self._ready is member:
                self._ready = None
                self._at = (self._members.index(member) + 1) % len(self._members)
            if len(self._members) > 1:
                streams, member.streams = list(member.streams), set()
        for stream in streams:
            stream.cancel()

    def _classify(self, error: grpc.RpcError, member: _Member, key: str) -> ClassifiedError:
        return classify(error.code().name, error.details() or "", member.where, key)

    @staticmethod
    def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
        # Not as call credentials, which gRPC sends over TLS only.
        return (_HAS_LEADER,) if token is None else (_HAS_LEADER, ("token", token))

    def _with_channel(self, member: _Member) -> _Member:
        """The lock is held. Makes the channel if there is none; gRPC connects it when it is first used."""
        if self.closing.is_set():
            raise StoreUnavailable("the store has been closed")
        if member.channel is None:
            channel = (
                grpc.secure_channel(member.where, self._credentials, options=_OPTIONS)
                if self._credentials is not None
                else grpc.insecure_channel(member.where, options=_OPTIONS)
            )
            member.channel = channel
            keys, leases, users = rpc.KVStub(channel), rpc.LeaseStub(channel), rpc.AuthStub(channel)
            member.methods = {
                Method.RANGE: keys.Range,
                Method.TXN: keys.Txn,
                Method.DELETE: keys.DeleteRange,
                Method.GRANT: leases.LeaseGrant,
                Method.REVOKE: leases.LeaseRevoke,
                Method.AUTHENTICATE: users.Authenticate,
                # A stream of one request and one answer is, on the wire, a plain call: with its own deadline, on the
                # one connection there is, and without the two threads that gRPC's Python runs for a stream.
                Method.KEEP_ALIVE: channel.unary_unary(
                    "/etcdserverpb.Lease/LeaseKeepAlive",
                    request_serializer=rpc.LeaseKeepAliveRequest.SerializeToString,
                    response_deserializer=rpc.LeaseKeepAliveResponse.FromString,
                ),
            }
            member.watch = channel.stream_stream(
                "/etcdserverpb.Watch/Watch",
                request_serializer=rpc.WatchRequest.SerializeToString,
                response_deserializer=rpc.WatchResponse.FromString,
            )
        return member


class LeaseNotFound(Exception):
    """The request names a lease that has ended; nothing has changed. The store makes a value of it."""


def _credentials(tls: Tls, checked: ssl.SSLContext) -> Any:
    roots = tls.ca.read_bytes() if tls.ca else None
    if roots is None:
        # Without a CA of its own gRPC trusts a list it brings along; what this machine trusts is what people expect.
        known = checked.get_ca_certs(binary_form=True)
        roots = "".join(map(ssl.DER_cert_to_PEM_cert, known)).encode() or None
    key = tls.key.read_bytes() if tls.key else None
    cert = tls.cert.read_bytes() if tls.cert else None
    return grpc.ssl_channel_credentials(roots, key, cert)
