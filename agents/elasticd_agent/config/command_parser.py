"""The argument parser of the commands: errors are UsageErrors, which every command reports in one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from elasticd.errors import UsageError


class CommandParser(argparse.ArgumentParser):
    """Options of `elasticd COMMAND`; they cannot be abbreviated."""

    def __init__(self, command: str, description: str, epilog: str = "") -> None:
        super().__init__(prog=f"elasticd {command}", description=description, epilog=epilog, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)
