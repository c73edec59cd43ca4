"""Runs one of PyTorch's own tests: `python -m tests.upstream.one FOLDER MODULE CLASS.TEST elasticd|torch`.

With "elasticd", torch.distributed.run.main is `elasticd run`, and every handler that meets over the network is the
plug-in's; with "torch" nothing is replaced. Exits with 0 if the test has passed, 77 if it skipped itself.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

from tests.etcd import EtcdServers, etcd_servers

ETCD_VARIABLE = "ELASTICD_TEST_UPSTREAM_ETCD"
SITE = Path(__file__).parent / "site"
SKIPPED = 77


def elasticd_run(args: list[str] | None = None) -> None:
    """torch.distributed.run.main: returns at success, and raises what torchrun raises."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    command = [sys.executable, "-m", "elasticd_agent", "run", *(sys.argv[1:] if args is None else args)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode == 2:
        raise ValueError("elasticd run refuses the command line")
    if done.returncode == 1:
        raise ChildFailedError("the script", {0: ProcessFailure(local_rank=0, pid=0, exitcode=1, error_file="")})
    if done.returncode:
        raise RuntimeError(f"elasticd run ended with {done.returncode}")


class EtcdV3:
    """In place of torch's EtcdServer, which speaks etcd's old interface."""

    def __init__(self, **ignored: Any) -> None:
        self._endpoint = os.environ.get(ETCD_VARIABLE, "localhost:2379")

    def start(self, **ignored: Any) -> None: ...

    def stop(self) -> None: ...

    def get_endpoint(self) -> str:
        return self._endpoint


def replace_torchs(etcd: EtcdServers) -> None:
    os.environ[ETCD_VARIABLE] = f"127.0.0.1:{etcd.port}"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path.insert(0, str(SITE))
    importlib.import_module("elasticd_handlers").use()
    vars(importlib.import_module("torch.distributed.run"))["main"] = elasticd_run


def main(folder: Path, module: str, test: str, side: str) -> int:
    vars(importlib.import_module("torch.distributed.elastic.rendezvous.etcd_server"))["EtcdServer"] = EtcdV3
    with contextlib.ExitStack() as stack:
        if side == "elasticd":
            replace_torchs(stack.enter_context(etcd_servers()))
        sys.path.insert(0, str(folder / module).rpartition("/")[0])
        os.chdir(sys.path[0])
        case = unittest.defaultTestLoader.loadTestsFromName(test, importlib.import_module(Path(module).name))
        output = io.StringIO()
        result = unittest.TextTestRunner(stream=output, verbosity=2).run(case)
    print(output.getvalue(), file=sys.stderr)
    return SKIPPED if result.skipped else int(not result.wasSuccessful())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
