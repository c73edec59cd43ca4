"""Access to etcd and the sentences without it: TLS, passwords, endpoints that are other servers.

Every refusal is one sentence with the endpoint and what to do in it, comes at the first call, and in time.
"""

from __future__ import annotations

import contextlib
import http.server
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from elasticd.errors import StoreRefused, StoreUnavailable
from elasticd_agent.model.job import Tls
from elasticd_agent.store.etcd.diagnose import check_tls, make_context
from elasticd_agent.store.etcd.proto import rpc
from elasticd_agent.store.etcd.store import EtcdStore
from tests.contract.reading import answers
from tests.etcd import Authority, EtcdServers, etcd_servers

Until = Callable[[Callable[[], object], float], object]
SOON_S = 20.0
TIMEOUT_S = 20.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    (tmp_path / "stranger").mkdir()
    return Authority(tmp_path / "stranger")


@contextmanager
def opened(endpoints: list[tuple[str, int]], **options: object) -> Iterator[EtcdStore]:
    store = EtcdStore(endpoints, **{"timeout_s": TIMEOUT_S, **options})  # type: ignore[arg-type]
    try:
        yield store
    finally:
        store.close()


def works(store: EtcdStore, key: str = "job/k") -> bool:
    return store.compare_and_swap(key, None, b"1") and store.read(key) is not None


def refused(endpoints: list[tuple[str, int]], *words: str, key: str = "job/k", **options: object) -> None:
    with opened(endpoints, **options) as store, pytest.raises(StoreRefused) as caught:
        store.read(key)
    messages = str(caught.value)
    assert "\n" not in messages
    assert str(endpoints[0][1]) in messages
    for word in words:
        assert re.search(word, messages), f"{word!r} is not in: {messages}"


# --- TLS


def test_tls(authority: Authority, capfd: pytest.CaptureFixture[str]) -> None:
    with etcd_servers(tls=authority.server()) as etcd:
        with opened(etcd.endpoints, tls=authority.client()) as store:
            assert works(store)
        with opened([("localhost", etcd.port)], tls=authority.client()) as store:
            assert store.read("job/k") is not None
    assert capfd.readouterr() == ("", "")


def test_untrusted_certificate(authority: Authority, stranger: Authority, capfd: pytest.CaptureFixture[str]) -> None:
    with etcd_servers(tls=authority.server()) as etcd:
        refused(etcd.endpoints, "certificate", "CA", tls=stranger.client())
        # This machine's own authorities do not know it either.
        refused(etcd.endpoints, "certificate", "CA", tls=Tls())
        etcd.certify(authority.server(expired=True))
        etcd.restart()
        refused(etcd.endpoints, "certificate has expired", tls=authority.client())
        etcd.certify(authority.server("other.test"))
        etcd.restart()
        refused(etcd.endpoints, "not valid for '127.0.0.1'", tls=authority.client())
    assert capfd.readouterr() == ("", ""), "gRPC has nothing to add"


def test_certificate_of_the_future_is_awaited(authority: Authority) -> None:
    """At a boot the clock may be years behind until it is set: the agent must not give up for good."""
    with (
        etcd_servers(tls=authority.server(early=True)) as etcd,
        opened(etcd.endpoints, tls=authority.client(), timeout_s=2.0) as store,
    ):
        with pytest.raises(StoreUnavailable, match="is not valid yet: is the clock of this machine right"):
            store.read("job/k")
        etcd.certify(authority.server())
        etcd.restart()
        assert works(store)


def test_tls_where_the_first_address_of_a_name_is_dead(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    with etcd_servers(tls=authority.server("etcd.test", "127.0.0.1")) as etcd, ExitStack() as ending:
        dead = ending.enter_context(socket.create_server(("127.0.0.9", etcd.port), backlog=0))
        for _ in range(3):  # more than its queue holds: the kernel drops what asks for a connection
            waiting = ending.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(dead.getsockname())
        look_up = socket.getaddrinfo

        def look_up_both(host: str, port: int, *more: int, **kinds: int) -> list[Any]:
            hosts = ("127.0.0.9", "127.0.0.1") if host == "etcd.test" else (host,)
            return [found for address in hosts for found in look_up(address, port, *more, **kinds)]

        monkeypatch.setattr(socket, "getaddrinfo", look_up_both)
        check_tls("etcd.test", etcd.port, make_context(authority.client()), 6.0)


def test_tls_on_one_side_only(authority: Authority) -> None:
    with etcd_servers(tls=authority.server()) as etcd:
        refused(etcd.endpoints, "uses TLS", "https://")
    with etcd_servers() as etcd:
        refused(etcd.endpoints, "does not use TLS", "http://", tls=authority.client())


def test_mutual_tls(authority: Authority, stranger: Authority, capfd: pytest.CaptureFixture[str]) -> None:
    with etcd_servers(tls=authority.server(ask_clients=True)) as etcd:
        with opened(etcd.endpoints, tls=authority.client(certified=True)) as store:
            assert works(store)
        refused(etcd.endpoints, "does not accept our certificate", tls=authority.client())
        theirs = stranger.client(certified=True)
        mixed = Tls(ca=authority.ca, cert=theirs.cert, key=theirs.key)
        refused(etcd.endpoints, "does not accept our certificate", tls=mixed)
        refused(etcd.endpoints, "uses TLS", "https://")
    assert capfd.readouterr() == ("", "")


def test_invalid_pem_files(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.client(certified=True), authority.client(certified=True)
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("rubbish")
    nowhere = [("127.0.0.1", 1)]
    for tls, words in (
        (Tls(ca=tmp_path / "missing.pem"), "missing.pem"),
        (Tls(ca=rubbish), "rubbish.pem"),
        (Tls(ca=good.ca, cert=good.cert, key=tmp_path / "missing.pem"), "missing.pem"),
        (Tls(ca=good.ca, cert=good.cert, key=other.key), "belong together"),
    ):
        with opened(nowhere, tls=tls) as store, pytest.raises(StoreRefused, match=words):
            store.read("k")


# --- passwords


def test_user_and_password() -> None:
    with etcd_servers() as etcd:
        etcd.ask_for_passwords("agent", "secret", "job/")
        with opened(etcd.endpoints, user="agent", password="secret") as store:
            assert works(store)
            lease = store.announce("job/node", b"", 10.0)
            assert lease.renew()
            with pytest.raises(StoreRefused, match=r"may not use 'other'; grant"):
                store.read("other")
            with pytest.raises(StoreRefused, match="may not use 'other'"):
                store.compare_and_swap("other", None, b"")
            assert store.read("job/k") is not None
        refused(etcd.endpoints, "user or the password is wrong", user="agent", password="wrong")
        refused(etcd.endpoints, "user or the password is wrong", user="nobody", password="secret")
        refused(etcd.endpoints, "give both")


def test_passwords_over_tls(authority: Authority) -> None:
    with etcd_servers() as etcd:
        etcd.ask_for_passwords("agent", "secret", "job/")
        etcd.certify(authority.server())
        etcd.restart()
        with opened(etcd.endpoints, user="agent", password="secret", tls=authority.client()) as store:
            assert works(store)


def test_password_without_authentication() -> None:
    messages: list[str] = []
    with etcd_servers() as etcd, opened(etcd.endpoints, user="agent", password="x", log=messages.append) as store:
        assert works(store)
        assert works(store, "job/l")
    assert len(messages) == 1
    assert "continuing without" in messages[0]


def test_expired_simple_token_is_renewed(until: Until) -> None:
    with etcd_servers(flags=["--auth-token-ttl", "1"]) as etcd:
        etcd.ask_for_passwords("agent", "secret", "job/")
        _survives_its_token(etcd, until)


@pytest.mark.system
def test_expired_signed_token_is_renewed(tmp_path: Path, until: Until) -> None:
    key = tmp_path / "jwt.key"
    key.write_text("a key that is shared by all members, 32 bytes at least")
    with etcd_servers(flags=["--auth-token", f"jwt,priv-key={key},sign-method=HS256,ttl=2s"]) as etcd:
        etcd.ask_for_passwords("agent", "secret", "job/")
        _survives_its_token(etcd, until)


def test_password_is_checked_once_however_long_it_takes(until: Until) -> None:
    """bcrypt on a busy server takes longer than a caller waits. What is asked anew each time is never answered."""
    asked, waited_for = list[bytes](), threading.Event()

    def authenticate(request: bytes, context: object) -> bytes:
        asked.append(request)
        waited_for.wait(SOON_S)
        return bytes(rpc.AuthenticateResponse(token="token").SerializeToString())

    def read(request: bytes, context: object) -> bytes:
        return bytes(rpc.RangeResponse().SerializeToString())

    server = grpc.server(ThreadPoolExecutor(8))
    for service, methods in {"Auth": {"Authenticate": authenticate}, "KV": {"Range": read}}.items():
        handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(f"etcdserverpb.{service}", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with opened([("127.0.0.1", port)], user="agent", password="secret", timeout_s=0.3) as store:
            assert not answers(store) and not answers(store), "callers wait no longer than they may"
            until(lambda: asked, SOON_S)
            assert not answers(store)
            waited_for.set()
            until(lambda: answers(store), SOON_S)
    finally:
        waited_for.set()
        server.stop(None)
    assert len(asked) == 1


def _survives_its_token(etcd: EtcdServers, until: Until) -> None:
    messages: list[str] = []
    heard: list[str] = []
    with opened(etcd.endpoints, user="agent", password="secret", log=messages.append) as store:
        assert works(store)
        store.watch(heard.append, "job/")
        lease = store.announce("job/node", b"", 60.0)
        # That a token has ended shows only when it is used, and using it keeps a simple one alive: so ask seldom.
        for pause_s in (2.2, 3.2, 4.2, 8.4):
            time.sleep(pause_s)
            tokens = _tokens(etcd)
            assert store.compare_and_swap(f"job/{pause_s}", None, b""), "refused without a look, so it is asked again"
            if _tokens(etcd) > tokens:
                break
        else:
            raise AssertionError("its token never ended")
        assert lease.renew()
        until(lambda: f"job/{pause_s}" in heard, SOON_S)
        # Simple tokens are in etcd's memory only.
        etcd.restart()
        until(lambda: answers(store), SOON_S)
        heard.clear()
        assert store.compare_and_swap("job/second", None, b"")
        until(lambda: {"job/second", "job/"} & set(heard), SOON_S)
    assert len(messages) in (0, 2), messages


def _tokens(etcd: EtcdServers) -> int:
    """How many this etcd has given out."""
    with urllib.request.urlopen(f"http://127.0.0.1:{etcd.port}/metrics", timeout=SOON_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(line.split()[-1]) for line in lines if "grpc_server_handled" in line and '"Authenticate"' in line)


# --- endpoints that are something else


@contextmanager
def something_else(says: bytes | None) -> Iterator[list[tuple[str, int]]]:
    """Accepts connections and says this and no more. Empty: ends them at once; None: keeps them, and silent."""
    listener = socket.create_server(("127.0.0.1", 0))
    with ExitStack() as kept:

        def serve() -> None:
            while True:
                try:
                    sock = listener.accept()[0]
                except OSError:
                    return
                if says is None:
                    kept.enter_context(sock)
                else:
                    with sock:
                        sock.sendall(says)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield [("127.0.0.1", listener.getsockname()[1])]
        finally:
            # close() alone would not wake up accept().
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            thread.join(SOON_S)


def test_port_without_listener_is_an_outage() -> None:
    messages: list[str] = []
    with opened([("127.0.0.1", 1)], timeout_s=0.5, log=messages.append) as store:
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1 "):
                store.read("k")
            with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1 "):
                store.compare_and_swap("k", None, b"")
    assert messages == [
        "the store does not answer: etcd at 127.0.0.1:1 cannot be reached: Connection refused; retrying"
    ]


def test_unknown_host_name_is_an_outage(authority: Authority) -> None:
    for tls in (None, authority.client()):
        with (
            opened([("nowhere.invalid", 2379)], timeout_s=0.5, tls=tls) as store,
            pytest.raises(StoreUnavailable, match=r"nowhere\.invalid"),
        ):
            store.read("k")


def test_silent_port_is_an_outage(authority: Authority) -> None:
    with something_else(None) as endpoints:
        for tls in (None, authority.client()):
            took: list[float] = []
            while not took or (took[-1] > 0.8 and len(took) < 10):  # a slow machine has ten tries
                with opened(endpoints, timeout_s=0.5, tls=tls) as store:
                    began = time.monotonic()
                    with pytest.raises(StoreUnavailable):
                        store.read("k")
                    took.append(time.monotonic() - began)
            assert min(took) <= 0.8


@pytest.mark.parametrize("says", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"-ERR\r\n"])
def test_other_servers_are_refused(says: bytes) -> None:
    with something_else(says) as endpoints:
        refused(endpoints, "is not an etcd v3 server", "2379")


def test_web_server_is_refused(authority: Authority) -> None:
    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            endpoints = [("127.0.0.1", server.server_port)]
            refused(endpoints, "is not an etcd v3 server")
            refused(endpoints, "does not use TLS|do not agree on TLS", tls=authority.client())
        finally:
            server.shutdown()
            thread.join(SOON_S)


def test_one_good_endpoint_is_enough(authority: Authority) -> None:
    with etcd_servers() as etcd, something_else(b"SSH-2.0-OpenSSH_9.2\r\n") as (wrong,):
        for _ in range(6):  # which one is asked first is chance
            with opened([("127.0.0.1", 1), wrong, *etcd.endpoints]) as store:
                assert store.compare_and_swap("k", None, b"") or store.delete("k")


def test_ipv6_endpoint_in_sentences() -> None:
    """It is written as a person has to write it."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(StoreUnavailable, match=rf"https://\[::1\]:{port} cannot be reached"):
        check_tls("::1", port, make_context(Tls()), SOON_S)
