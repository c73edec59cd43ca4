"""The CUDA build of torch on a machine without a device, in an environment of its own: `make test-cuda-build`.

libcuda and libnvidia-ml are stubs that log calls; a third one lets NCCL groups be made, with their threads, pipe and
recorder. No collective can run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elasticd.heartbeat.recorders import UNKNOWN_COUNTS
from elasticd_agent.hangs.recordings import parse
from elasticd_agent.system.python_packages import installed_version
from elasticd_agent.workers.environment import FR_BUFFER_VARIABLES, FR_HOOKS_IN_TORCH, nccl_dump_paths, nccl_environment
from elasticd_agent.workers.launcher import requests
from tests.gpu.machine import FAKES, LIMIT_S, calls, look, make_gpu_machine

pytestmark = [pytest.mark.cuda_build, pytest.mark.timeout(2 * LIMIT_S)]
REPO = Path(__file__).parents[2]
TRIES = 10
PRELOAD = f"""
import importlib
for name in {requests.ALWAYS_PRELOADED + requests.COMPILE_MODULES!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # the template goes without a module that this torch does not have
        if error.name != name: raise
"""
ASKS = "import torch; torch.cuda.is_available(); torch.cuda.device_count()"
GROUPS = """
import json, os, sys, time
import torch, torch.distributed as dist, torch.distributed.distributed_c10d as c10d
from elasticd.heartbeat.recorders import GroupCountReader, flight_recorder_dump

options = c10d.ProcessGroupNCCL.Options()
if hasattr(options, "lazy_init"):  # nccl2 of torch 2.15 connects at once otherwise
    options.lazy_init = True

def make():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, pg_options=options)
    dist.new_group([0], pg_options=options)
    dist.new_group([0], use_local_synchronization=True, pg_options=options)
    dist.all_reduce(torch.ones(1), group=dist.new_group([0], backend="gloo"))

found = {}
counts = GroupCountReader()
make()
found["once"] = counts.read(8)
if sys.argv[1] == "nccl":  # the other class cannot be destroyed without a driver
    dist.destroy_process_group()
    make()
found["twice"] = counts.read(8)
groups = [group for group, (name, _) in c10d._world.pg_map.items() if name != "gloo"]
found["uids"] = [getattr(group._get_backend(torch.device("cuda")), "uid", None) for group in groups]
began = time.thread_time()
for _ in range(200):
    counts.read(8)
found["us"] = (time.thread_time() - began) * 5000
found["recorder"] = json.loads(flight_recorder_dump())
found["threads"] = sorted({open(f"/proc/self/task/{tid}/comm").read().strip() for tid in os.listdir("/proc/self/task")})
print(json.dumps(found), flush=True)
sys.stdin.read()
os._exit(0)
"""
ONE_GROUP = """
import ctypes, sys, time
import torch, torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
print("ready", flush=True)
(ctypes.PyDLL if sys.argv[1] == "held" else ctypes.CDLL)(None).sleep(600)
"""
LEAVE = """
import json, os, threading, time
import torch, torch.distributed as dist
from elasticd import process_group
from elasticd.rejoin import transport

torch.accelerator.synchronize = lambda device: None  # there is none
place = torch.device("cuda", 0)
for _ in range(2):
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group([0])
    groups = transport.of_device(place)
    thread = threading.Thread(target=groups.interrupt)
    thread.start()
    groups.leave(process_group.DefaultGroup(0, 1, place, created_by_join=True))
    thread.join()
time.sleep(1)  # in which a watchdog would have ended the process
threads = {open(f"/proc/self/task/{tid}/comm").read().strip() for tid in os.listdir("/proc/self/task")}
print(json.dumps([dist.is_initialized(), sorted(name for name in threads if name.startswith("pt_nccl"))]), flush=True)
os._exit(0)
"""
HOOK = """
import json, torch, torch.distributed as dist, torch.distributed.distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from elasticd.heartbeat.recorders import GroupCountReader, flight_recorder_dump

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
group = dist.group.WORLD
c10d._world.pg_flight_recorder_hooks[group] = c10d.FlightRecorderHook.attach(group, [0, 1])
dist.all_reduce(torch.ones(4))
dist.send(torch.ones(4), 1)
dist.all_reduce(torch.ones(4))
print(json.dumps([json.loads(flight_recorder_dump()), GroupCountReader().read(8)]), flush=True)
"""


@pytest.fixture(scope="session")
def python() -> str:
    found = os.environ.get("ELASTICD_CUDA_PYTHON")
    assert found, "make test-cuda-build sets it"
    return found


@pytest.fixture(scope="session")
def version(python: str) -> tuple[int, int]:
    found = installed_version("torch", python, {})
    assert found is not None
    return found


@pytest.fixture(params=["nccl", "nccl2"])
def kind(request: pytest.FixtureRequest, version: tuple[int, int]) -> str:
    """The class that torch makes for "nccl"."""
    if request.param == "nccl2" and version < (2, 14):
        pytest.skip(f"torch {version} has one class for NCCL")
    return str(request.param)


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """With the variables that the template sets while it preloads."""
    return make_gpu_machine(tmp_path) | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OPENBLAS_NUM_THREADS": "1"}


@pytest.mark.parametrize("more", ["", "import triton\n"])
def test_preloads_leave_no_device_and_one_thread(python: str, machine: dict[str, str], more: str) -> None:
    why, in_worker, _ = look(machine, PRELOAD + more, python)
    assert (why, in_worker) == ("None", "in the worker: False")
    assert "cuInit" not in calls(machine)


def test_torch_leaves_nvml_open_and_the_template_closes_it(python: str, machine: dict[str, str]) -> None:
    why, in_worker, _ = look(machine, ASKS, python)
    assert (why, in_worker) == ("None", "in the worker: False")
    assert calls(machine).count("nvmlInit") > 0
    assert calls(machine).count("nvmlShutdown") == calls(machine).count("nvmlInit") - 2, "two for the worker's pynvml"


def test_child_is_not_in_a_bad_fork(python: str, machine: dict[str, str]) -> None:
    """After torch has counted devices by NVML; a driver that is initialised makes it one."""
    source = f"{ASKS}\nimport os\npid = os.fork()\nif not pid: os._exit(torch.cuda._is_in_bad_fork())\n"
    source += "raise SystemExit(os.waitpid(pid, 0)[1])"
    assert subprocess.run([python, "-c", source], env=machine, timeout=LIMIT_S, check=False).returncode == 0


def test_parked_worker_shares_the_templates_memory(python: str, machine: dict[str, str]) -> None:
    source = PRELOAD + "import gc, os, time\ngc.collect(); gc.freeze()\npid = os.fork()\nif not pid: time.sleep(600)\n"
    source += "time.sleep(0.5); print(open(f'/proc/{pid}/smaps_rollup').read()); os.kill(pid, 9); os.waitpid(pid, 0)"
    command = [python, "-c", source]
    done = subprocess.run(command, env=machine, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    private = sum(int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("Private"))
    assert private < 8 << 10, f"{private} KiB of its own"


@pytest.mark.parametrize("gil", ["free", "held"])
def test_dump_through_the_pipe(python: str, tmp_path: Path, gil: str) -> None:
    """Of an empty recording, which names no frames: that does not need the GIL. Others may delay one."""
    env = nccl_environment({}, tmp_path, installed_version("torch", python, {})) | {"TORCH_DIST_USE_NCCL2": "0"}
    pipe, dump = nccl_dump_paths(env, 0) or (None, None)
    assert pipe is not None
    with start_groups(python, tmp_path, env, ONE_GROUP, gil) as process:
        assert process.stdout.readline() == "ready\n"
        for _ in range(TRIES):
            dump.unlink(missing_ok=True)
            pipe.write_bytes(b"1")
            began = time.monotonic()
            while not dump.exists() and time.monotonic() < began + LIMIT_S / TRIES:
                time.sleep(0.02)
            seconds = time.monotonic() - began
            if seconds < 1.5:
                break
        process.kill()
    assert dump.exists()
    assert seconds < 1.5


def start_groups(
    python: str, directory: Path, env: Mapping[str, str], source: str = GROUPS, *args: str
) -> subprocess.Popen[str]:
    preload = directory / "cudart.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", preload, FAKES / "cudart.c"], check=True)
    given = os.environ | {"LD_PRELOAD": str(preload), "PYTHONPATH": str(REPO)} | env
    pipe = subprocess.PIPE
    return subprocess.Popen([python, "-c", source, *args], env=given, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("known", [True, False])
def test_nccl_groups_and_variables(
    python: str, tmp_path: Path, version: tuple[int, int], kind: str, known: bool
) -> None:
    """Every group's counts, exactly, or that they are unknown; a pipe of one class; no warning where the version is
    known.
    """
    env = nccl_environment({}, tmp_path, version if known else None)
    env |= {"TORCH_DIST_USE_NCCL2": str(int(kind == "nccl2"))}
    pipe, _ = nccl_dump_paths(env, 0) or (None, None)
    assert pipe is not None
    with start_groups(python, tmp_path, env, GROUPS, kind) as process:
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        found = json.loads(line)
        recorder, threads = found["recorder"], {one for one in found["threads"] if one.startswith("pt_nccl")}
        assert found["us"] < 1000
        assert recorder["recorder"] == "gloo" or recorder["pg_status"] == {}
        assert [len(found["once"]), len(found["twice"])] == [3, 3]
        assert {one["profiling_name"] for one in recorded_by_gloo(recorder)} == {"gloo:all_reduce"}
        if kind == "nccl":
            assert found["uids"] == [3, 4, 5]
            assert {counts[1:] for counts in map(tuple, found["twice"])} == {(0, 0)}
            assert (recorder["recorder"], recorder["unrecorded"]) == ("nccl", [])
            assert threads == {"pt_nccl_watchdg", "pt_nccl_heartbt"}
            began = time.monotonic()
            # The pipe belongs to the process' first group, which is gone: so is its reader.
            with pytest.raises(OSError, match="No such device"):
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
            assert time.monotonic() - began < 5
        else:
            hooked = version >= FR_HOOKS_IN_TORCH
            assert found["uids"] == [None] * 3
            assert {counts[1:] for counts in map(tuple, found["twice"])} == {(0, 0) if hooked else UNKNOWN_COUNTS}
            assert recorder["recorder"] == ("nccl2" if hooked else "gloo")
            assert [one["backend"] for one in recorder["unrecorded"]] == ([] if hooked else ["nccl2"] * 3)
            assert not threads
            assert not pipe.exists()
        _, said = process.communicate("", timeout=LIMIT_S)
    assert (f"{FR_BUFFER_VARIABLES[1]} is deprecated" in said) == (not known)
    assert "deprecated" not in said or not known


def test_groups_are_aborted_and_made_again(python: str, tmp_path: Path) -> None:
    """Of the older class, without communicators; the other one cannot be aborted without a driver."""
    with start_groups(python, tmp_path, {"TORCH_DIST_USE_NCCL2": "0"}, LEAVE) as process:
        said, errors = process.communicate(timeout=LIMIT_S)
    assert said, errors
    assert json.loads(said) == [False, []]


def recorded_by_gloo(recorder: dict[str, Any]) -> list[dict[str, Any]]:
    """Beside another recorder, or alone."""
    return list((recorder if recorder["recorder"] == "gloo" else recorder["gloo"])["entries"])


def test_recording_of_a_hook(python: str, tmp_path: Path, version: tuple[int, int]) -> None:
    """By torch's own backend without a device, which does not report the end of a collective: that is unknown."""
    if version < FR_HOOKS_IN_TORCH:
        pytest.skip(f"torch {version} attaches no hooks")
    with start_groups(python, tmp_path, {}, HOOK) as process:
        said, errors = process.communicate(timeout=LIMIT_S)
    assert said, errors
    dump, counts = json.loads(said)
    assert [one[1:] for one in counts] == [list(UNKNOWN_COUNTS)]
    assert dump["recorder"] == "fake"
    assert [one["complete"] for one in dump["unrecorded"]] == [False]
    found = parse(dump)
    assert [(one.last, one.pending, one.backend) for one in found.tails() if not one.unrecorded] == [(2, 0, "fake")]


def test_job_of_the_cuda_build_starts_warm(python: str, tmp_path: Path, machine: dict[str, str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch, torch.optim.optimizer\nprint(f'trained {torch.version.cuda}')\n")
    log = tmp_path / "events.jsonl"
    command = [sys.executable, "-m", "elasticd_agent", "run", "--nproc-per-node", "2", "--event-log", str(log), script]
    env = machine | {"PYTHON_EXEC": python, "PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "agents")])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained 1") == 2, done.stdout
    started = [json.loads(line) for line in log.read_text().splitlines() if '"group_started"' in line]
    assert [event["warm"] for event in started] == [True]
