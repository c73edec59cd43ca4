"""What py-spy and faulthandler write, as threads; and py-spy's errors in words that help."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from elasticd_agent.hangs.collector.stacks import (
    NOT_PERMITTED,
    from_faulthandler,
    from_py_spy,
    py_spy_error_line,
    with_kernel_tids,
)
from elasticd_agent.hangs.stacks import Frame, ThreadStack, digest

PYTHON = "/usr/lib/python3.11"


def spied(tid: int, *functions: str, **more: object) -> dict[str, object]:
    frames = [{"name": name, "filename": "/x/train.py", "line": n} for n, name in enumerate(functions)]
    return {"thread_id": 140_000_000, "os_thread_id": tid, "thread_name": "T", "frames": frames, **more}


def test_py_spy_threads() -> None:
    threads = from_py_spy([spied(9, "other", active=True, owns_gil=True), spied(7, "f", "Net.g", active=False)])
    assert [(thread.tid, thread.state, thread.holds_gil) for thread in threads] == [
        ("9", "active+gil", True),
        ("7", "idle", False),
    ]
    assert threads[1].frames == (Frame("f", "/x/train.py", 0), Frame("Net.g", "/x/train.py", 1))


@pytest.mark.parametrize("said", [[], {}, None, [{}], [{"frames": [{"name": "f"}], "thread_id": 1}]])
def test_py_spy_malformed_output(said: object) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        from_py_spy(said)


@pytest.mark.parametrize("write", [str, hex], ids=["py-spy, Python 3.10", "faulthandler"])
def test_ids_of_glibc_become_the_kernels_and_the_main_thread_is_first(write: Callable[[int], str]) -> None:
    end = threading.Event()
    other, main = threading.Thread(target=end.wait, name="MainThread"), threading.main_thread()
    other.start()
    try:
        assert other.ident and main.ident
        threads = [ThreadStack("MainThread", write(other.ident), ()), ThreadStack("renamed", write(main.ident), ())]
        unknown = ThreadStack("", write(1), ())
        found = with_kernel_tids([unknown, *threads], os.getpid(), os.getpid())
        assert [thread.tid for thread in found] == [str(main.native_id), str(other.native_id), write(1)]
        assert with_kernel_tids(found, os.getpid(), os.getpid()) == found
        assert with_kernel_tids(threads, 2**22 + 1, 2**22 + 1) == tuple(threads)  # no such process
    finally:
        end.set()


def test_faulthandler_script_thread_is_first() -> None:
    text = f"""Current thread 0x00007f0000000001 (most recent call first):
  File "{PYTHON}/threading.py", line 327 in wait
  File "{PYTHON}/threading.py", line 1002 in _bootstrap

Thread 0x00007f0000000002 [python] (most recent call first):
  File "/x/train.py", line 88 in next_batch
  File "/x/train.py", line ??? in <module>

Extension modules: torch._C (total: 1)
"""
    first, second = from_faulthandler(text)
    assert (first.name, [frame.function for frame in first.frames]) == ("python", ["next_batch", "<module>"])
    assert (first.frames[0].line, first.frames[1].line) == (88, 0)
    assert second.frames[0].bare_name == "wait"
    assert from_faulthandler("") == ()
    assert from_faulthandler("Timeout (0:00:10)!\n") == ()


def test_digest_depends_on_places_only() -> None:
    here = [Frame("Net.forward", "/home/a/venv/lib/python3.11/site-packages/net/model.py", 3), Frame("f", "/a/t.py", 1)]
    there = [Frame("forward", "/b/lib/python3.10/dist-packages/net/model.py", 3), Frame("f", "/b/t.py", 1)]
    assert digest(here) == digest(there) != ""
    assert digest(here) != digest([here[0], Frame("f", "/a/t.py", 2)])
    assert digest([]) == ""


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("Permission Denied: Try running again with elevated permissions by going 'sudo env !!'\n", NOT_PERMITTED),
        (
            "Error: Failed to get process\n\nCaused by:\n    0: A\n    1: Permission denied (os error 13)\n",
            NOT_PERMITTED,
        ),
        ("Error: Failed to find python version\n", "py-spy: Failed to find python version"),
        ("Error: No stacks\n\nCaused by:\n    0: A\n    1: B (os error 3)\n", "py-spy: No stacks: B (os error 3)"),
        ("thread 'main' panicked\n", "py-spy: thread 'main' panicked"),
        ("", "py-spy: it failed without a message"),
    ],
)
def test_py_spy_errors_in_one_line(said: str, why: str) -> None:
    assert py_spy_error_line(said) == why
