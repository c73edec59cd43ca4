"""Ends in another way each time it is started, after saying so without a newline or a flush."""

import atexit
import json
import os
import shutil
import signal
import sys

OUT, ATTEMPT = os.environ["PROBE_OUT"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def in_order_of_attempts():
    if "ELASTICD_HEARTBEAT" in os.environ and ATTEMPT < 6:
        from elasticd.heartbeat import record as beat

        beat.from_environment().step(ATTEMPT + 1)  # progress: elasticd then restarts without waiting
    if ATTEMPT == 0:
        os._exit(3)
    if ATTEMPT == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if ATTEMPT == 2:
        sys.exit(3)
    if ATTEMPT == 3:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    if ATTEMPT == 4:
        sys.exit("said by sys.exit")
    if ATTEMPT == 5 and "ENDS_AGAIN" not in os.environ:
        os.environ["ENDS_AGAIN"] = "1"
        os.execv(sys.executable, [sys.executable, "-u", *sys.argv])
    if ATTEMPT == 5:
        os.abort()
    raise_in_the_end()


def raise_in_the_end():
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def training():
        raise ValueError("the script's own mistake: ü")

    atexit.register(lambda: shutil.copy(os.environ["TORCHELASTIC_ERROR_FILE"], os.path.join(OUT, "error.json")))
    training()


def report():
    import random

    found = {"random": random.random(), "argv": sys.argv, "again": "ENDS_AGAIN" in os.environ}
    found["python path"] = os.environ.get("PYTHONPATH")
    found["launcher's"] = os.environ.get("ELASTICD_LAUNCH", "").startswith("{")
    if ATTEMPT < 2:
        import torch_facts

        found["threads before numpy"] = torch_facts.threads()
        import numpy

        found["blas"] = torch_facts.blas_threads()
        import torch

        found |= {"numpy": numpy.random.rand(), "torch": torch.rand(1).item(), "seed": torch.initial_seed()}
    with open(os.path.join(OUT, f"attempt-{ATTEMPT}"), "a") as file:
        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    os.dup2(os.open(os.path.join(OUT, f"stderr-{ATTEMPT}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    report()
    print(f"attempt {ATTEMPT} on stdout", end=";")
    print(f"attempt {ATTEMPT} on stderr", end=";", file=sys.stderr)
    in_order_of_attempts()
