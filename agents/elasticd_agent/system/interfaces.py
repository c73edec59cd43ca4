"""Which network interface has an address, so that gloo uses it.

By default gloo (torch 2.13) listens on the address of this machine's host name, which is loopback on a machine that
calls itself 127.0.1.1, as Debian does: no peer on another machine can then reach it. Gloo takes only an interface's
name, and then the first address that getifaddrs(3) lists for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
from collections.abc import Iterator, Mapping

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


def gloo_environment(environ: Mapping[str, str], address: str) -> dict[str, str]:
    """What workers need so that gloo listens at this node's `address`; nothing if the user has chosen."""
    interface = None if GLOO_VARIABLE in environ else interface_of(address)
    return {} if interface is None else {GLOO_VARIABLE: interface}


def interface_of(address: str) -> str | None:
    """The name of the interface with this literal address ("eth0", or an alias, "eth0:1"); None if none has it."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(wanted, ipaddress.IPv6Address) and wanted.ipv4_mapped is not None:
        wanted = wanted.ipv4_mapped
    names = [name for name, ip in _addresses() if ip == wanted]
    scope = address.partition("%")[2]  # a link-local address names its interface
    if not names and wanted.is_loopback:
        names = [name for name, ip in _addresses() if ip.is_loopback]  # all of 127.0.0.0/8 is here
    return next((name for name in names if scope in ("", name)), None)


class _IfAddrs(ctypes.Structure):
    """The part of struct ifaddrs that is read here (getifaddrs(3))."""


_IfAddrs._fields_ = (
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
)


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
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
