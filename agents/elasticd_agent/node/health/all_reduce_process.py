"""Runs by path in a Python that has torch: every slot of this node adds up numbers with the others, once.

Told what to do by one JSON line on standard input, it says what came of it by one JSON line on standard output. torch
is imported once and the slots' processes are forked from that. Only the standard library besides torch: the Python may
know nothing of elasticd. It bounds itself; whoever started it does so once more.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import sys
import time
from datetime import timedelta
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
ELEMENTS = 1 << 18
"""1 MiB: enough for gloo's and NCCL's ways with large messages, next to nothing to send."""
STAGES = ("started", "has its device", "has met the others", "has added up")
EXIT_TIMEOUT_S = 2.0


def main() -> None:
    asked = json.loads(sys.stdin.readline() or "{}")
    if not asked:
        return
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    began = time.monotonic()
    try:
        import torch  # noqa: F401  for those that are forked
    except Exception as error:  # noqa: BLE001  a torch that is broken in any way is one that cannot be used
        send({"outcome": "skipped", "why": f"torch cannot be imported by {sys.executable}: {error}"})
        return
    imported_s = time.monotonic() - began
    send({**run_ranks(asked), "import_s": imported_s})


def run_ranks(asked: dict[str, Any]) -> dict[str, Any]:
    slots: list[int] = asked["slots"]
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)  # our starter's end
    pids: dict[int, int] = {}
    heard: dict[int, bytes] = {}
    for rank, slot in enumerate(slots):
        ours, theirs = os.pipe()
        pids[slot] = os.fork()
        if pids[slot] == 0:
            _rank_main(rank, asked, theirs)
        os.close(theirs)
        heard[slot] = b""
        selector.register(ours, selectors.EVENT_READ, slot)
    until = time.monotonic() + asked["within_s"]
    while len(selector.get_map()) > 1 and (left_s := until - time.monotonic()) > 0:
        for key, _ in selector.select(left_s):
            data = os.read(key.fd, 4096)
            if key.fd == 0:
                until = 0.0
            elif data:
                heard[key.data] += data
            else:
                selector.unregister(key.fd)
                os.close(key.fd)
    _end(pids.values())
    found = {
        slot: [json.loads(line) for line in said.splitlines(True) if line[-1:] == b"\n"] for slot, said in heard.items()
    }
    return summarize(slots, found, asked)


def summarize(slots: list[int], found: dict[int, list[dict[str, Any]]], asked: dict[str, Any]) -> dict[str, Any]:
    """The first slot in the way of the others is the one to name: who failed, else who came least far."""
    failed = {slot: said[-1]["failed"] for slot, said in found.items() if said and "failed" in said[-1]}
    stage = {slot: sum("stage" in one for one in said) for slot, said in found.items()}
    late = {slot for slot in slots if stage[slot] < len(STAGES) and slot not in failed}
    behind = sorted(slot for slot in late if stage[slot] == min(stage.values()))
    if behind and len(behind) < len(slots):
        names = ", ".join(map(str, behind))
        last = STAGES[stage[behind[0]] - 1] if stage[behind[0]] else "nothing was heard of it"
        why = f"slot {names} did not come to the all-reduce within {asked['within_s']:g} s ({last}); the others waited"
        return {"outcome": "bad", "why": why}
    if failed:
        least = min(failed, key=lambda slot: (stage[slot], slot))
        return {"outcome": "bad", "why": f"slot {least}: {failed[least]}"}
    if late:
        return {"outcome": "bad", "why": f"the slots did not finish an all-reduce within {asked['within_s']:g} s"}
    sums = {slot: said[-1]["sum"] for slot, said in found.items()}
    wrong = {slot: got for slot, got in sums.items() if got != asked["sum"]}
    if wrong:
        slot, got = min(wrong.items())
        return {"outcome": "bad", "why": f"slot {slot} added up {got}, where {asked['sum']} would be right"}
    seconds = max(said[-1]["seconds"] for said in found.values())
    return {"outcome": "good", "why": f"{len(slots)} slots, {asked['backend']}, {seconds:.2f} s"}


def _rank_main(rank: int, asked: dict[str, Any], out: int) -> NoReturn:
    def tell(message: dict[str, Any]) -> None:
        os.write(out, json.dumps(message).encode() + b"\n")

    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        tell({"stage": 0})
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        device = "cpu"
        if asked["devices"]:
            os.environ["CUDA_VISIBLE_DEVICES"] = asked["devices"][rank]
            device = "cuda:0"
        began = time.monotonic()
        numbers = torch.full((ELEMENTS,), float(rank + 1), device=device)
        tell({"stage": 1})
        dist.init_process_group(
            asked["backend"],
            init_method=f"file://{asked['directory']}/meeting",
            rank=rank,
            world_size=len(asked["slots"]),
            timeout=timedelta(seconds=asked["within_s"]),
        )
        dist.barrier()
        tell({"stage": 2})
        dist.all_reduce(numbers)
        low, high = float(numbers.min()), float(numbers.max())
        tell({"stage": 3, "sum": low if low == high else [low, high], "seconds": time.monotonic() - began})
    except BaseException as error:  # noqa: BLE001  whatever it is, this process must not go on as its parent
        tell({"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"})
    os._exit(0)


def _end(pids: Any) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + EXIT_TIMEOUT_S
    left = set(pids)
    while left and time.monotonic() < until:
        left = {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0}
        time.sleep(0.01 * bool(left))


def send(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
