"""The connection to etcd: sends each request to a member that answers, within a deadline, or raises why not.

etcd3's own client has one endpoint, never renews its token and raises gRPC's errors. Here a member that fails is left
for the next one, an expired token is renewed, errors become StoreUnavailable or StoreRefused, and an outage is logged
once, as is its end. Only repeatable requests are retried.

Finding a member. `_ready` is the member in use. Any error of it clears `_ready`; the next call checks the members in
turn with a harmless read, which needs a leader, and takes the first that answers. One thread checks while the others
wait for its result, since a hundred calls that each try three dead members would need three hundred timeouts. The time
that is left is shared among the members that are left, so a frozen first member does not cost the deadline.

Unavailable or refused. A member that cannot be reached, has no leader or is overloaded makes a call StoreUnavailable:
it may work in a moment, and whether a write has happened is unknown. A wrong password, a missing right, or a server
that is no etcd makes it StoreRefused: repeating does not help, and a person has to act. The difference matters most at
the start, where a typing mistake would look like an outage for the whole join timeout: a member that has never answered
is examined (diagnose.py), one that has answered before is not, since its failure is an outage by definition.

Which requests repeat. A read, a watch and a lease renewal may be sent twice. A transaction may not: its first sending
may have succeeded although the answer was lost, and the caller finds out by reading. A token that was rejected is the
exception, since etcd checks it before it looks at the request.
"""

from __future__ import annotations

import random
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio
import tenacity

from elasticd.errors import StoreRefused, StoreUnavailable
from elasticd_agent.model.job import Tls
from elasticd_agent.store.etcd import diagnose
from elasticd_agent.store.etcd.errors import ClassifiedError, ErrorKind, LeaseNotFound, classify
from elasticd_agent.store.etcd.keys import key_range
from elasticd_agent.store.etcd.proto import rpc
from elasticd_agent.store.etcd.stream import WatchStream
from elasticd_agent.system.network.addresses import format_endpoint

PAUSE_MIN_S, PAUSE_MAX_S = 0.02, 0.4
"""A third of the default lease is 1 s; a reconnected client must have renewed well before that."""

AUTHENTICATE_TIMEOUT_S = 20.0
"""The time for a token, however little each caller has. etcd serves some hundred clients in it, others in the next."""

_CHANNEL_OPTIONS = (
    # A frozen server or a lost host keeps a watch silent: ping every 5 s (what etcd allows), wait 2 s. The same time
    # becomes TCP_USER_TIMEOUT, which ends a connection whose data is not acknowledged.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC's own: 1 s, growing to 120 s.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", int(PAUSE_MAX_S * 1000)),
    # Several stores in one process are several clients.
    ("grpc.use_local_subchannel_pool", 1),
    # etcd is inside the cluster; a web proxy does not lead there.
    ("grpc.enable_http_proxy", 0),
    # The records of 1000 nodes exceed the default 4 MB.
    ("grpc.max_receive_message_length", -1),
)
_CONNECT_TIME = "grpc.min_reconnect_backoff_ms"
"""The time for making a connection, which takes two round trips, and three with TLS."""
# No request waits for a stream's, and many agents may begin theirs at once.
_STREAM_CHANNEL_OPTIONS = (*_CHANNEL_OPTIONS, (_CONNECT_TIME, 5000))
_WRITES = ("Txn", "LeaseGrant")
"""The calls that an etcd without room refuses."""
# A member without a leader must answer so at once instead of blocking, on streams above all.
_REQUIRE_LEADER = ("hasleader", "true")


@dataclass(eq=False, slots=True)
class _EtcdMember:
    """One endpoint."""

    where: str
    host: str
    port: int
    channel: Any = None
    methods: Mapping[str, Any] = field(default_factory=dict)
    has_answered: bool = False  #: it has answered before, so a failure now is an outage and no typing mistake
    streams: set[WatchStream] = field(default_factory=set)
    authentication: Any = None  #: gRPC's future of the request for a token that is on its way


class EtcdConnection:
    """A thread-safe connection to the members of one etcd cluster.

    Every call ends within `timeout_s`, plus the time a thread waits for a processor.
    """

    rpc = rpc

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        tls: Tls | None,
        user: str | None,
        password: str | None,
        timeout_s: float,
        log: Callable[[str], None],
    ) -> None:
        """Prepare the connection; nothing is sent yet. `user`, `password`: None for a cluster without authentication.

        Raises StoreRefused for TLS files that cannot be used.
        """
        self.timeout_s = timeout_s
        self._call_channel_options = (*_CHANNEL_OPTIONS, (_CONNECT_TIME, max(500, int(500 * timeout_s))))
        self.closing = threading.Event()
        self._log = log
        self._user = user
        self._password = password
        self._tls_context: ssl.SSLContext | None = diagnose.make_context(tls) if tls else None
        self._credentials = _credentials(tls, self._tls_context) if tls and self._tls_context else None
        self._members = [_EtcdMember(format_endpoint(host, port), host, port) for host, port in endpoints]
        self._at = random.randrange(len(self._members))  # agents spread over the members
        self._ready: _EtcdMember | None = None
        self._token: str | None = None
        self._without_auth = False
        self._down_since: float | None = None
        self._is_full = False  # an outage of what writes: answers to the rest do not end it
        self._lock = threading.Lock()  # guards everything above, never held while waiting for etcd
        self._connecting = threading.Lock()  # one thread looks for a member, the others wait for its result
        # For all calls: each one's own would be garbage with cycles, megabytes of it until it is collected.
        self._retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StoreUnavailable),
            wait=tenacity.wait_random_exponential(multiplier=PAUSE_MIN_S, max=PAUSE_MAX_S),
            stop=self._has_no_time,
            sleep=tenacity.sleep_using_event(self.closing),
            reraise=True,
        )

    def call(self, method: str, request: Any, *, key: str = "", repeatable: bool = False) -> Any:
        """The answer. `repeatable`: sending it twice does no harm, so it is retried for as long as `timeout_s` allows.

        Raises StoreUnavailable, StoreRefused; LeaseNotFound when the request names a lease that has ended.
        """
        deadline = time.monotonic() + self.timeout_s
        try:
            if repeatable:
                answer = self._retrying(self._try_once, method, request, key, deadline, len(self._members) > 1)
            else:
                answer = self._try_once(method, request, key, deadline, False)
        except StoreUnavailable as error:
            if not self.closing.is_set():
                self.report_failure(str(error))
            # The frames that it has passed hold it, and gRPC's state, until garbage is collected: by then an outage has
            # made megabytes of them. The sentence is all that anybody uses.
            error.__cause__ = error.__context__ = None
            raise error.with_traceback(None) from None
        self._report_success(method)
        return answer

    def range(self, prefix: str, **options: Any) -> Any:
        """All keys that begin with `prefix`; `options` of etcd's RangeRequest, such as the cheap `count_only`."""
        request = rpc.RangeRequest(**key_range(prefix), **options)
        return self.call("Range", request, key=prefix, repeatable=True)

    def report_failure(self, why: str) -> None:
        """Log the begin of an outage, once."""
        with self._lock:
            begun, self._down_since = self._down_since, self._down_since or time.monotonic()
        if begun is None:
            self._log(f"the store does not answer: {why}; retrying")

    def _report_success(self, method: str) -> None:
        if self._down_since is None or (self._is_full and method not in _WRITES):
            return
        with self._lock:
            begun, self._down_since, self._is_full = self._down_since, None, False
        if begun is not None:
            where = ", ".join(member.where for member in self._members)
            self._log(f"the store answers again: etcd at {where}, after {time.monotonic() - begun:.1f} s")

    def open_watch_stream(self) -> WatchStream:
        """A stream for watches. Raises as `call`."""
        member = self._find_member(time.monotonic() + self.timeout_s)
        with self._lock:
            if self.closing.is_set():
                raise StoreUnavailable("the store has been closed")
            stream = WatchStream(
                partial(self._open_channel, grpc.aio, member, _STREAM_CHANNEL_OPTIONS), self._metadata(self._token)
            )
            member.streams = {*(s for s in member.streams if not s.ended), stream}
        return stream

    def close(self) -> None:
        """Close all channels. Calls that wait end with StoreUnavailable at once."""
        self.closing.set()
        with self._lock:
            channels = [member.channel for member in self._members if member.channel is not None]
            streams = [stream for member in self._members for stream in member.streams]
        for stream in streams:
            stream.cancel()
        for channel in channels:
            channel.close()

    def _has_no_time(self, state: tenacity.RetryCallState) -> bool:
        """True if a call cannot be tried again."""
        spent_s = state.seconds_since_start or 0.0
        return self.closing.is_set() or spent_s + state.upcoming_sleep >= self.timeout_s

    def _try_once(self, method: str, request: Any, key: str, deadline: float, leave_time: bool) -> Any:
        """Send the request to a member once. `leave_time`: it gets half of the time that is left, for another member
        after it.
        """
        member = self._find_member(deadline)
        if leave_time:  # for one more member, in case this one is frozen
            deadline -= (deadline - time.monotonic()) / 2
        try:
            return self._send_authenticated(member, method, request, deadline)
        except grpc.RpcError as error:
            self._raise_error(member, _classify(error, member, key))

    def _send_authenticated(self, member: _EtcdMember, method: str, request: Any, deadline: float) -> Any:
        """Send with a valid token: a rejected one is replaced, and the request sent again, once.
        Raises grpc.RpcError.
        """
        token = self._current_token(member, deadline)
        try:
            return self._send(member, method, request, token, deadline)
        except grpc.RpcError as error:
            if self._user is None or _classify(error, member).kind is not ErrorKind.TOKEN:
                raise
        # Rejected before it was processed, so repeating it cannot do it twice.
        with self._lock:
            if self._token == token:
                self._token = None
        return self._send(member, method, request, self._current_token(member, deadline), deadline)

    def _current_token(self, member: _EtcdMember, deadline: float) -> str | None:
        """Return the token, or have one made. None: there is no user, or the cluster does not require one."""
        with self._lock:
            token, without_auth = self._token, self._without_auth
        if token is not None or without_auth or self._user is None:
            return token
        pending = self._request_token(member)
        try:
            answer = pending.result(max(deadline - time.monotonic(), 0.001))
        except grpc.FutureTimeoutError:
            raise StoreUnavailable(f"etcd at {member.where} has not checked the password yet") from None
        except grpc.FutureCancelledError:
            self._end_authentication(member, pending)
            raise StoreUnavailable("the store has been closed") from None
        except grpc.RpcError as error:
            self._end_authentication(member, pending)
            if _classify(error, member).kind is not ErrorKind.AUTH_DISABLED:
                raise
            self._log(f"etcd at {member.where} does not require a password; continuing without")
            with self._lock:
                self._without_auth = True
            return None
        self._end_authentication(member, pending, str(answer.token))
        return str(answer.token)

    def _request_token(self, member: _EtcdMember) -> Any:
        """Send a request for a token, unless one is on its way. It outlives the callers that wait for it.

        bcrypt takes etcd a tenth of a second of a processor, also for a client that has given up. If each of the many
        that come after its restart repeated its request with every call, none would ever be answered in time.
        """
        with self._lock:
            if member.authentication is None:
                request = rpc.AuthenticateRequest(name=self._user, password=self._password or "")
                send = self._with_channel(member).methods["Authenticate"]
                try:
                    member.authentication = send.future(
                        request, timeout=AUTHENTICATE_TIMEOUT_S, metadata=self._metadata(None)
                    )
                except ValueError as error:  # the channel was closed meanwhile
                    raise StoreUnavailable("the store has been closed") from error
            return member.authentication

    def _end_authentication(self, member: _EtcdMember, pending: Any, token: str | None = None) -> None:
        with self._lock:
            if member.authentication is pending:
                member.authentication = None
                self._token = token

    def _send(self, member: _EtcdMember, method: str, request: Any, token: str | None, deadline: float) -> Any:
        left = deadline - time.monotonic()
        with self._lock:
            send = self._with_channel(member).methods[method]
        try:
            return send(request, timeout=max(left, 0.001), metadata=self._metadata(token))
        except ValueError as error:  # the channel was closed meanwhile
            raise StoreUnavailable("the store has been closed") from error

    def _find_member(self, deadline: float) -> _EtcdMember:
        """A member that answers. Raises StoreUnavailable, or StoreRefused if every member refuses us."""
        if ready := self._ready_member():
            return ready
        if not self._connecting.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise StoreUnavailable(f"no etcd has answered within {self.timeout_s} s")
        try:
            if ready := self._ready_member():
                return ready
            with self._lock:
                order = self._members[self._at :] + self._members[: self._at]
            return self._first_answering(order, deadline)
        finally:
            self._connecting.release()

    def _ready_member(self) -> _EtcdMember | None:
        with self._lock:
            return self._ready

    def _first_answering(self, order: list[_EtcdMember], deadline: float) -> _EtcdMember:
        """Return the first member in `order` that answers.

        Raises StoreRefused if a member refuses us and no other may still accept us, else StoreUnavailable with the
        first member's reason.
        """
        refused: list[str] = []  # not the errors: their frames hold this list
        unavailable: list[str] = []
        for number, member in enumerate(order):
            share = (deadline - time.monotonic()) / (len(order) - number)
            try:
                self._check_member(member, time.monotonic() + share)
            except StoreRefused as error:
                refused.append(str(error))
            except StoreUnavailable as error:
                unavailable.append(str(error))
            else:
                with self._lock:
                    member.has_answered = True
                    self._ready = member
                    self._at = self._members.index(member)
                return member
        # Once a member has accepted us, the refusal of another one is no reason to give up while members are down.
        if refused and not (unavailable and any(member.has_answered for member in order)):
            raise StoreRefused(refused[0])
        raise StoreUnavailable(unavailable[0])

    def _check_member(self, member: _EtcdMember, deadline: float) -> None:
        """Send a harmless request that needs a leader. Raises StoreUnavailable or StoreRefused."""
        if self._tls_context is not None and not member.has_answered:
            diagnose.check_tls(member.host, member.port, self._tls_context, deadline - time.monotonic())
        try:
            self._send_authenticated(member, "Range", rpc.RangeRequest(key=b"\0", count_only=True), deadline)
        except grpc.RpcError as error:
            classified = _classify(error, member)
            if classified.kind is ErrorKind.PERMISSION_DENIED:
                return
            if classified.kind is ErrorKind.REFUSED:
                raise StoreRefused(classified.sentence) from error
            self._raise_if_not_etcd(member, error, deadline)
            raise StoreUnavailable(classified.sentence) from error

    def _raise_if_not_etcd(self, member: _EtcdMember, error: grpc.RpcError, deadline: float) -> None:
        """Raises StoreRefused if the server has never been an etcd, or is one that we cannot talk to."""
        # A name that gRPC could not resolve would block us for longer than the deadline.
        if member.has_answered or self._tls_context or error.code() is not grpc.StatusCode.UNAVAILABLE:
            return
        if "failed to connect to all addresses" not in (error.details() or ""):
            return
        if why := diagnose.find_mismatch(member.host, member.port, max(deadline - time.monotonic(), 0.05)):
            raise StoreRefused(why) from error

    def _raise_error(self, member: _EtcdMember, error: ClassifiedError) -> NoReturn:
        if error.kind is ErrorKind.LEASE_NOT_FOUND:
            raise LeaseNotFound(error.sentence)
        if error.kind in (ErrorKind.REFUSED, ErrorKind.PERMISSION_DENIED):
            raise StoreRefused(error.sentence)
        self._is_full = self._is_full or error.kind is ErrorKind.FULL
        self._abandon(member)
        raise StoreUnavailable(error.sentence)

    def _abandon(self, member: _EtcdMember) -> None:
        """The next request looks for a member again, beginning with another one; streams go with it."""
        streams: list[WatchStream] = []
        with self._lock:
            if self._ready is member:
                self._ready = None
                self._at = (self._members.index(member) + 1) % len(self._members)
            if len(self._members) > 1:
                streams, member.streams = list(member.streams), set()
        for stream in streams:
            stream.cancel()

    @staticmethod
    def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
        # Not as call credentials, which gRPC sends over TLS only.
        return (_REQUIRE_LEADER,) if token is None else (_REQUIRE_LEADER, ("token", token))

    def _with_channel(self, member: _EtcdMember) -> _EtcdMember:
        """Under the lock. Creates the channel if there is none; gRPC connects it at its first use."""
        if self.closing.is_set():
            raise StoreUnavailable("the store has been closed")
        if member.channel is None:
            member.channel = channel = self._open_channel(grpc, member, self._call_channel_options)
            keys, leases = rpc.KVStub(channel), rpc.LeaseStub(channel)
            member.methods = {
                "Range": keys.Range,
                "Txn": keys.Txn,
                "DeleteRange": keys.DeleteRange,
                "LeaseGrant": leases.LeaseGrant,
                "LeaseRevoke": leases.LeaseRevoke,
                "Authenticate": rpc.AuthStub(channel).Authenticate,
                # On the wire a stream of one request and one answer is a plain call: with its own deadline, on the one
                # connection there is, and without the two threads that gRPC's Python runs for a stream.
                "LeaseKeepAlive": channel.unary_unary(
                    "/etcdserverpb.Lease/LeaseKeepAlive",
                    request_serializer=rpc.LeaseKeepAliveRequest.SerializeToString,
                    response_deserializer=rpc.LeaseKeepAliveResponse.FromString,
                ),
            }
        return member

    def _open_channel(self, kind: Any, member: _EtcdMember, options: Sequence[tuple[str, int]]) -> Any:
        """A channel of `kind`, grpc or grpc.aio."""
        if self._credentials is not None:
            return kind.secure_channel(member.where, self._credentials, options=options)
        return kind.insecure_channel(member.where, options=options)


def _classify(error: grpc.RpcError, member: _EtcdMember, key: str = "") -> ClassifiedError:
    return classify(error.code().name, error.details() or "", member.where, key)


def _credentials(tls: Tls, checked: ssl.SSLContext) -> Any:
    roots = tls.ca.read_bytes() if tls.ca else None
    if roots is None:
        # Without a CA gRPC trusts a list of its own; people expect the authorities that this machine trusts.
        known = checked.get_ca_certs(binary_form=True)
        roots = "".join(map(ssl.DER_cert_to_PEM_cert, known)).encode() or None
    key = tls.key.read_bytes() if tls.key else None
    cert = tls.cert.read_bytes() if tls.cert else None
    return grpc.ssl_channel_credentials(roots, key, cert)
