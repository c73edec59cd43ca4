"""One command line option: its names, its value, its help, and how elasticd treats it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ValueType(Enum):
    """The word for the value on the command line."""

    TEXT = "text"
    INT = "integer"
    FLOAT = "number"
    DURATION = "time"  # 5s, 2m, 1.5h, 500ms; a bare number is seconds
    LIST = "comma-separated list"  # ",," is a comma inside an item
    SWITCH = "switch"  # nothing follows


class Treatment(Enum):
    """The way in which elasticd treats the option."""

    HONORED = "honored"
    NO_EFFECT = "accepted, without effect"
    REFUSED = "refused"  # any value except the default; `help` is the reason


@dataclass(frozen=True, slots=True)
class Flag:
    """One option. `default` is torchrun's, unless `default_reason` says why ours is another."""

    usage: str
    """An option as --help shows it, "-t, --tee STREAMS"; without a word for its value a switch. TIME is a duration."""
    help: str
    value_type: ValueType = ValueType.TEXT
    default: str | int | float | tuple[str, ...] | bool | None = None
    treatment: Treatment = Treatment.HONORED
    choices: tuple[str, ...] | None = None
    has_variable: bool = True
    default_reason: str | None = None
    is_repeatable: bool = False
    is_from_torchrun: bool = True  #: torchrun has it, spelled with dashes and with underscores

    def __post_init__(self) -> None:
        if self.usage.endswith(" TIME"):
            object.__setattr__(self, "value_type", ValueType.DURATION)
        elif " " not in self.usage.replace(", ", ","):
            object.__setattr__(self, "value_type", ValueType.SWITCH)
            object.__setattr__(self, "default", False)

    @property
    def documented_spellings(self) -> tuple[str, ...]:
        """The spellings in help and docs; those with underscores are understood without being repeated everywhere."""
        return tuple(word.rstrip(",") for word in self.usage.split() if word.startswith("-"))

    @property
    def all_spellings(self) -> tuple[str, ...]:
        underscored = f"--{self.dest}"
        return (
            (*self.documented_spellings, underscored)
            if self.is_from_torchrun and underscored not in self.documented_spellings
            else self.documented_spellings
        )

    @property
    def dest(self) -> str:
        """The name argparse would give it: the first long spelling."""
        return self.documented_spellings[-1][2:].replace("-", "_")

    @property
    def variable(self) -> str | None:
        """The PET_ environment variable that stands in for the option when it is not given."""
        return f"PET_{self.dest.upper()}" if self.is_from_torchrun and self.has_variable else None
