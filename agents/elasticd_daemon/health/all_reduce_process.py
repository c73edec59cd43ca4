"""Runs by path in a Python that has torch: one all-reduce of all slots of this node.

It reads the request as one JSON line on standard input and writes the result as one JSON line on standard output. torch
is imported once and the ranks are forked from there. Only the standard library besides torch: that Python may lack
elasticd. It has its own deadline, and its parent another one.
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

Message = dict[str, Any]
"""A line of JSON: a request, a result, or what a rank has reached."""
PR_SET_PDEATHSIG = 1
TENSOR_ELEMENTS = 1 << 18
"""1 MiB: enough for the large-message paths of gloo and NCCL."""
STAGES = ("started", "has its device", "met its peers", "finished")
EXIT_TIMEOUT_S = 2.0


def main() -> None:
    request = json.loads(sys.stdin.readline() or "{}")
    if not request:
        return
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    began = time.monotonic()
    try:
        import torch  # noqa: F401  for the forked ranks
    except Exception as error:  # noqa: BLE001  however torch is broken, it cannot be used
        send({"outcome": "skipped", "why": f"torch cannot be imported by {sys.executable}: {error}"})
        return
    imported_s = time.monotonic() - began
    send({**run_ranks(request), "import_s": imported_s})


def run_ranks(request: Message) -> Message:
    """Fork one rank for each slot, collect their messages until all have finished or the time is over, and kill them.

    Ranks report each stage that they reach, so a hang has a culprit: the slot that is behind while the others wait.
    """
    slots: list[int] = request["slots"]
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)  # the parent's end
    pids: dict[int, int] = {}
    output: dict[int, bytes] = {}
    for rank, slot in enumerate(slots):
        ours, theirs = os.pipe()
        pids[slot] = os.fork()
        if pids[slot] == 0:
            _rank_main(rank, request, theirs)
        os.close(theirs)
        output[slot] = b""
        selector.register(ours, selectors.EVENT_READ, slot)
    until = time.monotonic() + request["within_s"]
    while len(selector.get_map()) > 1 and (left_s := until - time.monotonic()) > 0:
        for key, _ in selector.select(left_s):
            data = os.read(key.fd, 4096)
            if key.fd == 0:
                until = 0.0
            elif data:
                output[key.data] += data
            else:
                selector.unregister(key.fd)
                os.close(key.fd)
    _kill_ranks(pids.values())
    messages_of = {
        slot: [json.loads(line) for line in messages.splitlines(True) if line[-1:] == b"\n"]
        for slot, messages in output.items()
    }
    return summarize(slots, messages_of, request)


def summarize(slots: list[int], messages_of: dict[int, list[Message]], request: Message) -> Message:
    """The first rule that finds a fault names the slot that blocked the others."""
    for rule in (_slots_behind_reason, _first_error_reason, _unfinished_reason, _wrong_sum_reason):
        if why := rule(slots, messages_of, request):
            return {"outcome": "failed", "why": why}
    seconds = max(messages[-1]["seconds"] for messages in messages_of.values())
    return {"outcome": "passed", "why": f"{len(slots)} slots, {request['backend']}, {seconds:.2f} s"}


def _stages_reached(messages: list[Message]) -> int:
    return sum("stage" in message for message in messages)


def _unfinished_slots(slots: list[int], messages_of: dict[int, list[Message]]) -> list[int]:
    """Slots that neither finished nor failed."""
    return [
        slot
        for slot in slots
        if _stages_reached(messages_of[slot]) < len(STAGES)
        and not (messages_of[slot] and "failed" in messages_of[slot][-1])
    ]


def _slots_behind_reason(slots: list[int], messages_of: dict[int, list[Message]], request: Message) -> str:
    """The rule for slots that were behind all others: these blocked them."""
    least = min(map(_stages_reached, messages_of.values()))
    behind = [slot for slot in _unfinished_slots(slots, messages_of) if _stages_reached(messages_of[slot]) == least]
    if not 0 < len(behind) < len(slots):
        return ""
    last = STAGES[least - 1] if least else "no message from it"
    names = ", ".join(map(str, sorted(behind)))
    return f"slot {names} did not reach the all-reduce within {request['within_s']:g} s ({last}); the others waited"


def _first_error_reason(slots: list[int], messages_of: dict[int, list[Message]], request: Message) -> str:
    """The rule for slots that raised: the one that came least far failed first, and the others lost a peer."""
    errors = {
        slot: messages[-1]["failed"] for slot, messages in messages_of.items() if messages and "failed" in messages[-1]
    }
    if not errors:
        return ""
    first = min(errors, key=lambda slot: (_stages_reached(messages_of[slot]), slot))
    return f"slot {first}: {errors[first]}"


def _unfinished_reason(slots: list[int], messages_of: dict[int, list[Message]], request: Message) -> str:
    """The rule for an all-reduce in which all arrived and that did not end: the fault lies between them."""
    within = f"within {request['within_s']:g} s"
    return f"the slots did not finish an all-reduce {within}" if _unfinished_slots(slots, messages_of) else ""


def _wrong_sum_reason(slots: list[int], messages_of: dict[int, list[Message]], request: Message) -> str:
    """The rule for a sum that is wrong: a device or a link that computes or carries wrong numbers."""
    wrong = {
        slot: messages[-1]["sum"] for slot, messages in messages_of.items() if messages[-1]["sum"] != request["sum"]
    }
    slot, got = min(wrong.items(), default=(0, None))
    return f"slot {slot} added up {got}, not {request['sum']}" if wrong else ""


def _rank_main(rank: int, request: Message, out: int) -> NoReturn:
    def tell(message: Message) -> None:
        os.write(out, json.dumps(message).encode() + b"\n")

    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        tell({"stage": 0})
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        device = "cpu"
        if request["devices"]:
            os.environ["CUDA_VISIBLE_DEVICES"] = request["devices"][rank]
            device = "cuda:0"
        began = time.monotonic()
        numbers = torch.full((TENSOR_ELEMENTS,), float(rank + 1), device=device)
        tell({"stage": 1})
        dist.init_process_group(
            request["backend"],
            init_method=f"file://{request['directory']}/rendezvous",
            rank=rank,
            world_size=len(request["slots"]),
            timeout=timedelta(seconds=request["within_s"]),
        )
        dist.barrier()
        tell({"stage": 2})
        dist.all_reduce(numbers)
        low, high = float(numbers.min()), float(numbers.max())
        tell({"stage": 3, "sum": low if low == high else [low, high], "seconds": time.monotonic() - began})
    except BaseException as error:  # noqa: BLE001  a forked rank must never continue as its parent
        tell({"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"})
    os._exit(0)


def _kill_ranks(pids: Any) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + EXIT_TIMEOUT_S
    left = set(pids)
    while left and time.monotonic() < until:
        left = {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0}
        time.sleep(0.01 * bool(left))


def send(message: Message) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
