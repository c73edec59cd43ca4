"""Forks ranks from one process that has imported torch, so that a test's pair of ranks starts in 20 ms and not in 3 s.

Reads one JSON object a line: {"script", "argv", "env", "folder"}. Each becomes a process that runs the script as
`__main__`; its folder gets `out`, `err`, `pid` and, at its end, `code`. It runs no torch operation itself: what it
forks must be able to start threads of its own. At the end of its input it leaves; what it forked is the test's to end.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.distributed.checkpoint",
    "torch.distributed.optim",
    "elasticd.checkpointing.restore",
    "elasticd.session",
)


def run(task: dict[str, Any]) -> int:
    import torch

    os.environ.update(task["env"])
    sys.argv = [task["script"], *task["argv"]]
    torch.default_generator.seed()
    try:
        runpy.run_path(task["script"], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - what python itself does at the top of a script
        traceback.print_exc()
        return 1
    return 0


def worker(task: dict[str, Any]) -> None:
    folder = Path(task["folder"])
    for name, fd in (("out", 1), ("err", 2)):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, fd)
        os.close(file)
    code = run(task)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def watch(task: dict[str, Any]) -> None:
    """Between the zygote and a rank: says who it is and how it ended."""
    pid = os.fork()
    if pid == 0:
        worker(task)
    folder = Path(task["folder"])
    write(folder / "pid", str(pid))
    write(folder / "code", str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    os._exit(0)


def write(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            os.open(os.devnull, os.O_RDONLY)
            watch(json.loads(line))
    # Tidying up torch takes python most of a second of computing, and there is nothing to tidy up.
    os._exit(0)
