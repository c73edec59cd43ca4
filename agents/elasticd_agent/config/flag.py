"""One command line option: its names, its value, its help, and how elasticd treats it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ValueType(Enum):
    """What follows the option on the command line."""

    TEXT = "text"
    INT = "integer"
    FLOAT = "number"
    DURATION = "time"  # 5s, 2m, 1.5h, 500ms; a bare number is seconds
    LIST = "comma-separated list"  # ",," is a comma inside an item
    SWITCH = "switch"  # nothing follows


class Treatment(Enum):
    """What elasticd does with it."""

    HONORED = "honored"
    NO_EFFECT = "accepted, without effect"
    REFUSED = "refused"  # any value but the default; `says` is the sentence


@dataclass(frozen=True, slots=True)
class Flag:
    """One option. `default` is torchrun's, unless `differs` says why ours is another (and `default` is ours)."""

    names: tuple[str, ...]
    value_type: ValueType
    help: str
    default: str | int | float | tuple[str, ...] | bool | None = None
    treatment: Treatment = Treatment.HONORED
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    env: bool = True
    default_reason: str | None = None
    repeatable: bool = False

    @property
    def dest(self) -> str:
        """The name argparse would give it: the first long spelling."""
        long = next(name for name in self.names if name.startswith("--"))
        return long[2:].replace("-", "_")

    @property
    def variable(self) -> str | None:
        """The PET_ environment variable that stands in for the option when it is not given."""
        return f"PET_{self.dest.upper()}" if self.env else None

    @property
    def spellings(self) -> tuple[str, ...]:
        """What help and docs show; the underscore spellings are understood without being repeated everywhere."""
        return tuple(name for name in self.names if "_" not in name)


def both_spellings(dashed: str, *short: str) -> tuple[str, ...]:
    """torchrun spells every option of several words with dashes and with underscores."""
    underscored = "--" + dashed[2:].replace("-", "_")
    return (*short, dashed) if underscored == dashed else (*short, dashed, underscored)
