"""TOML and JSON parsed into plain values, or one sentence that says where the error is.

Sizes and depths are bounded, and a key given twice is refused.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from elasticd.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FileFormat = Literal["toml", "json"]

MAX_JOB_FILE_BYTES = 64 * 1024
"""Bytes. A job file is a page; it is kept in the store for as long as the job is remembered."""
MAX_NESTING_DEPTH = 16
"""Tables and lists inside each other: far above what any key needs, far below Python's recursion limit."""


class _DocumentError(ValueError):
    """A defect of the text, as the end of a sentence."""


def parse(data: bytes, kind: FileFormat, where: str, max_bytes: int = MAX_JOB_FILE_BYTES) -> dict[str, Any]:
    """The table `data` holds. `where` is what the sentence begins with. Raises UsageError, and nothing else."""
    if len(data) > max_bytes:
        raise UsageError(f"{where}: is longer than the {max_bytes} bytes that are read; it is probably the wrong file")
    try:
        text = data.decode("utf-8-sig")
        table = _PARSERS[kind](text)
        _check_values(table, 0)
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: is not text: byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise UsageError(
            f"{where}: tables and lists are nested too deep; {MAX_NESTING_DEPTH} levels are understood"
        ) from None
    except _DocumentError as error:
        raise UsageError(f"{where}: {error}") from None
    except ValueError as error:  # the parsers' own
        raise UsageError(f"{where}: is not {kind.upper()}: {_describe_parse_error(error)}") from None
    if not isinstance(table, dict):
        given = "a list" if isinstance(table, list) else "nothing" if table is None else "a single value"
        raise UsageError(f"{where}: must be a table of keys and values, not {given}")
    return table


def format_of(name: str) -> FileFormat:
    """The format that a file's name tells; TOML if none. Raises UsageError for YAML."""
    if name.endswith((".yaml", ".yml")):
        raise UsageError(f"{name}: YAML is not understood; write TOML, as elasticd config example --job prints it")
    return "json" if name.endswith(".json") else "toml"


def _describe_parse_error(error: ValueError) -> str:
    text = _one_line(error)
    if text.startswith("Cannot overwrite"):  # tomllib of a key, as of a table, that is there already
        return f"a key is given twice{text[text.find(' (') :] if ' (' in text else ''}; keep one"
    return "a number has far too many digits" if "int_max_str_digits" in text else text


def _one_line(error: object) -> str:
    text = " ".join(str(error).split())[:200]
    return "".join(c if c.isprintable() else "?" for c in text)


def _check_values(value: Any, depth: int) -> None:
    if depth > MAX_NESTING_DEPTH:
        raise _DocumentError(f"tables and lists are nested too deep; {MAX_NESTING_DEPTH} levels are understood")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_text(key)
            _check_values(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check_values(inner, depth + 1)
    elif isinstance(value, str):
        _check_text(value)


def _check_text(text: str) -> None:
    if "\0" in text:
        raise _DocumentError(f"{text[:40]!r} holds a zero byte, which no file name, argument or variable can")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _DocumentError(f"{text[:40]!r} holds half a character (a lone surrogate)") from None


# ---- each language

_TOML_STRING_OR_COMMENT = re.compile(
    r'''"""(?:[^\\]|\\.)*?(?:"{3,5}|\Z)|\'{3}.*?(?:\'{3,5}|\Z)|"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?|\#[^\n]*''', re.DOTALL
)
"""Strings and comments. One without an end counts, too, so that the search takes time in proportion to the text."""


def _parse_toml(text: str) -> Any:
    # tomllib keeps each prefix of a dotted key: those of 30,000 parts are 3 GB.
    keys = re.split(r"[^\w. \t-]", _TOML_STRING_OR_COMMENT.sub("x", text))
    if any(key.count(".") > MAX_NESTING_DEPTH for key in keys):
        raise _DocumentError(f"tables and lists are nested too deep; {MAX_NESTING_DEPTH} levels are understood")
    return tomllib.loads(text)


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise _DocumentError(f"{_one_line(key)}: is given twice; keep one")
        table[key] = value
    return table


def _refuse_constant(name: str) -> Any:
    raise _DocumentError(f"{name} is not a number JSON knows")


_PARSERS: Mapping[FileFormat, Callable[[str], Any]] = {
    "toml": _parse_toml,
    "json": partial(json.loads, object_pairs_hook=_refuse_repeated_keys, parse_constant=_refuse_constant),
}
