"""`elasticd store`: hosts the c10d store of jobs whose nodes come and go, where none of them is.

It exists for clusters without an etcd: a small server with a name that stays, beside the nodes, instead of on one of
them. Any node may plan then, and any may die. What is in it is gone when it ends: the nodes train on meanwhile, and
write down again which round they run once it is back. It is no node, decides nothing, and knows no job.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from elasticd.errors import StoreRefused, StoreUnavailable, UsageError
from elasticd_agent.config.rendezvous_options import DEFAULT_PORTS
from elasticd_agent.store.c10d.store import C10dStore

START_TIMEOUT_S = 120.0
"""torch from a cold image; longer, and whoever started this had better start it again."""
CHECK_S = 5.0
UNAVAILABLE_S = 60.0
"""The store is mended by itself; where that does not help for so long, ending does."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def store(argv: Sequence[str]) -> int:
    """Serve until a signal asks for the end: 0. 1: it could not go on. Raises UsageError."""
    port = _parser().parse_args(argv).port
    # Waited for, not handled; blocked before there is a thread that could get one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    made = C10dStore(
        "127.0.0.1", port, serve=True, standalone=True, timeout_s=CHECK_S, start_timeout_s=START_TIMEOUT_S, log=_say
    )
    try:
        return _serve(made)
    except StoreRefused as refused:
        raise UsageError(str(refused)) from None
    finally:
        made.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(made: C10dStore) -> int:
    made.read("ready")
    _say(
        f"jobs can meet at port {made.port}: --rdzv-backend c10d --rdzv-endpoint HOST:{made.port} --rdzv-conf is_host=0"
    )
    answered = time.monotonic()
    while (got := signal.sigtimedwait(_STOP_SIGNALS, CHECK_S)) is None:
        try:
            made.read("ready")
            answered = time.monotonic()
        except StoreUnavailable as error:
            if time.monotonic() - answered >= UNAVAILABLE_S:
                _say(f"it ends, as there has been no answer for {UNAVAILABLE_S:g} s: {error}")
                return 1
    _say(f"it ends, as {signal.Signals(got.si_signo).name} asks")
    return 0


def _say(sentence: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} elasticd store: {sentence}", file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="elasticd store",
        description="Hosts a c10d store on all addresses of this machine, for jobs whose nodes come and go. It has no "
        "password: whoever reaches the port can stop the jobs (docs/security.md). Exit codes: 0 it was asked to end, "
        "1 it could not go on, 2 usage.",
        allow_abbrev=False,
    )
    port = DEFAULT_PORTS["c10d"]
    parser.add_argument(
        "--port", type=_port, default=port, metavar="PORT", help=f"where to listen; {port} if not given"
    )
    return parser


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port nodes can meet at; ports go from 1 to 65535")
    return int(text)
