"""Which interface has an address: asked of this machine's own loopback; tests/multihost asks machines of its own."""

from __future__ import annotations

import pytest

from elasticd_agent.system.network.addresses import gloo_environment, interface_of


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
