"""The agent's HTTP server: authentication, limits, and clients that misbehave."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from elasticd.errors import UsageError
from elasticd_agent.system.network.http_auth import (
    AGENT_AUTH_SCHEME,
    ATTEMPT_BURST,
    TokenAuth,
    agent_credential,
    token_digest,
)
from elasticd_agent.system.network.http_server import MAX_BODY_BYTES, MAX_HEAD_BYTES
from elasticd_daemon.api.client import AgentClient, Unreachable
from elasticd_daemon.api.server import MAX_CONNECTIONS, ApiServer
from elasticd_daemon.config.agent_settings import HttpSettings
from tests.daemon.api.test_audit import Lines
from tests.daemon.served import DEADLINE, JOB, TOKEN, Served, ended, fds
from tests.etcd import Authority

Serve = Callable[..., Served]
Until = Callable[[Callable[[], object], float], object]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with ExitStack() as stack:

        def start(**how: Any) -> Served:
            made = Served(tmp_path / f"{len(os.listdir(tmp_path))}", **how)
            stack.callback(made.close)
            return made

        yield start


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that every user reaches; pytest keeps its own to itself."""
    with tempfile.TemporaryDirectory(prefix="elasticd-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def raw(served: Served, data: bytes) -> bytes:
    """What comes back to these very bytes, until the end."""
    with served.connected() as sock:
        sock.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            return b"".join(iter(lambda: sock.recv(65536), b""))
    return b""


# --- who is let in ----------------------------------------------------------------------------------------------------


def test_tcp_has_three_public_paths(serve: Serve) -> None:
    one = serve()
    nobody, known = one.tcp(token=None), one.tcp()
    assert (nobody.get("/metrics").code, nobody.get("/metrics").body) == (200, b"up 1.0\n")
    assert (nobody.get("/healthz").code, nobody.get("/readyz").code) == (200, 503)
    for path in (
        "/status",
        "/v1/jobs",
        "/v1/nodes",
        "/nothing",
        "/metrics/",
        "/v1/../metrics",
        "/metrics%2f",
        "/METRICS",
    ):
        assert nobody.get(path).code == 401, path
        assert known.get(path).code in (200, 404), path
    assert nobody.post("/metrics").code == 401, "only reading it is open"
    assert nobody.request("DELETE", "/v1/jobs/x").code == 401
    assert one.unix().get("/v1/jobs").code == 200


@pytest.mark.parametrize(
    "given",
    [
        ("Bearer wrong-horse-battery-staple",),
        (f"Bearer {TOKEN[:-1]}",),
        (f"Bearer {TOKEN}x",),
        (f"Basic {TOKEN}",),
        (TOKEN,),
        ("Bearer",),
        ("",),
        ("Bearer \x80\xff",),
        (f"Bearer {TOKEN}", f"Bearer {TOKEN}"),
        ("Bearer " + "x" * 8000,),
    ],
)
def test_wrong_token_is_denied_and_changes_nothing(serve: Serve, given: tuple[str, ...]) -> None:
    one = serve()
    head = b"".join(b"Authorization: " + value.encode("latin-1") + b"\r\n" for value in given)
    body = b"Content-Type: application/toml\r\nContent-Length: %d\r\n\r\n%s" % (len(JOB), JOB)
    answer = raw(one, b"POST /v1/jobs?id=x HTTP/1.1\r\n" + head + body)
    assert answer.startswith(b"HTTP/1.1 401 "), answer
    assert TOKEN.encode() not in answer
    assert not one.store.list("/")


def test_token_header_may_have_any_spacing(serve: Serve) -> None:
    one = serve()
    assert raw(one, f"GET /v1/jobs HTTP/1.1\r\nauthorization:   bearer  {TOKEN}  \r\n\r\n".encode()).startswith(
        b"HTTP/1.1 200 "
    )


def test_without_token_file_the_answer_says_how_to_get_access(serve: Serve) -> None:
    reply = serve(token=None).tcp("anything-at-all-of-some-length").get("/v1/jobs")
    assert (reply.code, "http.token_file in agent.toml" in reply.why) == (403, True)


def test_new_token_counts_at_once_and_a_readable_one_never(serve: Serve) -> None:
    one = serve()
    assert one.tcp().get("/status").code == 200
    new = one.root / "new"
    new.write_text("another-token-0123456789-0123456789\n")
    new.chmod(0o600)
    new.replace(one.token_file)
    assert one.tcp().get("/status").code == 401
    assert one.tcp("another-token-0123456789-0123456789").get("/status").code == 200
    one.token_file.chmod(0o644)
    reply = one.tcp("another-token-0123456789-0123456789").get("/status")
    assert (reply.code, "chmod 640" in reply.why, "another" in reply.why) == (403, True, False)
    one.token_file.chmod(0o600)
    assert one.tcp("another-token-0123456789-0123456789").get("/status").code == 200
    one.token_file.write_text("\n")
    assert one.tcp("").get("/status").code == 403, "an empty file is no token, and lets nobody in"
    one.token_file.unlink()
    assert one.tcp("another-token-0123456789-0123456789").get("/status").code == 403


def test_wrong_tokens_are_logged_once_a_minute(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    one = serve()
    for _ in range(5):
        assert one.tcp("not-the-token-but-of-the-right-length").get("/v1/jobs").code == 401
    (line,) = [record.getMessage() for record in caplog.records if "wrong token" in record.getMessage()]
    assert line == "access denied: 1 wrong token(s), the last from 127.0.0.1"


def test_wrong_tokens_are_limited_by_address_and_lock_nobody_out(serve: Serve) -> None:
    one = serve()
    stranger = one.tcp("not-the-token-but-of-the-right-length")
    codes = [stranger.get("/v1/jobs").code for _ in range(ATTEMPT_BURST + 1)]
    assert codes == [401] * ATTEMPT_BURST + [429]
    assert int(stranger.get("/v1/jobs").headers["retry-after"]) > 0
    assert one.tcp().get("/v1/jobs").code == 200, "from the same address"


def test_named_and_read_only_tokens(serve: Serve, tmp_path: Path) -> None:
    files = {name: tmp_path / f"token-{name}" for name in ("alice", "grafana")}
    for name, file in files.items():
        file.write_text(f"the-token-of-{name}-0123456789-0123456789\n")
        file.chmod(0o600)
    one = serve(where={"tokens": files, "read_only": ("grafana",)})
    alice, grafana = (one.tcp(file.read_text().strip()) for file in files.values())
    assert alice.post("/v1/jobs", JOB, "application/toml", query={"id": "hers"}).code == 201
    (submitted,) = alice.get("/v1/jobs").document()["jobs"]
    assert submitted["submitted_by"] == "token alice at 127.0.0.1"
    for path in ("/v1/jobs", "/v1/jobs/hers", "/v1/nodes", "/status"):
        assert grafana.get(path).code == 200, path
    for path in ("/v1/jobs?id=x", "/v1/jobs/hers/cancel", "/v1/jobs/hers/dump", "/v1/nodes/n1/drain", "/nothing"):
        reply = grafana.post(path, JOB, "application/toml")
        assert (reply.code, "may only read" in reply.why) == (403, True), path
    assert [row["job"] for row in alice.get("/v1/jobs").document()["jobs"]] == ["hers"]
    files["grafana"].unlink()
    assert (grafana.get("/v1/jobs").code, alice.get("/v1/jobs").code, one.tcp().get("/v1/jobs").code) == (401, 200, 200)


def test_an_agents_credential_opens_what_a_node_has_itself(serve: Serve) -> None:
    one, other = serve(), serve(node="n2")
    peers, address = one.service.peers, "{}:{}".format(*other.address)
    assert peers.request(address, "GET", "/v1/local/jobs/x", {"number": 1}).code == 404
    with pytest.raises(Unreachable, match="may only ask for /v1/local/"):
        peers.request(address, "POST", "/v1/jobs/x/cancel")


def test_secrets_are_never_logged_or_sent(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    one = serve()
    known = one.tcp()
    answer = [
        known.get("/status"),
        known.get(f"/v1/jobs/{TOKEN}x"),
        known.get("/v1/jobs?offset=x"),
        known.get("/nothing"),
    ]
    raw(one, f"NONSENSE {TOKEN}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
    assert TOKEN not in "".join(record.getMessage() for record in caplog.records).replace(f"{TOKEN}x", "")
    assert TOKEN not in repr(known) + str(known)
    assert all(TOKEN not in reply.body.decode().replace(f"{TOKEN}x", "") for reply in answer)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_unix_socket_uses_peer_credentials(open_folder: Path) -> None:
    nobody, lines = 65534, Lines()
    wheres: list[dict[str, Any]] = [{}, {"users": (str(nobody),)}, {"groups": (str(nobody),)}]
    for i in range(len(wheres)):
        (open_folder / str(i)).mkdir(mode=0o755)
    (open_folder / "theirs").mkdir(mode=0o755)
    os.chown(open_folder / "theirs", nobody, nobody)
    before = os.umask(0o077)  # as the agent has it
    try:
        closed, by_user, by_group = made = [
            Served(open_folder / str(i), where=where, front=lines.routes) for i, where in enumerate(wheres)
        ]
        os.seteuid(nobody)
        made.append(of_others := Served(open_folder / "theirs", where={"groups": ("12345",)}))
    finally:
        os.seteuid(0)
        os.umask(before)
    script = """
import os, socket, sys
path, uid, gid, groups = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), [int(g) for g in sys.argv[4:]]
os.setgroups(groups); os.setgid(gid); os.setuid(uid)
sock = socket.socket(socket.AF_UNIX)
try:
    sock.connect(path)
    sock.sendall(b"GET /status HTTP/1.1\\r\\n\\r\\n")
    print(sock.makefile("rb").readline().decode().split()[1])
except OSError as error:
    print(error.strerror)
"""

    def requested(one: Served, uid: int, gid: int, *groups: int) -> str:
        path = one.socket
        command = [sys.executable, "-c", script, str(path), *map(str, (uid, gid, *groups))]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()

    def mode(one: Served) -> int:
        return one.socket.stat().st_mode & 0o777

    assert [mode(one) for one in (closed, by_user, by_group)] == [0o600, 0o666, 0o660]
    assert requested(closed, nobody, nobody) == "Permission denied"
    assert requested(closed, 0, 0) == "200"
    assert requested(by_user, nobody, nobody) == "200"
    assert requested(by_user, 12345, nobody) == "403"
    assert requested(by_group, 12345, nobody) == "200"
    assert requested(by_group, 12345, 12345, 4, nobody) == "200", "a supplementary group counts, too"
    assert requested(by_group, 12345, 12345) == "Permission denied"
    assert mode(of_others) == 0o666, "an agent that is not root may not give its socket to a group that it is not in"
    assert [requested(of_others, 54321, gid) for gid in (12345, 54321)] == ["200", "403"]
    closed.socket.chmod(0o666)
    assert requested(closed, 12345, 12345) == "403", "whatever the file's mode, the kernel's word counts"
    assert lines.rows() == [("uid 12345", "denied", "GET /status", 403)] * 2
    for one in made:
        one.close()


# --- what is too much -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 3000 + b"\r\n", 431),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: -5\r\n\r\nhello", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: 5e0\r\n\r\nhello", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 411),
        (b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1), 413),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n", 400),
        (b"BREW / HTTP/1.1\r\n\r\n", 501),
        (b"GET / HTTP/9.9\r\n\r\n", 505),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", 404),
        (b"GET /%ff HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/jobs/x/logs?rank=%ff HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/jobs/x/logs?rank=1&rank=2 HTTP/1.1\r\n\r\n", 400),
        (b"GET nothing HTTP/1.1\r\n\r\n", 404),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else str(value),
)
def test_malformed_request_gets_a_sentence(serve: Serve, request_: bytes, code: int) -> None:
    one = serve()
    answer = raw(one, request_.replace(b"\r\n", f"\r\nAuthorization: Bearer {TOKEN}\r\n".encode(), 1))
    assert answer.startswith(f"HTTP/1.1 {code} ".encode()), answer[:200]
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert isinstance(body["error"], str)


def test_truncated_head_or_body_changes_nothing(serve: Serve) -> None:
    one = serve()
    one.announce()
    before = one.store.list("/")
    known = f"Authorization: Bearer {TOKEN}\r\nContent-Type: application/toml\r\n".encode()
    for data in (
        b"POST /v1/jobs?id=x HTTP/1.1\r\n" + known + b"Content-Length: 1",
        b"POST /v1/jobs?id=x HTTP/1.1\r\n" + known + b"Content-Length: %d\r\n\r\n" % (len(JOB) + 1) + JOB,
        b"POST /v1/nodes/n1/drain HTTP/1.1\r\n" + known[:-2],
    ):
        with one.connected() as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            assert b" 200 " not in sock.recv(65536)
    assert one.store.list("/") == before


def test_silent_clients_block_no_one_else(serve: Serve, until: Until) -> None:
    one = serve()
    with ExitStack() as stack:
        held = [stack.enter_context(one.connected()) for _ in range(MAX_CONNECTIONS)]
        tcp = one.server.listeners[1]
        until(lambda: len(tcp.connection_threads()) == MAX_CONNECTIONS, DEADLINE)
        assert one.tcp(token=None).get("/healthz").code == 200, "a probe that fails costs a container"
        assert ended(held[0]), "the oldest of those that say nothing made room"
        assert one.unix().get("/v1/jobs").code == 200, "who is on the node itself still gets in"


@pytest.mark.parametrize(
    "begins", ["", f"POST /v1/jobs HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 1000\r\n\r\n"]
)
def test_slow_head_or_body_is_cut(serve: Serve, begins: str) -> None:
    one = serve(connection_s=0.5)
    with one.connected() as sock:
        sock.sendall(begins.encode())
        begun = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - begun < DEADLINE:
                sock.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - begun < DEADLINE
        assert ended(sock)


def test_answer_sent_before_the_body_is_read_arrives(serve: Serve) -> None:
    one = serve()
    with one.connected() as sock:
        sock.sendall(b"POST /v1/jobs HTTP/1.1\r\nContent-Length: 3000000\r\n\r\n")
        for _ in range(30):  # which a connection that is closed at once would not take
            sock.sendall(b"x" * 100_000)
        assert sock.recv(100).startswith(b"HTTP/1.1 401 ")
    size = MAX_BODY_BYTES + 1
    reply = one.tcp().post("/v1/jobs", b"x" * size, "application/toml")
    assert (reply.code, reply.why) == (413, f"a body may have {MAX_BODY_BYTES} bytes, not {size}")
    assert one.tcp(token=None).post("/v1/jobs", b"x" * MAX_BODY_BYTES, "application/toml").code == 401


def test_100_continue_only_after_authentication(serve: Serve) -> None:
    one = serve()
    head = b"POST /v1/jobs?id=a HTTP/1.1\r\nExpect: 100-continue\r\nContent-Type: application/toml\r\n"
    assert raw(one, head + b"Content-Length: %d\r\n\r\n" % len(JOB)).startswith(b"HTTP/1.1 401 ")
    with one.connected() as sock:
        sock.sendall(head + f"Authorization: Bearer {TOKEN}\r\nContent-Length: {len(JOB)}\r\n\r\n".encode())
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(JOB)
        assert sock.recv(100).startswith(b"HTTP/1.1 201 ")


def test_no_file_descriptor_leaks(serve: Serve, tmp_path: Path, until: Until) -> None:
    before, threads = fds(), threading.active_count()
    one = Served(tmp_path / "it")
    for data in (
        b"",
        b"\x00\xff",
        b"GET / HT",
        b"GET /metrics HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n",
    ):
        for _ in range(5):
            with one.connected() as sock:
                sock.sendall(data)
            one.unix().get("/v1/jobs")
    one.close()
    assert one.server.close()
    assert not one.socket.exists()
    until(lambda: threading.active_count() == threads, DEADLINE)
    assert fds() <= before, "what an earlier test has left may go meanwhile"


def test_defect_of_a_route_is_a_500_without_details(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    one = serve()
    one.service.jobs = None  # type: ignore[assignment, method-assign]
    reply = one.tcp().get("/v1/jobs")
    assert (reply.code, reply.why) == (500, "internal error; the agent's log says why")
    assert "could not answer GET '/v1/jobs'" in caplog.text
    assert one.tcp().get("/v1/nodes").code == 200


# --- TLS --------------------------------------------------------------------------------------------------------------


def test_tls_certificate_is_renewed_without_restart(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "pki").mkdir()
    authority = Authority(tmp_path / "pki")
    first, second = authority.server(), authority.server()
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(first.cert.read_bytes())
    key.write_bytes(first.key.read_bytes())
    one = serve(where={"tls_cert": cert, "tls_key": key})

    def shown() -> bytes | None:
        context = ssl.create_default_context(cafile=str(authority.ca))
        with context.wrap_socket(one.connected(), server_hostname="127.0.0.1") as sock:
            return sock.getpeercert(binary_form=True)

    assert one.tcp(ca=authority.ca).get("/v1/jobs").code == 200
    before = shown()
    key.write_bytes(b"half of it")
    assert shown() == before, "what cannot be loaded does not count"
    cert.write_bytes(second.cert.read_bytes())
    key.write_bytes(second.key.read_bytes())
    assert shown() not in (None, before)
    with pytest.raises(Unreachable, match=r"cannot be trusted.*--ca"):
        AgentClient(None, *one.address, TOKEN, ssl.create_default_context()).get("/v1/jobs")
    with pytest.raises(Unreachable, match=r"does not answer as an agent: .*; it may use https://"):
        one.tcp().get("/v1/jobs")
    trusted = ssl.create_default_context(cafile=str(authority.ca))
    with pytest.raises(Unreachable, match=r"cannot be trusted: IP address mismatch.*; use one of the names or addr"):
        AgentClient(None, *one.address, TOKEN, trusted, tls_name="127.0.0.9").get("/v1/jobs")
    with one.connected() as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b"up 1.0" not in sock.recv(1000)


def test_client_without_tls_handshake_is_cut(serve: Serve, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    made = authority.server()
    where = {"tls_cert": made.cert, "tls_key": made.key}
    one = serve(where=where)
    with one.connected():
        assert one.tcp(ca=authority.ca).get("/v1/jobs").code == 200
    with serve(where=where, connection_s=0.5).connected() as silent:
        assert ended(silent)


def test_failed_accept_keeps_the_port_open(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    one = serve()
    taken = one.server.listeners[1].get_request

    def refuses() -> Any:
        one.server.listeners[1].get_request = taken  # type: ignore[method-assign]
        taken()[0].close()
        raise ValueError("nobody expected this")

    one.server.listeners[1].get_request = refuses  # type: ignore[method-assign]
    with one.connected() as sock:
        assert ended(sock)
    assert one.tcp().get("/v1/jobs").code == 200
    assert "could not accept a connection" in caplog.text


# --- what cannot be had -----------------------------------------------------------------------------------------------


def test_listen_error_is_one_line_with_the_key(serve: Serve, tmp_path: Path) -> None:
    one = serve()
    free = tmp_path / "other.sock"
    (tmp_path / "file").write_text("")
    for where, options, answer in [
        (one.socket, {}, "http.socket .*another agent listens there"),
        (tmp_path / "file", {}, "http.socket .*not a socket"),
        (free, {"port": one.address[1]}, "http.port .*in use"),
        (free, {"bind": "203.0.113.7"}, "http.port .*203.0.113.7"),
        (free, {"tls_cert": tmp_path / "file"}, "tls_cert and http.tls_key: give both"),
        (free, {"tls_cert": tmp_path / "file", "tls_key": tmp_path / "no"}, "http.tls_cert .*no certificate"),
        (free, {"users": ("no-such-user-here",)}, "http.users: there is no 'no-such-user-here'"),
        (free, {"groups": ("no-such-group-here",)}, "http.groups: there is no"),
    ]:
        with pytest.raises(UsageError, match=answer) as raised:
            ApiServer(where, HttpSettings(**{"port": 0, **options}), one.server.listeners[0].routes, TokenAuth(None))  # type: ignore
        assert "\n" not in str(raised.value)
    assert one.unix().get("/v1/jobs").code == 200
    assert not free.exists()


def test_socket_of_a_killed_agent_is_replaced(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "0" / "run" / "agent.sock"
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    one = Served(tmp_path / "0")
    assert one.unix().get("/v1/jobs").code == 200
    one.close()


def test_token_of_agents_is_no_operators(tmp_path: Path) -> None:
    """A node that is only to run jobs has it, and nothing that submits one."""
    secret = "the-agents-own-token-0123456789abcdef"
    theirs = tmp_path / "agents"
    theirs.write_text(secret + "\n")
    theirs.chmod(0o600)
    with closing(Served(tmp_path / "one", where={"agents_token_file": theirs})) as one:
        number = one.submit()
        one.log(1, 0, "stdout", "hello\n")
        token = one.service.peers.token()
        assert token == secret, "what requests to other agents follow from"
        address = "{}:{}".format(*one.address)
        authenticator = one.server.listeners[1].authenticator
        assert isinstance(authenticator, TokenAuth)
        authenticator.address = address
        path = f"/v1/local/jobs/llama?number={number}"

        def codes(token: str) -> tuple[int, ...]:
            given = agent_credential(token_digest(token), address)
            agent = AgentClient(None, *one.address, given, auth_scheme=AGENT_AUTH_SCHEME)
            bearer = one.tcp(token)
            return (
                agent.get(path).code,
                agent.post("/v1/jobs", JOB, "application/toml").code,
                bearer.get(path).code,
                bearer.post("/v1/jobs/llama/cancel").code,
            )

        assert codes(secret) == (200, 403, 401, 401)
        assert codes(TOKEN) == (401, 401, 200, 200)
