"""The list of process groups beside the flight recorder, from a real torch: which are the job's, which unused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d, rpc
from elasticd.heartbeat.collectives import process_group_table

def listed(rank="0", size="1"):
    return {one["process_group"][0]: [one["in_job"], one["unused"]] for one in process_group_table(rank, size)}

found = {"before": process_group_table("0", "1")}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.new_group([0])
dist.all_reduce(torch.ones(1))
found["own"] = listed()
found["members"] = [one["members"] for one in process_group_table("0", "1")]
found["part of a larger job"] = listed(size="2")
# As a library does that joins an inference engine.
store = dist.PrefixStore("engine", dist.HashStore())
engine, _ = c10d._new_process_group_helper(1, 0, [], c10d.Backend("gloo"), store, group_name="engine",
                                           timeout=c10d.default_pg_timeout)
c10d._world.pg_group_ranks[engine] = {0: 0}
found["engine"] = listed()
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + sys.argv[1])
rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
found["rpc"] = listed()
print(json.dumps(found), flush=True)
os._exit(0)
"""


def test_groups_of_other_programs_are_known(start: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (found,) = start(str(script), f"{tmp_path}/rpc", world_size=1).results()
    assert found["before"] == []
    assert found["own"] == {"0": [True, False], "1": [True, True]}
    assert len(set(found["members"])) == 1, "of the same ranks"
    assert all(found["members"])
    assert found["part of a larger job"] == {"0": [False, False], "1": [False, True]}
    assert found["engine"] == {**found["own"], "engine": [False, True]}
    assert found["rpc"] == {"0": [False, False], "1": [False, True], "engine": [False, True]}
