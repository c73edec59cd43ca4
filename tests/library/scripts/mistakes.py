"""Every mistake one can make with a session, and what it says; prints them as one JSON object."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

import elasticd

said: dict[str, str] = {}


def attempt(name: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except elasticd.UsageError as error:
        said[name] = str(error)
    else:
        said[name] = "nothing"


def phase(session: elasticd.Session, name: str) -> None:
    with session.phase(name):
        pass


attempt("no decision time", lambda: elasticd.init(decision_timeout=0))
session = elasticd.init()
attempt("restore without attach", session.restore)
model = torch.nn.Linear(2, 2)
attempt("attach a number", lambda: session.attach(number=3))
attempt("attach settings", lambda: session.attach(settings={"lr": 0.1}))
attempt("attach the reserved name", lambda: session.attach(elasticd=model))
session.attach(model=model)
attempt("attach twice", lambda: session.attach(model=model))
attempt("checkpoint without a directory", lambda: session.checkpoint(every=10))
attempt("restore without a directory", session.restore)
attempt("save without a directory", session.save)
attempt("run of a result", lambda: session.run(None))  # type: ignore[arg-type]
attempt("run of a generator", lambda: session.run(lambda: (yield)))
attempt("one object for each rank", lambda: session.attach(per_rank=torch.nn.Linear(1, 1)))  # type: ignore[arg-type]
attempt("unknown phase", lambda: phase(session, "warmup"))
impossible: list[Any] = [0, -1, float("nan"), float("inf"), True, "30s", timedelta(0)]
for timeout in impossible:
    attempt(f"barrier {timeout!r}", lambda timeout=timeout: session.barrier("epoch", timeout))  # type: ignore[misc]
attempt("no name", lambda: session.barrier(3))  # type: ignore[arg-type]
wrong: list[Any] = [0, -3, True, "soon", "0s", 1.5]
for every in wrong:
    attempt(f"every {every!r}", lambda every=every: session.checkpoint(every=every))  # type: ignore[misc]
with tempfile.TemporaryDirectory() as directory:
    attempt("a file", lambda: session.checkpoint(every=1, directory=__file__))
    attempt("keep nothing", lambda: session.checkpoint(every=1, keep=0, directory=directory))
    session.checkpoint(every=1, directory=directory)
    attempt("restore inside run", lambda: session.run(session.restore))
    attempt("another directory", lambda: session.checkpoint(every=1, directory=directory + "2"))
    attempt("no time", lambda: session.checkpoint(every=1, directory=directory, barrier=0))
    session.step()
    attempt("restore after a step", session.restore)
    session.close()
    with elasticd.init() as another:
        warned: list[logging.LogRecord] = []
        logging.getLogger("elasticd").addFilter(lambda record: not warned.append(record))
        another.attach(model=model).restore(directory)
        said["second session"] = " ".join(record.getMessage() for record in warned)
session.close()
attempt("barrier after close", lambda: session.barrier("epoch"))
session.step()
said["step after close"] = warned[-1].getMessage()
sys.stdout.write(json.dumps(said) + "\n")
