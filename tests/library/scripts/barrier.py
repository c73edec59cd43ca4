"""Ranks at barriers, as its argument, a JSON object, says. Prints one: what each call of `barrier` came to.

{"calls": {"0": [call, …], …}, …}; a rank without calls of its own has those of "*". A call is {"name", "timeout", …};
before it the rank does what else the call says: "steps" so many, "phase" enter one for good, "sleep" so long, "await" a
file, "touch" one, "raise". With "file" the process group is made over a store in that file. Ranks leave when all have
printed, or those in "together": rank 0 may serve the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import elasticd

options = json.loads(sys.argv[1])
folder = Path(os.environ.get("FOLDER", "."))
if "file" in options:
    place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", init_method=f"file://{options['file']}", **place)
session = elasticd.init(decision_timeout=timedelta(seconds=options.get("decision_timeout", 600)))


def await_file(name: str) -> None:
    while not (folder / name).exists():
        time.sleep(0.005)


def call(what: dict[str, Any]) -> dict[str, Any]:
    for _ in range(what.get("steps", 0)):
        session.step()
    if "phase" in what:
        for_good.enter_context(session.phase(what["phase"]))
    if "touch" in what:
        (folder / what["touch"]).touch()
    if "await" in what:
        await_file(what["await"])
    time.sleep(what.get("sleep", 0))
    if "raise" in what:
        raise ValueError(what["raise"])
    if "name" not in what:
        return {}
    start = time.monotonic()
    said: dict[str, Any] = {}
    try:
        for _ in range(what.get("times", 1)):
            session.barrier(what["name"], what.get("timeout"))
    except elasticd.BarrierTimeout as error:
        said = {"error": str(error), "name": error.name, "missing": list(error.missing), "waited": error.waited_s}
    except (elasticd.UsageError, dist.DistError) as error:
        said = {"error": str(error), "type": type(error).__name__}
    return {"seconds": time.monotonic() - start, **said}


for_good = contextlib.ExitStack()
calls = options["calls"]
result = [call(each) for each in calls.get(str(session.rank), calls.get("*", []))]
(folder / f"done.{session.rank}").touch()
if options.get("close", True):
    session.close()
    (folder / f"closed.{session.rank}").touch()
sys.stdout.write(json.dumps({"rank": session.rank, "calls": result}) + "\n")
sys.stdout.flush()
for rank in options.get("together", range(session.world_size)):
    await_file(f"done.{rank}")
