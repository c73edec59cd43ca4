"""The checks of benchmarks/gpu_day.py: `gpu_checks.py NAME cuda|fake` prints one JSON object, {"measured", "ok"}.

`ok` is null where the figure is for a person to judge.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

Result = tuple[str, bool | None]
ON = sys.argv[2] if len(sys.argv) > 2 else "fake"
CUDA = ON == "cuda"
DEVICE = "cuda" if CUDA else "cpu"
CYCLES_PER_S = 1_500_000_000
"""Of torch.cuda._sleep, about."""


def module(name: str) -> Any:
    """Without types: torch has none for what the checks call."""
    return importlib.import_module(name)


def facts() -> Result:
    stat = Path("/proc/self/schedstat").exists()
    try:
        wchan = bool(Path("/proc/self/wchan").read_text())
    except OSError:
        wchan = False
    modes = [path.read_text() for path in Path("/proc/driver/nvidia/gpus").glob("*/information")]
    return f"schedstat {stat}, wchan {wchan}, {len(modes)} GPUs in /proc/driver", stat


def devices_open() -> int:
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia")
        except OSError:
            continue
    return found


def child_can_use_cuda() -> bool:
    torch = module("torch")

    pid = os.fork()
    if not pid:
        try:
            torch.ones(1, device=DEVICE).sum().item()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def preloads() -> Result:
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    torch = module("torch")

    opened = [devices_open()]
    works = [child_can_use_cuda()]
    torch.cuda.is_available()
    opened.append(devices_open())
    if CUDA:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        while nvml.nvmlShutdown() == 0:
            pass
    opened.append(devices_open())
    works.append(child_can_use_cuda())
    said = f"open after import, is_available, nvmlShutdown: {opened}; CUDA in a fork: {works}"
    return said, opened[0] == opened[2] == 0 and all(works)


CONTEXT = """
import sys, time, torch
began = time.monotonic()
x = torch.ones(512, 512, device=sys.argv[1])
(x @ x).sum().item()
print(time.monotonic() - began)
"""


def contexts() -> Result:
    told = []
    for many in (1, 8 if CUDA else 2):
        command = [sys.executable, "-c", CONTEXT, DEVICE]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(many)]
        seconds = [float(one.communicate()[0] or "nan") for one in started]
        told.append(f"{many} at once: {max(seconds):.2f} s")
    return ", ".join(told), None


def cpu_share(act: Callable[[], Any]) -> tuple[float, float]:
    began, used = time.monotonic(), time.thread_time()
    act()
    passed = time.monotonic() - began
    return passed, (time.thread_time() - used) / max(passed, 1e-9)


def launches() -> Result:
    torch = module("torch")

    x = torch.ones(1, device=DEVICE)
    if not CUDA:
        passed, share = cpu_share(lambda: [x.add_(1) for _ in range(2000)])
        return f"2,000 operations in {passed:.3f} s, {share:.0%} of a core", None
    x.add_(1)  # a kernel is loaded at its first launch, which waits for the GPU
    torch.cuda.synchronize()
    torch.cuda._sleep(5 * CYCLES_PER_S)
    count, slowest = 0, 0.0
    while slowest < 0.5 and count < 5000:
        began = time.monotonic()
        x.add_(1)
        slowest = time.monotonic() - began
        count += 1
    torch.cuda._sleep(5 * CYCLES_PER_S)
    _, share = cpu_share(lambda: [x.add_(1) for _ in range(2000)])
    return f"blocked after {count} launches, then {share:.0%} of a core", 500 < count < 3000


def waits() -> Result:
    import threading

    torch = module("torch")

    x = torch.ones(64, 64, device=DEVICE, requires_grad=True)
    if CUDA:
        torch.cuda._sleep(3 * CYCLES_PER_S)
    turns, stop = [0], threading.Event()

    def count() -> None:
        while not stop.wait(0.01):
            turns[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    item_s, share = cpu_share(lambda: (x @ x).sum().item())
    backward_s, _ = cpu_share(lambda: (x @ x).sum().backward())
    stop.set()
    thread.join()
    free = turns[0] / max(1.0, 100 * (item_s + backward_s))
    said = f"item() {item_s:.2f} s at {share:.0%} of a core, backward {backward_s:.2f} s, another thread {free:.0%}"
    return said, free > 0.5 if CUDA else None


def join(timeout_s: int = 60) -> Any:
    from datetime import timedelta

    dist = module("torch.distributed")

    store = dist.HashStore()
    backend = "nccl" if CUDA else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=timeout_s))
    return dist


def recorder() -> Result:
    os.environ["TORCH_FR_BUFFER_SIZE"] = os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "2000"
    dist = join()
    torch = module("torch")

    from elasticd.heartbeat.recorders import GroupCounts, flight_recorder_dump

    x = torch.ones(1 << 20, device=DEVICE)
    dist.all_reduce(x)
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda._sleep(3 * CYCLES_PER_S)
    dist.all_reduce(x, async_op=True)
    counts = GroupCounts()
    groups = counts.read(8)
    began = time.monotonic()
    for _ in range(100):
        groups = counts.read(8)
    micros = (time.monotonic() - began) * 1e4
    pending = any(enqueued > completed for _, enqueued, completed in groups)
    dump = (flight_recorder_dump() or b"").decode()
    kind = type(dist.group.WORLD._get_backend(torch.device(DEVICE))).__name__
    said = f"torch {torch.__version__}, {kind}, {micros:.0f} us, groups {groups}: {dump[:300]}"
    unknown = any(enqueued < 0 for _, enqueued, _ in groups)
    return said, (pending and micros < 1000) if CUDA and not unknown else None


KERNEL = """
import sys, time, torch
x = torch.ones(1, device=sys.argv[1], requires_grad=True)
step = torch.optim.SGD([x], lr=0.1)
for number in range(120):
    if number == 100:
        torch.cuda._sleep(8 * 1_500_000_000) if sys.argv[1] == "cuda" else time.sleep(8)
    (x * x).sum().backward()
    x.grad.sum().item()
    step.step()
    time.sleep(0.01)
"""


def long_kernel() -> Result:
    script = Path("gpu-day-kernel.py").absolute()
    script.write_text(KERNEL)
    command = [sys.executable, "-m", "elasticd_agent", "run", "--nproc-per-node", "1", "--max-restarts", "0"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([".", "agents"])}
    try:
        ended = subprocess.run([*command, str(script), DEVICE], env=env, capture_output=True, text=True, check=False)
    finally:
        script.unlink()
    return f"exit code {ended.returncode}: {ended.stderr.strip().splitlines()[-1:]}", ended.returncode == 0


def pipe() -> Result:
    if not CUDA:
        return "only NCCL has a pipe", None
    # Only the older of its two classes, that is.
    where = f"/dev/shm/gpu-day-{os.getpid()}-"
    os.environ |= {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{where}pipe-",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{where}dump-",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_COORD_CHECK_MILSEC": "250",
        "TORCH_DIST_USE_NCCL2": "0",
    }
    dist = join()
    torch = module("torch")

    dist.all_reduce(torch.ones(1, device=DEVICE))
    dump = Path(f"{where}dump-0")
    seconds = []
    for hold in (False, True):
        dump.unlink(missing_ok=True)
        fd = os.open(f"{where}pipe-0.pipe", os.O_WRONLY)
        began = time.monotonic()
        os.write(fd, b"1")
        os.close(fd)
        if hold:
            ctypes.PyDLL(None).sleep(4)
            seconds.append(round(dump.stat().st_mtime - time.time() + 4, 2) if dump.exists() else -1.0)
        else:
            while not dump.exists() and time.monotonic() < began + 10:
                time.sleep(0.01)
            seconds.append(round(time.monotonic() - began, 2))
    for path in Path("/dev/shm").glob(f"gpu-day-{os.getpid()}-*"):
        path.unlink()
    return f"dump after {seconds[0]} s; with the GIL held {seconds[1]} s (-1: none)", seconds[0] < 6


HOLD = """
import sys, time, torch
size = int(float(sys.argv[2]) * (1 << 30))
x = torch.ones(size, dtype=torch.uint8, device=sys.argv[1])
torch.cuda._sleep(1 << 40) if sys.argv[1] == "cuda" else None
print("ready", flush=True)
time.sleep(600)
"""


def killed() -> Result:
    told, good = [], True
    for gigabytes in (1, 60, 120) if CUDA else (0.1,):
        command = [sys.executable, "-c", HOLD, DEVICE, str(gigabytes)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            process.kill()
            process.wait()
            told.append(f"{gigabytes} GB did not fit")
            continue
        began = time.monotonic()
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        reaped_s = time.monotonic() - began
        while CUDA and str(process.pid) in _smi("pid") and time.monotonic() < began + 60:
            time.sleep(0.1)
        gone_s = time.monotonic() - began
        good = good and gone_s < 30
        told.append(f"{gigabytes} GB: reaped {reaped_s:.2f} s, gone {gone_s:.2f} s")
    return "; ".join(told), good


def _smi(field: str) -> list[str]:
    command = ["nvidia-smi", f"--query-compute-apps={field}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.split()


def state() -> Result:
    torch = module("torch")

    size = (10 << 30) if CUDA else (64 << 20)
    source = torch.ones(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=CUDA)
    told = []
    for into, out in ((target, source), (source, target)):
        began = time.monotonic()
        into.copy_(out)
        if CUDA:
            torch.cuda.synchronize()
        told.append(f"{size / (time.monotonic() - began) / 1e9:.1f} GB/s")
    return f"to the processor and back: {', '.join(told)}", None


def recovery() -> Result:
    """Of two ranks that share the GPU, and of one."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    measured = [(workers, recovery_of(workers)) for workers in ("2", "1")]
    told = [f"{what}: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts) for what, parts in measured]
    return "; ".join(told) + " s", all(parts[-1][1] < 12 for _, parts in measured)


def recovery_of(workers: str) -> list[tuple[str, float]]:
    """Seconds from a kill, by part."""
    jobs, gpu = module("tests.faults.job"), module("tests.gpu.conftest")
    with TemporaryDirectory(prefix="gpu-day-") as directory:
        flags = ["--virtual-local-rank", "--max-restarts", "5", "--checkpoint-dir", f"{directory}/checkpoints"]
        env = {"TEST_DEVICE": DEVICE, "TEST_COMMUNICATORS": "1", "CUDA_VISIBLE_DEVICES": "0" if CUDA else ""}
        job = jobs.Job(Path(directory) / "job", gpu.SCRIPT, workers=workers, flags=flags, env=env | gpu.ALONE)
        try:
            job.step(job.event("first_step", round=1)["step"] + 100, round=1)
            killed = time.monotonic()
            job.kill(int(workers) - 1, 1)
            kinds = (("planned", "round_published"), ("started", "group_started"), ("step", "first_step"))
            return [(name, job.event(kind, round=2)["mono"] - killed) for name, kind in kinds]
        finally:
            job.end()


def nvml() -> Result:
    try:
        import pynvml
    except ImportError:
        return "pynvml is not installed", None if not CUDA else False
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML: {error}", None if not CUDA else False
    if not os.getuid():
        os.setuid(65534)
    count = pynvml.nvmlDeviceGetCount()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    return f"{count} GPUs, {pynvml.nvmlDeviceGetMemoryInfo(handle).used >> 20} MB used", True


def suspend() -> Result:
    dist = module("torch.distributed")

    found = [name for name in dir(dist.ProcessGroup) if "suspend" in name or "resume" in name or "shrink" in name]
    return f"torch offers {found}", None


def main() -> None:
    measured, ok = globals()[sys.argv[1]]()
    print("\n" + json.dumps({"measured": measured, "ok": ok}), flush=True)
    os._exit(0)  # a kernel that still runs, or NCCL's threads, would hold up the exit


if __name__ == "__main__":
    main()
