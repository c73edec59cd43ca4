"""Two or three ranks train with DDP; at step STEP each does what its case says. Prints the error that it got, and when.

missed_call.py '{"case": "...", "directory": "..."}'
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import elasticd
from elasticd.session import Session

STEP, STEPS, LATE_S = 10, 14, 6.0


def only(number: int, act: Callable[[Session], object]) -> Callable[[Session], object]:
    """Only this rank does it."""
    return lambda session: act(session) if session.rank == number else None


def save(session: Session) -> None:
    session.save()


def end_or_save(session: Session) -> None:
    if session.rank == 1:
        session.close()  # the end of the process does so too
        sys.exit(0)
    session.save()


def run_alone(session: Session) -> None:
    """Rank 1 steps on without collectives, and without a decision, in which it would wait for rank 0."""
    session._decisions.next = sys.maxsize
    while session.rank == 1:
        session.step()
        time.sleep(0.05)
    session.save()


def late(wait: Callable[[], object]) -> Callable[[Session], None]:
    def act(session: Session) -> None:
        if session.rank == 1:
            wait()
        session.save()

    return act


def compute() -> None:
    until = time.monotonic() + LATE_S
    while time.monotonic() < until:
        sum(range(1000))


def receive_from_rank_2() -> None:
    """Sends and receives are counted as collectives are."""
    dist.send(torch.ones(1), 2)
    dist.recv(torch.ones(1), 2)


def slow_peer(session: Session) -> None:
    """Rank 1 waits for rank 2, in point-to-point messages of the default group, while rank 0 waits in save()."""
    if session.rank == 1:
        receive_from_rank_2()
    if session.rank == 2:
        dist.recv(torch.ones(1), 1)
        time.sleep(LATE_S)
        dist.send(torch.ones(1), 1)
    session.save()


def slow_subgroup(session: Session) -> None:
    """Rank 1 has sent more than rank 0, and waits in a collective that is not rank 0's."""
    group = dist.new_group([1, 2])
    if session.rank == 1:
        dist.send(torch.ones(1), 2)
    if session.rank == 2:
        dist.recv(torch.ones(1), 1)
        time.sleep(LATE_S)
    if session.rank > 0:
        dist.all_reduce(torch.ones(1), group=group)
    session.save()


def pending(session: Session) -> None:
    """All ranks have a collective under way, which rank 1 has waited for already where rank 0 has not."""
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    if session.rank == 1:
        work.wait()
        time.sleep(LATE_S)
    session.save()
    work.wait()


def more_steps(session: Session) -> None:
    """A barrier counts calls, not steps."""
    for _ in range(5 if session.rank == 1 else 0):
        session._steps += 1
        time.sleep(LATE_S / 5)
    session.barrier("end")
    session._steps = STEP


CASES: dict[str, Callable[[Session], object]] = {
    "save on rank 0": only(0, save),
    "save on rank 1": only(1, save),
    "barrier on rank 0": only(0, lambda session: session.barrier("x")),
    "checkpoint on rank 0": only(0, lambda session: session.checkpoint(every=STEP + 1)),
    "save, and barrier": lambda session: session.save() if session.rank == 0 else session.barrier("y"),
    "rank 1 has ended": end_or_save,
    "rank 1 steps on": run_alone,
    "late: sleeps": late(lambda: time.sleep(LATE_S)),
    "late: computes": late(compute),
    "late: its peer": slow_peer,
    "late: its group": slow_subgroup,
    "late: after a collective": pending,
    "late: in a barrier": more_steps,
}


def train(case: str, directory: str) -> None:
    session = elasticd.init()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.attach(model=model, optimizer=optimizer)
    session.restore(directory)
    for _ in range(STEPS):
        if case == "step on rank 1" and session.rank == 0:
            model(torch.ones(1, 2)).sum().backward()
            continue
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.step()
        if session.steps == STEP and case in CASES:
            CASES[case](session)
    session.close()


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    start = time.monotonic()
    found: dict[str, Any] = {"error": None}
    try:
        train(**arguments)
    except elasticd.ElasticdError as error:
        found = {"error": type(error).__name__, "message": str(error)}
    except RuntimeError as error:  # the other rank has left
        found = {"error": "peer", "message": str(error)}
    print(json.dumps({**found, "seconds": time.monotonic() - start}), flush=True)


main()
