"""Heartbeats of scripts that do not import elasticd: torch calls the hook after every optimizer step.

So a plain DDP script is observed as closely as one with a Session. The hook writes nothing once a Session counts the
steps, and never changes what an optimizer does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elasticd.heartbeat.collectives import CollectiveCounter
from elasticd.heartbeat.record import HeartbeatWriter


def install_optimizer_hook(writer: HeartbeatWriter, register: Callable[[Any], Any] | None = None) -> Callable[[], None]:
    """Write a heartbeat at every optimizer step until a Session counts the steps. Returns a function that removes the
    hook.

    `register` is torch's register_optimizer_step_post_hook; without it torch is imported. A step is over when an
    optimizer steps again: a script that trains a generator and a discriminator in turn counts its iterations once.
    """
    if register is None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register = register_optimizer_step_post_hook
    first = 0  # the id of the optimizer that began this step
    others: set[int] = set()  # those that stepped after it
    steps = 0
    write = writer.make_step_hook(CollectiveCounter().issued)

    def on_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal first, steps
        stepped = id(optimizer)
        if stepped == first or stepped in others or not first:
            first = stepped
            steps += 1
            if others:
                others.clear()
        else:
            others.add(stepped)
        write(steps)

    handle = register(on_step)
    return lambda: handle.remove()
