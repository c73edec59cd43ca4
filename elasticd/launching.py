"""A function run by the supervisor of `elasticd run`, from Python: `elasticd.launch(train, config, nproc=4)`.

The caller pickles the function and its arguments into a private directory and starts `elasticd run` on this module,
which is the workers' script: each loads the function, calls it, and leaves its value, or its error, in that directory.
A function of the caller's `__main__` is found as `multiprocessing` finds it: the worker imports that file under another
name, so a script needs the `if __name__ == "__main__":` around its own call. Where `__main__` has no file, as in a
notebook, the package cloudpickle pickles the function itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing.spawn
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from elasticd.errors import LaunchError, UsageError

WORKER_MODULE = "elasticd.launching"
_PARENT_ONLY_PREPARATION = ("authkey", "log_to_stderr", "log_level", "name", "start_method", "orig_dir")
"""Entries that `multiprocessing` hands to its own children only."""
_END_WITH_CALLER = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "  # PR_SET_PDEATHSIG, SIGTERM
    "os.execv(sys.argv[2], sys.argv[2:]) if os.getppid() == int(sys.argv[1]) else sys.exit(1)"
)
"""Becomes the supervisor, which gets SIGTERM when the caller is killed: nobody else would end the job."""


def launch(function: Callable[..., Any], *args: Any, nproc: int | str = 1, **options: Any) -> dict[int, Any]:
    """Call `function(*args)` in `nproc` workers under the supervisor of `elasticd run`, and wait for them.

    Further keyword arguments are options of `elasticd run`: `max_restarts=0`, `checkpoint_dir="ck"`, `nnodes=2`,
    `standalone=True`. Returns the value of each worker of this node, by its rank; a value has to be picklable. The
    workers' output goes to this process's.

    Raises UsageError for a function that another process cannot load, and LaunchError with the traceback of the rank
    that failed, once the supervisor restarts it no more.
    """
    with tempfile.TemporaryDirectory(prefix="elasticd-launch-") as directory:
        call = Path(directory)
        (call / "call").write_bytes(_pickle_call(function, args))
        flags = [
            word for name, value in {"nproc_per_node": nproc, **options}.items() for word in _flag_words(name, value)
        ]
        code = _run_supervisor([sys.executable, "-m", "elasticd_agent", "run", *flags, "-m", WORKER_MODULE, directory])
        if code:
            raise LaunchError(_failure_message(call, code), exit_code=code)
        return _values_of_last_round(call)


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The call, and the facts by which a worker finds the caller's modules."""
    if getattr(sys.modules["__main__"].__spec__, "name", "") == WORKER_MODULE:
        raise UsageError("elasticd.launch() at the import of a worker: call it below `if __name__ == '__main__':`")
    about = multiprocessing.spawn.get_preparation_data("elasticd")
    preparation = {name: value for name, value in about.items() if name not in _PARENT_ONLY_PREPARATION}
    is_file = "init_main_from_name" in preparation or os.path.isfile(preparation.get("init_main_from_path", ""))
    dumps: Callable[[Any], bytes] = pickle.dumps
    if not is_file:
        preparation.pop("init_main_from_path", None)
        with contextlib.suppress(ImportError):
            dumps = import_module("cloudpickle").dumps
    try:
        if not is_file and function.__module__ == "__main__" and dumps is pickle.dumps:
            raise pickle.PicklingError("it is defined in an interactive session, where this needs cloudpickle")
        return pickle.dumps((preparation, dumps((function, args))))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(f"elasticd.launch(): workers cannot get {function!r} and its arguments: {error}") from None


def _flag_words(name: str, value: Any) -> list[str]:
    """The words of an option; none for None and False."""
    option = f"--{name.replace('_', '-')}"
    if value is None or value is False:
        return []
    return [option] if value is True else [f"{option}={value}"]


def _run_supervisor(command: list[str]) -> int:
    """The exit code of the supervisor. An interrupt is passed on to it and raised once it has ended."""
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", _END_WITH_CALLER, str(os.getpid()), *command])
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise


def _values_of_last_round(call: Path) -> dict[int, Any]:
    """The value of each rank; a rank that ended in a round before may be another one's number now."""
    last = max((int(path.suffixes[0][1:]) for path in call.glob("value.*")), default=0)
    paths = {int(path.suffix[1:]): path for path in call.glob(f"value.{last}.*")}
    return {rank: pickle.loads(paths[rank].read_bytes()) for rank in sorted(paths)}


def _failure_message(call: Path, code: int) -> str:
    """The error of the rank that failed first in the last round, if that had one: it may have ended by a signal."""
    last = max((int(path.suffixes[0][1:]) for kind in ("begun", "error") for path in call.glob(f"{kind}.*")), default=0)
    errors = sorted(call.glob(f"error.{last}.*"), key=lambda path: path.stat().st_mtime_ns)
    if not errors:
        return f"the job has ended with exit code {code}; its log says why"
    rank = errors[0].suffixes[1][1:]
    return f"rank {rank} has failed (exit code {code}):\n\n{errors[0].read_text(encoding='utf-8', errors='replace')}"


def main(directory: Path) -> None:
    """The worker's script."""
    rank = os.environ["RANK"]
    (directory / f"begun.{_round_and_rank(rank)}").touch()
    try:
        preparation, content = pickle.loads((directory / "call").read_bytes())
        multiprocessing.spawn.prepare(preparation)
        function, args = pickle.loads(content)
        value = pickle.dumps(function(*args))
        _write_atomically(directory / f"value.{_round_and_rank(rank)}", value)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            _write_atomically(directory / f"error.{_round_and_rank(rank)}", traceback.format_exc().encode())
        raise


def _round_and_rank(rank: str) -> str:
    """Those of now: a process that stays (`Session.run`) may have begun as another `rank`."""
    return f"{os.environ.get('ELASTICD_ROUND', '0')}.{os.environ.get('RANK', rank)}"


def _write_atomically(path: Path, content: bytes) -> None:
    """Whole or not at all: the worker may be killed."""
    part = path.with_name(f"part-{path.name}")
    part.write_bytes(content)
    part.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
