"""A table of plain values becomes a struct, or one sentence: which key, what is wrong with it, what would be right.

It exists because msgspec checks types well but speaks to programmers: here its errors are said in the words of the
file, `job[2].workers: must be a whole number, not text`. Values of secrets and of environments are never repeated.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from elasticd.errors import UsageError
from elasticd_agent.config.quantities import Seconds, Size, decoded, spoken_seconds, spoken_size

S = TypeVar("S", bound=msgspec.Struct)


class KeyWrong(UsageError):
    """`says` of `key`; whoever knows the file puts its name in front."""

    def __init__(self, key: str, says: str) -> None:
        self.key, self.says = printable(key), printable(says)
        super().__init__(f"{self.key}: {self.says}" if key else self.says)

    def inside(self, outer: str) -> KeyWrong:
        return KeyWrong(f"{outer}.{self.key}" if self.key else outer, self.says)


Words = Mapping[type, Mapping[str, str]]
"""By struct: what to say of keys that are not its keys, but that people may well try."""


def decode(table: Mapping[str, Any], kind: type[S], words: Words) -> S:
    """Raises KeyWrong."""
    try:
        return msgspec.convert(table, kind, dec_hook=decoded)
    except msgspec.ValidationError as error:
        raise _rewritten(str(error), table, kind, words) from None
    except RecursionError:
        raise KeyWrong("", "tables and lists are nested too deep") from None


def _rewritten(text: str, table: Mapping[str, Any], kind: type, words: Words) -> KeyWrong:
    found = re.fullmatch(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?", text, re.DOTALL)
    what, path = (found["what"], (found["path"] or "").lstrip(".")) if found else (text, "")
    if found and found["key"]:
        return KeyWrong(path, "every key must be text")
    unknown = re.match(r"Object contains unknown field `(.*)`", what, re.DOTALL)
    missing = re.match(r"Object missing required field `(.*)`", what)
    field = unknown or missing
    if field:
        struct = _struct_at(kind, path)
        key = f"{path}.{field[1]}" if path else field[1]
        return KeyWrong(key, _unknown(field[1], struct, words) if unknown else _missing(field[1], struct))
    if path.endswith("[...]"):  # msgspec does not say of which key
        path, value = _culprit(table, path.removesuffix("[...]"))
    else:
        value = _value_at(table, path)
    return KeyWrong(path, _said(what, path, value, _field_at(kind, path)))


def _unknown(name: str, struct: type | None, words: Words) -> str:
    from difflib import get_close_matches  # only this mistake needs it

    spelled, known = name.replace("-", "_"), words.get(struct, {}) if struct else {}
    if spelled in known:
        return f"is not a key here: {known[spelled]}"
    names = [field.encode_name for field in msgspec.structs.fields(struct)] if struct else []
    near = get_close_matches(spelled[:80], names, n=1)
    listed = f"there are {', '.join(names)}" if len(names) <= 12 else "elasticd config example lists them"
    return f"is not a key; did you mean {near[0]}?" if near else f"is not a key; {listed}"


def _missing(name: str, struct: type | None) -> str:
    meta = meta_of(_field(struct, name)) if struct else None
    example = f"; write it, as in {name} = {meta.examples[0]}" if meta and meta.examples else ""
    return f"is missing{example}"


_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}


def _said(what: str, path: str, value: Any, field: msgspec.structs.FieldInfo | None) -> str:
    hidden = is_secret(path) or isinstance(value, bool) or not isinstance(value, (str, int, float))
    said = "" if hidden else f" {_cut(repr(value))}"
    types = re.match(r"Expected `([^`]*)`(?:, got `([^`]*)`)?", what)
    if types:
        wanted = (
            _choices(field)
            if field and "[" not in path and _has_literal(field.type)
            else [_WORDS.get(word, word) for word in types[1].split(" | ") if word != "null"]
        )
        got = _WORDS.get(types[2] or "", "something else")
        got = str(value).lower() if isinstance(value, bool) and not is_secret(path) else got
        return f"must be {one_of(wanted)}, not {got}{said}{_right(path, value, types[1], field)}"
    if what.startswith("Invalid enum value"):
        names = _choices(field)
        return f"must be {one_of(names)}, not{said or ' this'}" if names else what
    return what


def _right(path: str, value: Any, wanted: str, field: msgspec.structs.FieldInfo | None) -> str:
    name = path.rpartition(".")[2]
    if wanted == "str" and isinstance(value, (int, float)) and not is_secret(path):
        text = written(str(value).lower() if isinstance(value, bool) else str(value))
        return f"; write {text}" if name.endswith("]") else f"; write {name} = {text}"
    if wanted == "object" or _struct_in(field.type if field else None) is not None:
        table = f"[[{name}]]" if wanted == "array" else f"[{name}]" if field and _struct_in(field.type) else ""
        return f"; write {table}" if table else ""
    if wanted == "int" and isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value):
        return f"; write {name} = {value}, without quotes"
    if wanted == "bool" and value in (0, 1, "true", "false"):
        return f"; write {name} = {'true' if value in (1, 'true') else 'false'}"
    if wanted.startswith("array") and isinstance(value, str) and not is_secret(path):
        return f'; write {name} = ["{value}"]' if len(value) <= 60 else f'; write {name} = ["…"]'
    meta = meta_of(field)
    example = meta.examples[0] if meta and meta.examples else written_default(field)
    return f"; write it as in {name} = {example}" if example else ""


def one_of(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def printable(text: str) -> str:
    """`text` in one line, whatever is in it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)


def written_default(field: msgspec.structs.FieldInfo | None) -> str:
    """The default as TOML writes it; "" where there is none."""
    default = None if field is None else field.default
    if default is None or default is msgspec.NODEFAULT or isinstance(default, msgspec.Struct):
        return ""
    return written(default)


def written(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Seconds):
        return f'"{spoken_seconds(value)}"'
    if isinstance(value, Size):
        return f'"{spoken_size(value)}"'
    if isinstance(value, (int, float)):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f" {_bare(k)} = {written(v)}" for k, v in value.items()) + (" }" if value else "}")
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04X}" for c in text) + '"'


def _bare(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else written(key)


def shown(value: Any) -> str:
    """A value in a sentence: as TOML writes it, not too much of it."""
    return _cut(written(value))


def is_secret(path: str) -> bool:
    """May the value of this key not be repeated in a sentence?"""
    return re.search(r"(^|\.)env(\.|$)|passw|token|secret|(^|[._])key$", path) is not None


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"


# ---- finding one's way


def _steps(path: str) -> list[str | int]:
    return [int(number) if number else name for name, number in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path)]


def _value_at(table: Any, path: str) -> Any:
    for step in _steps(path):
        try:
            table = table[step]
        except (KeyError, IndexError, TypeError):
            return None
    return table


def _culprit(table: Mapping[str, Any], path: str) -> tuple[str, Any]:
    values = _value_at(table, path)
    for key, value in values.items() if isinstance(values, dict) else ():
        if not isinstance(value, str):
            return f"{path}.{key}", value
    return path, None


def _struct_at(kind: Any, path: str) -> type | None:
    """The struct whose keys stand at `path`."""
    for step in _steps(path):
        struct = _struct_in(kind)
        field = None if struct is None or isinstance(step, int) else _field(struct, step)
        kind = kind if isinstance(step, int) else None if field is None else field.type
    return _struct_in(kind)


def _field_at(kind: Any, path: str) -> msgspec.structs.FieldInfo | None:
    names = [step for step in _steps(path) if isinstance(step, str)]
    struct = _struct_at(kind, ".".join(names[:-1])) if names else None
    return None if struct is None else _field(struct, names[-1])


def _field(struct: type, name: str) -> msgspec.structs.FieldInfo | None:
    return next((field for field in msgspec.structs.fields(struct) if field.encode_name == name), None)


def _struct_in(kind: Any) -> type | None:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next(filter(None, map(_struct_in, typing.get_args(kind))), None)


def meta_of(field: msgspec.structs.FieldInfo | None) -> msgspec.Meta | None:
    if field is None:
        return None
    return next((part for part in typing.get_args(field.type)[1:] if isinstance(part, msgspec.Meta)), None)


def _has_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is typing.Literal or any(map(_has_literal, typing.get_args(kind)))


def _choices(field: msgspec.structs.FieldInfo | None) -> list[str]:
    def inside(kind: Any) -> list[str]:
        if typing.get_origin(kind) is typing.Literal:
            return [str(choice) for choice in typing.get_args(kind)]
        if kind is int:
            return ["a whole number"]
        return [name for part in typing.get_args(kind) for name in inside(part)]

    return [] if field is None else inside(field.type)
