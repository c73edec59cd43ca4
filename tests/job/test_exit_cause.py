"""Whose fault a worker's last words say it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd_agent.job.exit_cause import (
    describe_exit,
    describe_peer_loss,
    describe_primary_exception,
    follows_peer_failure,
    has_external_cause,
    is_user_error,
    repeat_key,
    shareable_error,
)
from elasticd_agent.model.messages import ExitReport, ExitStatus, WorkerExited
from tests.library.fake_recorders import C10D

# As torch 2.13 raised it in a survivor whose gloo peer was killed.
GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. "
    "This is typically caused by a remote worker crashing."
)


def ended(code: int, words: ExitReport | None) -> WorkerExited:
    return WorkerExited(1, 0, 0, 0, ExitStatus.from_returncode(code), words, 0.0)


def out_of_memory() -> WorkerExited:
    return replace(ended(-9, None), status=ExitStatus(None, 9, out_of_memory=True))


def raised(type_: str, message: str = "", bases: tuple[str, ...] = (), traceback: str = "Traceback …") -> WorkerExited:
    return ended(1, ExitReport("exception", type_, message, traceback, bases=bases))


def imports(*files: str) -> str:
    """The traceback of an import statement in the last of these files."""
    lines = (f'  File "{file}", line 1, in <module>\n    import x\n' for file in files)
    return f"Traceback (most recent call last):\n{''.join(lines)}ImportError: x"


IMPORT_ERROR = ("ImportError", "Exception", "BaseException")
LIBRARY = "/venv/lib/python3.12/site-packages/lib/__init__.py"
CHAINED = """Traceback (most recent call last):
  File "/job/data.py", line 3, in load
FileNotFoundError: [Errno 2] No such file or directory: '/data/train'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/job/train.py", line 9, in <module>
RuntimeError: no data
"""


@pytest.mark.parametrize(
    ("exit", "is_mistake", "is_victim"),
    [
        (raised("ImportError", "no module named x"), "ImportError", False),
        (raised("mine.ConfigError", "bad"), "mine.ConfigError", False),
        (raised("RuntimeError", "mat1 and mat2 shapes cannot be multiplied"), "RuntimeError", False),
        (raised("RuntimeError", GLOO), None, True),
        (raised("RuntimeError", "Application timeout caused pair closure"), None, True),
        (raised("RuntimeError", "NCCL error in: ProcessGroupNCCL.cpp:1"), None, True),
        (raised("RuntimeError", "CUDA error: uncorrectable ECC error encountered"), None, True),
        (raised("torch.AcceleratorError", "CUDA error: device-side assert"), None, True),
        (raised("torch.distributed.DistBackendError"), None, True),
        (raised(f"{C10D}.DistStoreError"), None, True),
        (raised("elasticd.errors.DecisionTimeout"), None, True),
        (raised("elasticd.errors.BarrierTimeout", "", ("elasticd.errors.ElasticdError", "Exception")), None, True),
        (raised("ConnectionResetError"), None, True),
        (raised("http.client.RemoteDisconnected", "", ("ConnectionResetError", "ConnectionError")), None, True),
        (raised("torch.OutOfMemoryError"), None, True),
        (raised("torch.cuda.OutOfMemoryError"), None, True),
        (raised("KeyboardInterrupt"), None, True),
        (raised("elasticd.errors.ElasticdError", "on rank 0: OSError: [Errno 20] Not a directory"), None, True),
        (raised("elasticd.errors.ElasticdError", "on rank 1"), "elasticd.errors.ElasticdError", False),
        (ended(2, ExitReport("exit", "SystemExit", "2", "")), "SystemExit", False),
        (ended(3, ExitReport("exit", "SystemExit", "3", "")), None, False),
        (ended(-9, None), None, False),
        (ended(3, None), None, False),
        (ended(-6, ExitReport("exception", "ValueError", "", "")), None, False),
    ],
)
def test_shared_error_and_secondary_failure(exit: WorkerExited, is_mistake: str | None, is_victim: bool) -> None:
    """Whose fault."""
    assert shareable_error(exit) == is_mistake
    assert has_external_cause(exit) is is_victim


@pytest.mark.parametrize(
    ("exit", "kind"),
    [
        (raised("SyntaxError", "invalid syntax"), "user"),
        (raised("IndentationError", "unexpected indent", ("SyntaxError", "Exception")), "user"),
        (raised("NameError", "name 'x' is not defined"), "user"),
        (raised("UnboundLocalError", "x", ("NameError", "Exception")), "user"),
        (raised("NameError", "x", (), CHAINED.replace("RuntimeError: no data", "NameError: x")), "user"),
        (raised("ModuleNotFoundError", "No module named 'x'", IMPORT_ERROR, imports("/job/train.py")), "user"),
        (raised("ModuleNotFoundError", "No module named 'x'", IMPORT_ERROR, imports(LIBRARY, "/job/x.py")), "user"),
        (raised("ImportError", "cannot import name 'a' from 'b'", (), imports("/job/train.py")), "user"),
        (ended(2, ExitReport("exit", "SystemExit", "2", "")), "user"),
        (
            raised("ModuleNotFoundError", "No module named 'x'", IMPORT_ERROR, imports("/job/train.py", LIBRARY)),
            "shared",
        ),
        (raised("ImportError", "undefined symbol: f", (), imports("/job/train.py")), "shared"),
        (raised("ValueError", "world size 4, not 2"), "shared"),
        (raised("KeyError", "'lr'"), "shared"),
        (raised("RuntimeError", "mat1 and mat2 shapes cannot be multiplied"), "shared"),
        (raised("AssertionError"), "shared"),
        (raised("OSError", "[Errno 5] Input/output error"), "environment"),
        (raised("FileNotFoundError", "[Errno 2]", ("OSError", "Exception")), "environment"),
        (raised("PermissionError", "[Errno 13]", ("OSError",)), "environment"),
        (raised("socket.gaierror", "[Errno -3] Temporary failure in name resolution", ("OSError",)), "environment"),
        (raised("urllib.error.HTTPError", "HTTP Error 503", ("urllib.error.URLError", "OSError")), "environment"),
        (raised("requests.exceptions.HTTPError", "429", ("requests.exceptions.RequestException",)), "environment"),
        (raised("httpx.ConnectError", "[Errno -2] Name or service not known"), "environment"),
        (raised("botocore.exceptions.ClientError", "SlowDown"), "environment"),
        (raised("job.FetchError", "no data", ("urllib3.exceptions.HTTPError",)), "environment"),
        (raised("subprocess.CalledProcessError", "exit status 1"), "environment"),
        (raised("EOFError", "Ran out of input"), "environment"),
        (raised("RuntimeError", "no data", ("Exception",), CHAINED), "environment"),
        (raised("RuntimeError", "No CUDA GPUs are available"), "environment"),
        (raised("RuntimeError", "CUDA driver initialization failed, you might not have a CUDA gpu."), "environment"),
        (raised("RuntimeError", "Unexpected error from cudaGetDeviceCount(). Error 802"), "environment"),
        (raised("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed."), "environment"),
        (raised("ImportError", "libcuda.so.1: cannot open shared object file"), "environment"),
        (raised("torch.OutOfMemoryError", "CUDA out of memory"), "environment"),
        (ended(1, ExitReport("exit", "SystemExit", "1", "")), "environment"),
        (ended(-6, ExitReport("exception", "NameError", "x", "")), "environment"),
        (ended(-9, None), "environment"),
    ],
)
def test_which_errors_a_restart_may_mend(exit: WorkerExited, kind: str) -> None:
    """ "user": none; "shared": the script's if it comes twice; "environment": any."""
    error = shareable_error(exit)
    assert (error is not None) is (kind != "environment")
    if error is not None:
        assert is_user_error(exit) is (kind == "user")


@pytest.mark.parametrize(
    ("exit", "shared", "key"),
    [
        (raised("ValueError", "bad\nmore"), True, "exited with code 1 (ValueError: bad)"),
        (raised("ValueError", "bad"), False, "a rank exited with code 1 (ValueError: bad)"),
        (
            raised("TypeError", "in <Hook at 0x7f2131350>"),
            False,
            "a rank exited with code 1 (TypeError: in <Hook at …>)",
        ),
        (raised("OSError", "worker (pid 71) has gone"), True, "exited with code 1 (OSError: worker (pid …) has gone)"),
        (raised("OSError", "(pid(s) 7, 81) have gone"), True, "exited with code 1 (OSError: (pid(s) …) have gone)"),
        (ended(-11, None), False, "a rank was killed by SIGSEGV"),
        (ended(-9, None), False, ""),
        (ended(-15, None), False, ""),
        (out_of_memory(), False, "a rank was killed by SIGKILL (out of memory)"),
        (raised("ConnectionResetError"), False, ""),
        (raised("torch.OutOfMemoryError", "Tried to allocate 2.00 GiB"), False, "torch.OutOfMemoryError"),
        (raised("MemoryError"), False, ""),
        (raised("elasticd.errors.MissedCall", "has waited for 2 s"), False, "elasticd.errors.MissedCall"),
        (raised("elasticd.errors.StateDiffers", "on rank 0: x"), False, "elasticd.errors.StateDiffers"),
    ],
)
def test_repeat_key(exit: WorkerExited, shared: bool, key: str) -> None:
    assert repeat_key(exit, shared=shared) == key


@pytest.mark.parametrize(
    ("exit", "lost_a_peer"),
    [
        (raised("RuntimeError", GLOO), True),
        (raised("RuntimeError", "[/gloo/transport/tcp/pair.cc:537] Connection reset by peer"), True),
        (raised("DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed."), True),
        (raised("DistNetworkError", "failed to send, sent 0 bytes"), True),  # torch 2.6
        (raised("ConnectionResetError"), True),
        (raised("http.client.RemoteDisconnected", "", ("ConnectionResetError", "ConnectionError")), True),
        (raised("BrokenPipeError"), True),
        (raised("DistBackendError", "NCCL error: remote process exited or there was a network error"), True),
        (raised("elasticd.errors.ElasticdError", "on rank 0: OSError: [Errno 20] Not a directory"), True),
        # nobody has gone, so nobody's end is to be heard of
        (raised("RuntimeError", "[/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 30000ms"), False),
        (raised("RuntimeError", "Application timeout caused pair closure"), False),
        (raised("elasticd.errors.BarrierTimeout"), False),
        (raised("ConnectionRefusedError"), False),
        (raised("torch.OutOfMemoryError"), False),
        # a script's own
        (raised("ValueError", "Connection closed by peer"), False),
        (ended(1, ExitReport("exit", "SystemExit", "1", "")), False),
        (ended(-9, None), False),
        (ended(3, None), False),
    ],
)
def test_may_be_secondary(exit: WorkerExited, lost_a_peer: bool) -> None:
    """Who fell with a peer."""
    assert follows_peer_failure(exit) is lost_a_peer


@pytest.mark.parametrize(
    ("exit", "why"),
    [
        (raised("RuntimeError", GLOO), "lost its peers"),
        (raised("torch.distributed.DistBackendError", "NCCL error"), "lost its peers"),
        (raised("elasticd.errors.BarrierTimeout"), "lost its peers"),
        (raised("ConnectionResetError"), "lost a connection"),
        (raised("TimeoutError"), "lost a connection"),
        (raised("elasticd.errors.ElasticdError", "on rank 0: OSError: full"), "failed with rank 0"),
        (raised("MemoryError"), ""),
        (raised("torch.OutOfMemoryError", "CUDA out of memory"), ""),
        (raised("torch.AcceleratorError", "CUDA error: device-side assert"), ""),
        (raised("RuntimeError", "CUDA error: an illegal memory access"), ""),
    ],
)
def test_describe_peer_loss(exit: WorkerExited, why: str) -> None:
    """A rank that was out of memory was told of as one that had lost its peers."""
    assert has_external_cause(exit)
    assert describe_peer_loss(exit) == why


@pytest.mark.parametrize(
    ("exit", "what"),
    [
        (raised("KeyError", "'x'\nmore"), "raised KeyError: 'x'"),
        (raised("torch.OutOfMemoryError", "CUDA out of memory"), "raised torch.OutOfMemoryError: CUDA out of memory"),
        (raised("RuntimeError", GLOO), ""),
        (raised("TimeoutError"), ""),
        (ended(3, ExitReport("exit", "SystemExit", "3", "")), ""),
    ],
)
def test_describe_exception_before_the_exit(exit: WorkerExited, what: str) -> None:
    """What a rank that has not ended ends by."""
    assert exit.exit_report is not None
    assert describe_primary_exception(exit.exit_report) == what


def test_an_exit_in_words() -> None:
    assert describe_exit(ended(-9, None)) == "was killed by SIGKILL"
    assert describe_exit(ended(-63, None)) == "was killed by signal 63"
    assert describe_exit(ended(2, ExitReport("exit", "SystemExit", "2", ""))) == "exited with code 2"
    assert describe_exit(raised("KeyError", "'x'\nmore")) == "exited with code 1 (KeyError: 'x')"
    other_model = "Error(s) in loading state_dict for Linear:\n\tsize mismatch for weight: (4, 4) and (8, 4)\n\tmore"
    assert "state_dict for Linear: size mismatch for weight: (4, 4) and (8, 4))" in describe_exit(
        raised("X", other_model)
    )
    loader = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\nValueError: x"
    )
    failed = ended(1, ExitReport("exception", "ValueError", loader, f"Traceback …\nValueError: {loader}"))
    assert describe_exit(failed).endswith("DataLoader worker process 0. ValueError: x)")
    assert describe_exit(raised("AssertionError")) == "exited with code 1 (AssertionError)"
    assert len(describe_exit(raised("ValueError", "x" * 1000))) < 200
    status = "rank 1 (step 17, phase eval, reported in the last 1.3 s)"
    missing = "barrier 'epoch': 3 of 4 ranks are missing: " + status * 3
    assert missing in describe_exit(raised("elasticd.errors.BarrierTimeout", missing))
    assert len(describe_exit(raised("elasticd.errors.BarrierTimeout", "x" * 1000))) < 510
