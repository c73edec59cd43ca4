"""gloo between machines whose names do not resolve: it listens at the address that elasticd gives it."""

from __future__ import annotations

import subprocess
import sys

from elasticd_agent.system.network.addresses import gloo_environment, interface_of
from tests.multihost.conftest import StartNetwork

SUM = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=90))
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
dist.barrier()
print("total", int(total))
"""


def test_ranks_on_two_machines_connect(network: StartNetwork) -> None:
    hosts = network(2, names=False).hosts
    for host in hosts:
        assert host.call(lambda host=host: [interface_of(a) for a in (host.address, host.address6)]) == ["eth0", "eth0"]
        assert host.call(lambda host=host: gloo_environment({}, host.address)) == {"GLOO_SOCKET_IFNAME": "eth0"}
    common = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    ranks = [
        host.popen(
            [sys.executable, "-c", SUM],
            {**common, "RANK": str(rank), **host.call(lambda host=host: gloo_environment({}, host.address))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]
    said = [rank.communicate(timeout=100) for rank in ranks]
    assert [out for out, _ in said] == ["total 3\n"] * 2, said
