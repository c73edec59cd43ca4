"""The command `elasticd`; also `python -m elasticd_agent`, for where it is not on the path."""

from __future__ import annotations

import signal
import sys

from elasticd_agent.system.processes.process import STRAY_SIGNALS, ignore_signal, take_signals


def main() -> int:
    """Returns the exit code. Until the command has its own handlers Ctrl-C ends it without a traceback, and no stray
    signal does."""
    take_signals(STRAY_SIGNALS, ignore_signal)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from elasticd_agent.cli.main import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
