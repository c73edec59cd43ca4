"""Our table of torchrun's options against the installed torch: a flag that is new, gone or different turns this red."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest

from docs.generate import options
from elasticd.errors import UsageError
from elasticd_agent.config.elasticd_flags import ELASTICD_FLAGS
from elasticd_agent.config.flag import Flag, ValueType
from elasticd_agent.config.run_options import build_parser
from elasticd_agent.config.torchrun_flags import TORCHRUN_FLAGS

ROOT = Path(__file__).parents[2]


TORCH = tuple(map(int, re.findall("[0-9]+", importlib.metadata.version("torch"))[:2]))
NEWER = {"log_line_prefix_template", "print_completion"}
"""Options that torch 2.13 does not have; the table is that of the newest torch."""


same_table = pytest.mark.skipif(TORCH < (2, 13), reason="the table is that of torch 2.13 and newer")


class _Refused(Exception):
    pass


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


@pytest.fixture(autouse=True)
def no_pet_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


def theirs() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    return parser


def described(parser: argparse.ArgumentParser) -> dict[str, tuple[Any, ...]]:
    """Everything about an option that a command line can tell apart."""
    return {
        action.dest: (
            frozenset(action.option_strings),
            "nothing" if action.nargs == 0 else action.nargs or "one",
            list(action.choices) if action.choices else None,
            list(action.default) if isinstance(action.default, (tuple, list)) else action.default,
        )
        for action in parser._actions
    }


@same_table
def test_every_option_of_torchrun_is_in_the_table_as_it_is_there() -> None:
    upstream, ours = described(theirs()), described(build_parser({}))
    own = {flag.dest for flag in ELASTICD_FLAGS}
    assert set(upstream) <= set(ours) - own, "torchrun's options changed: adapt torchrun_flags.py, then `make docs`"
    assert TORCH < (2, 13) or set(ours) - own - set(upstream) <= NEWER, "torchrun has given up an option"
    differs = {flag.dest for flag in TORCHRUN_FLAGS if flag.default_reason}
    upstream.pop("print_completion", None)  # its choices are those of the shtab that is installed
    for dest, wanted in upstream.items():
        if dest in differs:
            assert ours[dest][:3] == wanted[:3], dest
            assert ours[dest][3] != wanted[3], f"{dest} no longer differs from torchrun"
        else:
            assert ours[dest] == wanted, dest


def test_none_of_our_own_options_is_torchruns() -> None:
    upstream = {name for names, *_ in described(theirs()).values() for name in names}
    assert not upstream & {name for flag in ELASTICD_FLAGS for name in flag.all_spellings}


SAMPLES = {
    ValueType.TEXT: ["fork", ""],
    ValueType.INT: ["7", "-1", "nonsense"],
    ValueType.FLOAT: ["0.5", "nonsense"],
    ValueType.LIST: ["a,,b,c", ""],
    ValueType.SWITCH: ["1", "0", "2", "nonsense"],
}


@same_table
@pytest.mark.parametrize("flag", TORCHRUN_FLAGS, ids=lambda flag: flag.dest)
def test_its_variable_means_what_it_means_to_torchrun(flag: Flag, monkeypatch: pytest.MonkeyPatch) -> None:
    if flag.dest not in described(theirs()):
        pytest.skip(f"torch {'.'.join(map(str, TORCH))} has no such option")
    for value in SAMPLES[flag.value_type]:
        name = f"PET_{flag.dest.upper()}"
        monkeypatch.setenv(name, value)
        try:
            wanted: Any = getattr(theirs().parse_args(["train.py"]), flag.dest)
        except (_Refused, ValueError):
            with pytest.raises(UsageError, match=f"{name}='{value}' must be "):
                build_parser(os.environ)
            continue
        if flag.choices and flag.has_variable and value not in flag.choices:
            with pytest.raises(UsageError, match="must be one of"):  # torchrun does not look at it
                build_parser(os.environ)
            continue
        got = getattr(build_parser(os.environ).parse_args(["train.py"]), flag.dest)
        if not (flag.default_reason and flag.variable not in os.environ):
            assert (list(got) if isinstance(got, tuple) else got) == wanted, (name, value)


def _meaning(parser: argparse.ArgumentParser, option: str) -> str:
    """Which option an abbreviation stands for: by what changes, or by what the complaint about the value names."""
    before = vars(parser.parse_args(["train.py"]))
    try:
        after = vars(parser.parse_known_args([f"{option}=@", "train.py"])[0])
    except (_Refused, UsageError) as error:
        return str(error).replace("'@'", "").split(": ")[0 if "argument" in str(error) else 1]
    return next(name for name in after if after[name] != before[name])


@same_table
def test_abbreviations_stand_for_what_they_stand_for_in_torchrun() -> None:
    upstream, ours = theirs(), build_parser({})
    names = {name for names, *_ in described(upstream).values() for name in names if name.startswith("--")}
    for prefix in sorted({name[:end] for name in names for end in range(3, len(name) + 1)}):
        if prefix not in {name for flag in ELASTICD_FLAGS for name in flag.all_spellings}:
            here, there = _meaning(ours, prefix), _meaning(upstream, prefix)
            # What is one option's to an older torch may be two options' to the newest.
            assert here == there or ("could match" in here and TORCH < (2, 14)), prefix


def test_our_own_options_cannot_be_abbreviated() -> None:
    upstream = {name for flag in TORCHRUN_FLAGS for name in flag.all_spellings}
    short = [name[:-1] for flag in ELASTICD_FLAGS for name in flag.all_spellings]
    ours = [prefix for prefix in short if not any(name.startswith(prefix) for name in upstream)]
    assert len(ours) >= len(ELASTICD_FLAGS) - 2
    for prefix in ours:
        assert build_parser({}).parse_known_args([prefix, "train.py"])[1] == [prefix]


COMMANDS = [
    ["train.py"],
    ["train.py", "--lr", "0.1", "--nproc-per-node", "9"],
    ["--nproc-per-node=4", "train.py", "-m", "x"],
    ["--nproc_per_node", "4", "-m", "pkg.train", "--", "a"],
    ["-m", "--no_python", "x"],
    ["-r3", "-t", "0:1,1:2", "train.py"],
    ["--", "train.py", "--flag"],
    ["train.py", "--", "--flag"],
    ["--local-ranks-filter", "0,1", "--master-port", "-5", "train.py", ""],
    ["--duplicate-stdout-filters", "a,,b,c", "--standalone", "train with space.py", "ü"],
]


@same_table
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_command_lines_are_cut_into_the_same_pieces(command: list[str]) -> None:
    wanted = vars(theirs().parse_args(command))
    got = vars(build_parser({}).parse_args(command))
    for dest in wanted.keys() - {flag.dest for flag in TORCHRUN_FLAGS if flag.default_reason}:
        assert (list(got[dest]) if isinstance(got[dest], tuple) else got[dest]) == wanted[dest], dest


def test_the_page_says_what_the_table_says() -> None:
    assert (ROOT / "docs" / "torchrun.md").read_text() == options.page(), "make docs"
