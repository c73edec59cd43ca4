"""Beats of scripts that never heard of elasticd: torch calls back after every optimizer step.

It exists so that a plain DDP script is watched as closely as one with a Session. It steps aside as soon as a Session
counts the steps, and never changes what an optimizer does. Like record.py it is also loaded by file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elasticd.heartbeat.collectives import Collectives
from elasticd.heartbeat.record import HeartbeatWriter


def install_optimizer_hook(writer: HeartbeatWriter, register: Callable[[Any], Any] | None = None) -> Callable[[], None]:
    """Beat at every optimizer step of this process until a Session counts the steps. Returns what removes the hook.

    `register` is torch's register_optimizer_step_post_hook; without it torch is imported. A step is over when an
    optimizer steps again: a script that trains a generator and a discriminator in turn counts its iterations once.
    """
    if register is None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register = register_optimizer_step_post_hook
    first = 0  # the id of the optimizer that began this step
    others: set[int] = set()  # those that stepped after it
    steps = 0
    written = writer.hook_step(Collectives().issued)

    def beat(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal first, steps
        this = id(optimizer)
        if this == first or this in others or not first:
            first = this
            steps += 1
            if others:
                others.clear()
        else:
            others.add(this)
        written(steps)

    handle = register(beat)
    return lambda: handle.remove()
