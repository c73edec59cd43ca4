"""Addresses and probes between machines: names that mean loopback at home, links that drop, machines that refuse."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from elasticd_agent.rendezvous.probe import ProbeAlive, ProbeNoAnswer, ProbeRefused, probe_nodes
from tests.multihost.conftest import StartNetwork
from tests.multihost.net import Host

DEADLINE_S = 60.0
REPOSITORY = Path(__file__).parents[2]
PATH = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'agents'}"}

ASK = """
import json, sys
from elasticd.errors import StoreUnavailable, UsageError
from elasticd_agent.system.network.addresses import is_local, local_address

def answer(what):
    if isinstance(what, str):
        return is_local(what)
    towards, given, *more = what
    try:
        return local_address([(host, 2379) for host in towards], given, leave_loopback=bool(more))
    except (StoreUnavailable, UsageError) as error:
        return str(error)

print(json.dumps([answer(what) for what in json.loads(sys.argv[1])]))
"""

READ = """
import os
from elasticd_agent.store.etcd.store import EtcdStore
from tests.etcd import etcd_servers
with etcd_servers() as etcd:
    store = EtcdStore([("etcd.test", etcd.port)], timeout_s=20.0)
    print(store.read("k"), "GRPC_DNS_RESOLVER" not in os.environ)
    store.close()
"""

AGENT = """
import sys
from elasticd_agent.rendezvous.probe import ProbeServer
server = ProbeServer(sys.argv[1], "b", "i1")
print(server.port, flush=True)
sys.stdin.read()
"""


def ask(host: Host, *questions: object) -> list[object]:
    """What `is_local` says of each name there, and `local_address` of each (endpoints, given), or with a third item of
    each that is to leave loopback.
    """
    answers = json.loads(host.run([sys.executable, "-c", ASK, json.dumps(questions)], PATH))
    assert isinstance(answers, list)
    return answers


def test_address_towards_the_store(network: StartNetwork) -> None:
    a, b = network(hosts=2).hosts
    expected = {
        "towards IPv4": (([b.address], None), a.address),
        "towards IPv6": (([b.address6], None), a.address6),
        "towards itself": (([a.address], None), a.address),
        "the first that has a route": ((["198.51.100.7", b.address6], None), a.address6),
        "a given address": (([b.address], a.address6), a.address6),
    }
    answers = ask(a, *(question for question, _ in expected.values()))
    assert dict(zip(expected, answers, strict=True)) == {what: answer for what, (_, answer) in expected.items()}
    named, given, nowhere, wrong = ask(
        a, (["node1"], None), ([b.address], "node0"), (["198.51.100.7"], None), ([b.address], "node1")
    )
    assert {named, given} <= {a.address, a.address6}, "names have both here; the resolver says which is better"
    assert str(nowhere).startswith("no address of this machine reaches 198.51.100.7:2379: there is no route")
    assert f"which is not an address of this machine; leave it out to use {a.address}," in str(wrong)
    assert ask(a, "node0", a.address, a.address6, "node1", b.address, b.address6) == [True] * 3 + [False] * 3


def test_name_that_resolves_to_loopback_locally(network: StartNetwork, tmp_path: Path) -> None:
    a, b = network(hosts=2).hosts
    table = [
        "127.0.1.1 node0.cluster node0",  # as Debian's installer writes it
        "127.0.0.1 localhost",
        f"{b.address} node1",
        *(f"{address} both" for address in (a.address, b.address)),  # a name of two machines
        *(f"{address} other" for address in (a.address, "198.51.100.7")),  # one of its addresses has no route here
    ]
    (tmp_path / "hosts").write_text("\n".join(table) + "\n")
    a.run(["umount", "/etc/hosts"])
    a.run(["mount", "--bind", tmp_path / "hosts", "/etc/hosts"])

    assert ask(a, "node0", "node0.cluster", "NODE0.Cluster.", "other") == [True] * 4
    assert ask(a, "both", "node1") == [False, False]
    lost, other, named, local, alone = ask(
        a,
        (["node0"], None),
        (["node0", "node1"], None),
        (["node1"], "node0"),
        (["localhost"], None),
        (["localhost"], None, "leaves it"),
    )
    assert "node0:2379 is on loopback as this machine resolves it" in str(lost)
    assert "name it with --local-addr" in str(lost)
    assert other == named == a.address
    assert local == alone == "127.0.0.1"

    a.run(["ip", "route", "add", "default", "via", b.address])
    assert ask(a, (["node0"], None), (["node0"], "node0")) == [a.address, a.address]
    assert ask(a, (["127.0.0.1"], None), (["127.0.0.1"], None, "leaves it")) == ["127.0.0.1", a.address]
    assert ask(a, (["127.0.0.1"], "127.0.0.1", "leaves it")) == ["127.0.0.1"]


def test_etcd_by_a_name_with_two_addresses_in_the_host_table(network: StartNetwork, tmp_path: Path) -> None:
    a, _ = network(hosts=2).hosts
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.0.9 etcd.test\n127.0.0.1 etcd.test\n")
    a.run(["umount", "/etc/hosts"])
    a.run(["mount", "--bind", tmp_path / "hosts", "/etc/hosts"])
    assert a.run([sys.executable, "-c", READ], PATH) == "None True\n"


def test_link_local_address_has_its_interface(network: StartNetwork) -> None:
    a, _ = network(hosts=2).hosts
    a.run(["ip", "addr", "add", "fe80::77/64", "dev", "eth0", "nodad"])
    towards, given, bare = ask(a, (["fe80::99%eth0"], None), (["::1"], "fe80::77%eth0"), (["::1"], "fe80::77"))
    assert str(towards).startswith("fe80::") and str(towards).endswith("%eth0")
    assert given == "fe80::77%eth0"
    assert "add the interface" in str(bare)
    assert ask(a, "fe80::77%eth0", "fe80::99%eth0") == [True, False]


def test_cut_machine_is_silent_and_dead_agent_refuses(network: StartNetwork) -> None:
    net = network(hosts=2)
    a, b = net.hosts
    pipe = subprocess.PIPE
    where = {}
    agents = []
    for address in (b.address, b.address6):
        agents.append(b.popen([sys.executable, "-c", AGENT, address], PATH, stdin=pipe, stdout=pipe))
        stdout = agents[-1].stdout
        where[address] = (address, int(stdout.readline()))

    def knocked(timeout_s: float) -> set[ProbeAlive | ProbeRefused | ProbeNoAnswer]:
        return set(a.call(lambda: probe_nodes(where, timeout_s)).values())

    try:
        assert knocked(DEADLINE_S) == {ProbeAlive("b", "i1")}
        net.cut(a, b)
        assert knocked(0.5) == {ProbeNoAnswer("no connection within 0.5 s")}
        net.heal(a, b)
        assert knocked(DEADLINE_S) == {ProbeAlive("b", "i1")}
        b.freeze()
        assert knocked(0.5) == {ProbeNoAnswer("connected, but no answer within 0.5 s")}
        b.thaw()
        assert knocked(DEADLINE_S) == {ProbeAlive("b", "i1")}
        b.kill_all()
        begun = time.monotonic()
        assert knocked(DEADLINE_S) == {ProbeRefused()}
        assert time.monotonic() - begun < DEADLINE_S / 2
    finally:
        for process in agents:
            process.kill()
            process.communicate()
