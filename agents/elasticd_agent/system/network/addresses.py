"""Which address of this machine others can reach, which names mean this machine, and how host and port are written.

A host name that means this machine here ("localhost", or 127.0.1.1 in /etc/hosts) means another one elsewhere, so
agents exchange literal addresses, chosen by the kernel's routes. No packet is sent: connecting a UDP socket only asks
for the route. Looking a name up may take the resolver's timeout.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elasticd.errors import StoreUnavailable, UsageError

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address

_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost", "ip6-loopback", "localhost.localdomain"})
# Targets behind the default route of each family: addresses reserved for documentation (RFC 5737, RFC 3849).
_DEFAULT_ROUTE_TARGETS = ("198.51.100.1", "2001:db8::1")
_ANY_PORT = 9  # a route does not depend on it; 9 is "discard"
# Of <linux/in6.h>, not in Python's socket: prefer the stable IPv6 address to a privacy address, which expires (RFC
# 5014).
_IPV6_ADDR_PREFERENCES = 72
_IPV6_PREFER_SRC_PUBLIC = 0x0002
_HOST_NAME = re.compile(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?")  # RFC 1035's limits


def local_address(
    endpoints: Sequence[tuple[str, int]], given: str | None = None, *, leave_loopback: bool = False
) -> str:
    """A literal address of this machine that is reachable from the hosts of `endpoints`.

    It is `given` (a name or an address of this machine) if there is one, otherwise the source address of the first
    route to an endpoint. Loopback only when all endpoints are on loopback; with `leave_loopback` that of the default
    route then, if there is one: each of several machines may have a member, a proxy or a tunnel of etcd there. Raises
    StoreUnavailable while no endpoint's name is known or no route leads to it, UsageError for what cannot become right
    by itself.
    """
    if given is not None:
        return str(_check_given_address(given, endpoints))
    reaching = _address_reaching(endpoints)
    return str((leave_loopback and reaching.is_loopback and _default_route_address()) or reaching)


def is_local(host: str) -> bool:
    """True if this name or address belongs to this machine: localhost, its host name (also in full), an interface's
    address.

    torchrun matches its endpoint's host like this. A name that also means another machine is not local: otherwise each
    of the two would host the store.
    """
    name = _normalize_host_name(host)
    if name in _LOOPBACK_NAMES or name == _normalize_host_name(socket.gethostname()):
        return True
    reached = [own for ip in _resolve(host) if (own := _is_assigned(ip)) is not None]
    return all(reached) if reached else name == _canonical_host_name()


def is_known(host: str) -> bool:
    """True if this name can be resolved now."""
    return bool(_resolve(host))


def format_endpoint(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_endpoint(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Host and port of HOST:PORT; with `default_port` also of HOST. Raises UsageError, which says how it is written."""
    text = text.strip()
    if not text.startswith("[") and text.count(":") > 1:
        raise UsageError(f"{text!r} has several colons: an IPv6 address goes into brackets, as in [2001:db8::1]:2379")
    parts = re.fullmatch(r"(\[[^]]*\]|[^:\[\]]+)(?::(.*))?", text, re.DOTALL)
    if parts is None:
        raise UsageError(f"{text!r} is not HOST:PORT")
    host, port = parts.groups()
    if host.startswith("["):
        host, kind, valid = host[1:-1], "an IPv6 address", isinstance(_parse_ip(host[1:-1]), ipaddress.IPv6Address)
    elif re.fullmatch("[0-9.]+", host):
        kind, valid = "an IPv4 address", _parse_ip(host) is not None
    else:
        kind, valid = "the name of a host", len(host) <= 253 and _HOST_NAME.fullmatch(host) is not None
    if not valid:
        raise UsageError(f"{text!r}: {host!r} is not {kind}")
    if port is None and default_port is not None:
        return host, default_port
    if not re.fullmatch("[0-9]{1,5}", port or "") or int(port) > 65535:
        raise UsageError(f"{text!r} has no valid port; write HOST:PORT, with a port from 0 to 65535")
    return host, int(port)


def try_parse_endpoint(text: str) -> tuple[str, int] | None:
    """Host and port that another agent has published; None for anything but HOST:PORT."""
    try:
        return parse_endpoint(text)
    except UsageError:
        return None


def _address_reaching(towards: Sequence[tuple[str, int]]) -> Ip:
    loopback: Ip | None = None
    elsewhere = False  # an endpoint that is here by the name under which others know this machine
    for host, _ in towards:
        for ip in _resolve(host):
            source = None if ip.is_unspecified else _source_address(ip)
            if source is not None and not source.is_loopback:
                return source
            if source is not None:
                loopback = loopback or source
                elsewhere = elsewhere or not _is_loopback_everywhere(host)
    named = ", ".join(format_endpoint(*endpoint) for endpoint in towards) or "anything"
    if elsewhere:
        if (source := _default_route_address()) is not None:
            return source
        raise UsageError(
            f"{named} is on loopback as this machine resolves it, and there is no default route that shows its "
            "address for others; name it with --local-addr"
        )
    if loopback is None:
        if towards and not any(_resolve(host) for host, _ in towards):
            raise StoreUnavailable(
                f"{named} cannot be resolved: the name is not known; check the endpoint's spelling, and DNS"
            )
        raise (StoreUnavailable if towards else UsageError)(
            f"no address of this machine reaches {named}: there is no route; check the endpoint and the network, "
            "or name an address with --local-addr"
        )
    return loopback


def _default_route_address() -> Ip | None:
    sources = map(_source_address, map(ipaddress.ip_address, _DEFAULT_ROUTE_TARGETS))
    return next((source for source in sources if source is not None and not source.is_loopback), None)


def _check_given_address(given: str, towards: Sequence[tuple[str, int]]) -> Ip:
    """Return the address that the user has named, if it is one of this machine and others can reach it.

    Raises UsageError, with the address that would be right.
    """
    named = _resolve(given)
    own = [ip for ip in named if _is_assigned(ip)]
    outside = [ip for ip in own if not ip.is_loopback]
    if outside:
        return outside[0]
    if not named:
        raise UsageError(f"--local-addr {given}: no such name or address; {_suggest_address(towards)}")
    if not own:
        listed = ", ".join(map(str, named))
        which = f"{listed} is" if listed == given else f"it means {listed}, which is"
        if any(ip.is_link_local and ip.version == 6 and "%" not in str(ip) for ip in named):
            raise UsageError(
                f"--local-addr {given}: add the interface, as in fe80::1%eth0; {_suggest_address(towards)}"
            )
        raise UsageError(f"--local-addr {given}: {which} not an address of this machine; {_suggest_address(towards)}")
    if not _is_loopback_everywhere(given) and towards:
        return _address_reaching(towards)
    if all(is_local(host) for host, _ in towards):
        return own[0]
    raise UsageError(f"--local-addr {given}: it cannot be reached from another machine; {_suggest_address(towards)}")


def _suggest_address(towards: Sequence[tuple[str, int]]) -> str:
    """Return what to write instead of the given address."""
    try:
        right = str(_address_reaching(towards))
    except (UsageError, StoreUnavailable):
        return "leave it out to use the address the endpoint is reached from"
    return f"leave it out to use {right}, from which the endpoint is reached"


def _resolve(host: str) -> list[Ip]:
    """The addresses of a name, best first (RFC 6724), or none."""
    try:
        infos = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM) if host else []
    except (OSError, ValueError):  # an unknown name, or not a name at all
        return []
    return list(dict.fromkeys(_ip_of_sockaddr(address) for _, _, _, _, address in infos))


def _ip_of_sockaddr(where: tuple[Any, ...]) -> Ip:
    """The address in a socket's address: an IPv6 one with its interface, an IPv4-mapped one as IPv4."""
    text = str(where[0]).partition("%")[0]
    ip = ipaddress.ip_address(text)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    if len(where) == 4 and where[3]:
        return ipaddress.IPv6Address(f"{text}%{socket.if_indextoname(int(where[3]))}")
    return ip


def _source_address(ip: Ip) -> Ip | None:
    """The address from which this machine would contact `ip`; None without a route."""
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    try:
        sock = socket.socket(family, socket.SOCK_DGRAM)
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT:  # a kernel without IPv6
            return None
        raise
    with sock:
        text, _, interface = str(ip).partition("%")
        try:
            if ip.version == 4:
                sock.connect((text, _ANY_PORT))
            else:
                sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_ADDR_PREFERENCES, _IPV6_PREFER_SRC_PUBLIC)
                sock.connect((text, _ANY_PORT, 0, socket.if_nametoindex(interface) if interface else 0))
            return _ip_of_sockaddr(sock.getsockname())
        except OSError:
            return None


def _is_assigned(ip: Ip) -> bool | None:
    """True if an interface of this machine has this address; None without a route to find out."""
    if ip.is_loopback:
        return True
    # A machine contacts its own address from that address.
    source = _source_address(ip)
    return None if source is None else int(source) == int(ip) and source.version == ip.version


def _is_loopback_everywhere(host: str) -> bool:
    """True if `host` is loopback on every machine, and not only by this machine's host table."""
    ip = _parse_ip(host)
    return _normalize_host_name(host) in _LOOPBACK_NAMES or (ip is not None and ip.is_loopback)


def _canonical_host_name() -> str:
    try:
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_DGRAM, flags=socket.AI_CANONNAME)
    except (OSError, ValueError):
        return ""
    return _normalize_host_name(infos[0][3])


def _normalize_host_name(host: str) -> str:
    return host.rstrip(".").lower()


def _parse_ip(text: str) -> Ip | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


def gloo_environment(environ: Mapping[str, str], address: str) -> dict[str, str]:
    """The variable with which gloo listens at this node's `address`; nothing if the user has chosen."""
    interface = None if GLOO_INTERFACE_VARIABLE in environ else interface_of(address)
    return {} if interface is None else {GLOO_INTERFACE_VARIABLE: interface}


def interface_of(address: str) -> str | None:
    """The name of the interface with this literal address ("eth0", or an alias, "eth0:1"); None if none has it."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(wanted, ipaddress.IPv6Address) and wanted.ipv4_mapped is not None:
        wanted = wanted.ipv4_mapped
    names = [name for name, ip in _interface_addresses() if ip == wanted]
    scope = address.partition("%")[2]  # a link-local address names its interface
    if not names and wanted.is_loopback:
        names = [name for name, ip in _interface_addresses() if ip.is_loopback]  # all of 127.0.0.0/8 is here
    return next((name for name in names if scope in ("", name)), None)


class _IfAddrs(ctypes.Structure):
    """The part of struct ifaddrs that is read here (getifaddrs(3))."""


_IfAddrs._fields_ = (
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
)


def _interface_addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """(interface, address) in gloo's order."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return
    with contextlib.ExitStack() as ending:
        ending.callback(libc.freeifaddrs, first)
        entry = first
        while entry:  # type: ignore[truthy-bool]  # a null pointer is false
            here = entry.contents
            if here.address is not None:
                family = ctypes.c_ushort.from_address(here.address).value
                if family == socket.AF_INET:  # struct sockaddr_in: family, port, address
                    yield here.name.decode(), ipaddress.IPv4Address(ctypes.string_at(here.address + 4, 4))
                elif family == socket.AF_INET6:  # struct sockaddr_in6: family, port, flow label, address
                    yield here.name.decode(), ipaddress.IPv6Address(ctypes.string_at(here.address + 8, 16))
            entry = here.next
