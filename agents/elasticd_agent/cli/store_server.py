"""`elasticd store`: hosts the c10d store of jobs without an etcd, on a machine that is none of their nodes.

Any node may then be the leader, and any may fail. The store's data is lost when it ends: the nodes continue to train,
and write their round again once it is back.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence

from elasticd.errors import StoreRefused, StoreUnavailable, UsageError
from elasticd_agent.config.command_parser import CommandParser
from elasticd_agent.config.rendezvous_options import DEFAULT_PORTS
from elasticd_agent.store.c10d.store import C10dStore

START_TIMEOUT_S = 120.0
"""torch from a cold image; after a longer wait a restart is better."""
CHECK_INTERVAL_S = 5.0
MAX_UNAVAILABLE_S = 60.0
"""The store restarts its server itself; after so long without success this process ends."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def store(argv: Sequence[str]) -> int:
    """Serve until a signal: 0. 1: the store failed. Raises UsageError."""
    port = build_parser().parse_args(argv).port
    # Awaited, not handled; blocked before any thread could receive one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    made = C10dStore(
        "127.0.0.1",
        port,
        serve=True,
        standalone=True,
        timeout_s=CHECK_INTERVAL_S,
        start_timeout_s=START_TIMEOUT_S,
        log=_log,
    )
    try:
        return _serve_until_signal(made)
    except StoreRefused as refused:
        raise UsageError(str(refused)) from None
    finally:
        made.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve_until_signal(made: C10dStore) -> int:
    made.read("ready")
    options = f"--rdzv-backend c10d --rdzv-endpoint HOST:{made.port} --rdzv-conf is_host=0"
    _log(f"nodes can meet at port {made.port}: {options}")
    answered = time.monotonic()
    while (got := signal.sigtimedwait(_STOP_SIGNALS, CHECK_INTERVAL_S)) is None:
        try:
            made.read("ready")
            answered = time.monotonic()
        except StoreUnavailable as error:
            if time.monotonic() - answered >= MAX_UNAVAILABLE_S:
                _log(f"ends after no answer for {MAX_UNAVAILABLE_S:g} s: {error}")
                return 1
    _log(f"ends on {signal.Signals(got.si_signo).name}")
    return 0


def _log(sentence: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S%z')} elasticd store: {sentence}", file=sys.stderr, flush=True)


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "store",
        "Hosts a c10d store on all addresses of this machine, for jobs without an etcd. It has no "
        "password: every client that reaches the port can stop the jobs (elasticd docs security). "
        "Exit codes: 0 ended by a signal, 1 the store failed, 2 usage.",
    )
    port = DEFAULT_PORTS["c10d"]
    parser.add_argument("--port", type=_parse_port, default=port, metavar="PORT", help=f"where to listen ({port})")
    return parser


def _parse_port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; ports go from 1 to 65535")
    return int(text)
