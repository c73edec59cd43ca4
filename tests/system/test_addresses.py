"""Addresses others can reach. What takes a machine with other links and names than this one is in tests/multihost."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from elasticd.errors import StoreUnavailable, UsageError
from elasticd_agent.system.network.addresses import (
    format_endpoint,
    gloo_environment,
    interface_of,
    is_local,
    local_address,
    parse_endpoint,
)

FOREIGN = "203.0.113.9"  # set aside for documentation (RFC 5737): no machine has it
UNKNOWN = "no-such-host.invalid"  # nor this name (RFC 2606)


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", "127.0.0.1"), ("127.0.0.9", "127.0.0.1"), ("::1", "::1")])
def test_a_store_on_loopback_is_reached_from_loopback(host: str, expected: str) -> None:
    assert local_address([(host, 2379)]) == expected


def test_a_name_becomes_an_address() -> None:
    assert ipaddress.ip_address(local_address([("localhost", 2379)])).is_loopback


def test_unknown_endpoint_name_is_skipped() -> None:
    assert local_address([(UNKNOWN, 2379), ("fe80::1", 2379), ("::1", 2379)]) == "::1"


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (UNKNOWN, rf"{UNKNOWN}:2379 cannot be resolved: the name is not known"),
        ("a" * 300, "the name is not known"),
        ("", "the name is not known"),
        ("fe80::1", r"\[fe80::1\]:2379: there is no route"),  # on which link?
        ("0.0.0.0", "there is no route"),
        ("255.255.255.255", "there is no route"),
    ],
)
def test_endpoint_without_a_route(host: str, words: str) -> None:
    """DNS or the network may start later than the job, so this is an outage, in one clear line."""
    with pytest.raises(StoreUnavailable, match=words) as raised:
        local_address([(host, 2379)])
    assert "\n" not in str(raised.value)
    assert ("spelling" if "resolved" in words or "known" in words else "--local-addr") in str(raised.value)


def test_no_endpoint_is_an_error_unless_an_address_is_given() -> None:
    with pytest.raises(UsageError):
        local_address([])
    assert local_address([], "127.0.0.5") == "127.0.0.5"


@pytest.mark.parametrize(
    ("given", "expected"), [("127.0.0.5", "127.0.0.5"), ("::1", "::1"), ("::ffff:127.0.0.1", "127.0.0.1")]
)
def test_a_given_address_of_this_machine_is_taken(given: str, expected: str) -> None:
    assert local_address([("127.0.0.1", 2379)], given) == expected


def test_a_given_name_becomes_an_address() -> None:
    assert ipaddress.ip_address(local_address([("::1", 2379)], "localhost")).is_loopback


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (FOREIGN, f"{FOREIGN} is not an address of this machine"),
        ("2001:db8::9", "2001:db8::9 is not an address of this machine"),
        (UNKNOWN, "no such name or address"),
        ("", "no such name or address"),
        ("0.0.0.0", "not an address of this machine"),
        ("::", "not an address of this machine"),
        ("224.0.0.1", "not an address of this machine"),
        ("fe80::1", "add the interface, as in fe80::1%eth0"),
    ],
)
def test_given_address_of_another_machine(given: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"^--local-addr {given}: .*{words}") as raised:
        local_address([("127.0.0.9", 2379)], given)
    assert "leave it out to use 127.0.0.1" in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(UsageError, match="leave it out to use the address the endpoint is reached from"):
        local_address([(UNKNOWN, 2379)], given)


@pytest.mark.parametrize("given", ["127.0.0.5", "localhost", "::1"])
def test_loopback_with_a_remote_endpoint(given: str) -> None:
    """Loopback is no address for a job that meets elsewhere."""
    with pytest.raises(UsageError, match=f"^--local-addr {given}: it cannot be reached from another machine"):
        local_address([(FOREIGN, 2379)], given)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST.", "127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1", "ip6-localhost"]
)
def test_loopback_is_this_machine(host: str) -> None:
    assert is_local(host)


def test_the_host_name_is_this_machine() -> None:
    name = socket.gethostname()
    assert is_local(name)
    assert is_local(name.upper() + ".")


@pytest.mark.parametrize(
    "host", [FOREIGN, "2001:db8::9", UNKNOWN, "", "a" * 300, "a b", "0.0.0.0", "::", "224.0.0.1", "fe80::1"]
)
def test_names_of_other_machines(host: str) -> None:
    assert not is_local(host)


ENDPOINTS = [
    ("etcd-1.example:2379", ("etcd-1.example", 2379)),
    ("10.0.0.1:0", ("10.0.0.1", 0)),
    ("host_x:65535", ("host_x", 65535)),
    ("[::1]:80", ("::1", 80)),
    ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
]


@pytest.mark.parametrize(("text", "expected"), ENDPOINTS)
def test_host_and_port_are_split_and_joined(text: str, expected: tuple[str, int]) -> None:
    assert parse_endpoint(text) == parse_endpoint(f" {text}\n") == expected
    assert format_endpoint(*expected) == text
    assert parse_endpoint(text.rpartition(":")[0], expected[1]) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not HOST:PORT"),
        (":80", "is not HOST:PORT"),
        ("[::1", "is not HOST:PORT"),
        ("[::1]80", "is not HOST:PORT"),
        ("host", "has no valid port; write HOST:PORT"),
        ("host:", "has no valid port"),
        ("[::1]", "has no valid port"),
        ("::1", "brackets, as in "),
        ("a:b:80", "brackets, as in "),
        ("[host]:80", "'host' is not an IPv6 address"),
        ("10.0.0.256:80", "'10.0.0.256' is not an IPv4 address"),
        ("http://host:80", "brackets, as in "),
        ("a b:80", "'a b' is not the name of a host"),
        ("a" * 64 + ":80", "is not the name of a host"),
        ("a." * 127 + ":80", "is not the name of a host"),
        ("host:http", "has no valid port"),
        ("host:1/path", "has no valid port"),
        ("host:65536", "has no valid port"),
        ("host:-1", "has no valid port"),
        ("host:８０", "has no valid port"),  # digits, but not ASCII's
        ("host:" + "9" * 5000, "has no valid port"),
    ],
)
def test_invalid_endpoints(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_endpoint(text)


# ---- interfaces


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "127.77.0.1"])
def test_loopback_has_its_interface(address: str) -> None:
    assert interface_of(address) == "lo"


@pytest.mark.parametrize("address", ["198.51.100.1", "2001:db8::1", "fe80::1%nowhere"])
def test_interface_of_a_foreign_address(address: str) -> None:
    assert interface_of(address) is None
    assert gloo_environment({}, address) == {}


def test_gloo_interface_unless_set_by_the_user() -> None:
    assert gloo_environment({"HOME": "/root"}, "127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert gloo_environment({"GLOO_SOCKET_IFNAME": "eth7"}, "127.0.0.1") == {}
