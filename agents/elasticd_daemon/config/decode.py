"""A table of plain values decoded into a struct, or one sentence with the key, the error and its correction.

msgspec checks the types; its errors are translated into the words of the file. Values of secrets and of environments
are never repeated.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from elasticd.errors import UsageError
from elasticd_agent.config.quantities import Seconds, Size, decode_quantity, format_size
from elasticd_agent.model.phrases import did_you_mean, listing
from elasticd_agent.system.durations import setting_text

S = TypeVar("S", bound=msgspec.Struct)


class ConfigError(UsageError):
    """`problem` of `key`, before the reader of the file adds its name."""

    def __init__(self, key: str, says: str) -> None:
        self.key = printable(key)
        self.problem = printable(says)
        super().__init__(f"{self.key}: {self.problem}" if key else self.problem)

    @classmethod
    def of(cls, error: UsageError) -> ConfigError:
        """An error whose sentence begins with the key, as Policy's do."""
        key, _, problem = str(error).partition(" ")
        return cls(key, problem)


KeyHints = Mapping[type, Mapping[str, str]]
"""Words for each struct about keys that are not its keys, but that people may well try."""


def decode(table: Mapping[str, Any], kind: type[S], hints: KeyHints) -> S:
    """Raises ConfigError."""
    try:
        return msgspec.convert(table, kind, dec_hook=decode_quantity)
    except msgspec.ValidationError as error:
        raise _translate(str(error), table, kind, hints) from None
    except RecursionError:
        raise ConfigError("", "tables and lists are nested too deep") from None


def _translate(text: str, table: Mapping[str, Any], kind: type, words: KeyHints) -> ConfigError:
    match = re.fullmatch(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?", text, re.DOTALL)
    what, path = (match["what"], (match["path"] or "").lstrip(".")) if match else (text, "")
    if match and match["key"]:
        return ConfigError(path, "every key must be text")
    unknown = re.match(r"Object contains unknown field `(.*)`", what, re.DOTALL)
    missing = re.match(r"Object missing required field `(.*)`", what)
    field = unknown or missing
    if field:
        struct = _struct_at(kind, path)
        key = f"{path}.{field[1]}" if path else field[1]
        return ConfigError(key, _unknown_key(field[1], struct, words) if unknown else _missing_key(field[1], struct))
    if path.endswith("[...]"):  # msgspec does not say of which key
        path, value = _bad_entry(table, path.removesuffix("[...]"))
    else:
        value = _value_at(table, path)
    return ConfigError(path, _type_problem(what, path, value, _field_at(kind, path)))


def _unknown_key(name: str, struct: type | None, words: KeyHints) -> str:
    spelled, known = name.replace("-", "_"), words.get(struct, {}) if struct else {}
    if spelled in known:
        return f"is not a key here: {known[spelled]}"
    names = [field.encode_name for field in msgspec.structs.fields(struct)] if struct else []
    listed = f"there are {', '.join(names)}" if len(names) <= 12 else "elasticd config example lists them"
    return f"is not a key; {did_you_mean(spelled, names, listed)}"


def _missing_key(name: str, struct: type | None) -> str:
    example = meta_of(_field(struct, name)).example if struct else ""
    return f"is missing; write it, as in {name} = {example}" if example else "is missing"


_TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}


def _type_problem(what: str, path: str, value: Any, field: msgspec.structs.FieldInfo | None) -> str:
    hidden = is_secret(path) or isinstance(value, bool) or not isinstance(value, (str, int, float))
    shown = "" if hidden else f" {_cut(repr(value))}"
    types = re.match(r"Expected `([^`]*)`(?:, got `([^`]*)`)?", what)
    if types:
        kinds = (
            _choices(field)
            if field and "[" not in path and _has_literal(field.type)
            else [_TYPE_NAMES.get(word, word) for word in types[1].split(" | ") if word != "null"]
        )
        got = _TYPE_NAMES.get(types[2] or "", "something else")
        got = str(value).lower() if isinstance(value, bool) and not is_secret(path) else got
        return (
            f"must be {listing(kinds, conjunction='or')}, not {got}{shown}{_correction(path, value, types[1], field)}"
        )
    if what.startswith("Invalid enum value"):
        names = _choices(field)
        return f"must be {listing(names, conjunction='or')}, not{shown or ' this'}" if names else what
    return what


def _correction(path: str, value: Any, expected: str, field: msgspec.structs.FieldInfo | None) -> str:
    name = path.rpartition(".")[2]
    struct = struct_in(field.type) if field else None
    if expected == "object" or struct is not None:
        return f"; write [{name}]" if struct is not None else ""
    literal = _literal(name, value, expected) if not is_secret(path) or expected in ("int", "bool") else ""
    if literal:
        return f"; write {literal}"
    example = meta_of(field).example or default_toml(field)
    return f"; write it as in {name} = {example}" if example else ""


def _literal(name: str, value: Any, expected: str) -> str:
    """The value probably intended, in the expected type; "" if there is none."""
    if expected == "str" and isinstance(value, (int, float)):
        text = to_toml(str(value).lower() if isinstance(value, bool) else str(value))
        return text if name.endswith("]") else f"{name} = {text}"
    if expected == "int" and isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value):
        return f"{name} = {value}, without quotes"
    if expected == "bool" and value in (0, 1, "true", "false"):
        return f"{name} = {'true' if value in (1, 'true') else 'false'}"
    if expected.startswith("array") and isinstance(value, str):
        return f'{name} = ["{value}"]' if len(value) <= 60 else f'{name} = ["…"]'
    return ""


def printable(text: str) -> str:
    """`text` in one line, whatever is in it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)


def default_toml(field: msgspec.structs.FieldInfo | None) -> str:
    """The default as TOML writes it; "" where there is none."""
    default = None if field is None else field.default
    if default is None or default is msgspec.NODEFAULT or isinstance(default, msgspec.Struct):
        return ""
    return to_toml(default)


def to_toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Seconds):
        return f'"{setting_text(value)}"'
    if isinstance(value, Size):
        return f'"{format_size(value)}"'
    if isinstance(value, (int, float)):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(to_toml, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f" {_toml_key(k)} = {to_toml(v)}" for k, v in value.items()) + (" }" if value else "}")
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04X}" for c in text) + '"'


def _toml_key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else to_toml(key)


def short_toml(value: Any) -> str:
    """A value in a sentence: as TOML writes it, not too much of it."""
    return _cut(to_toml(value))


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


def _bad_entry(table: Mapping[str, Any], path: str) -> tuple[str, Any]:
    values = _value_at(table, path)
    for key, value in values.items() if isinstance(values, dict) else ():
        if not isinstance(value, str):
            return f"{path}.{key}", value
    return path, None


def _struct_at(kind: Any, path: str) -> type | None:
    """The struct whose keys stand at `path`."""
    for step in _steps(path):
        struct = struct_in(kind)
        field = None if struct is None else _field(struct, str(step))
        kind = None if field is None else field.type
    return struct_in(kind)


def _field_at(kind: Any, path: str) -> msgspec.structs.FieldInfo | None:
    names = [step for step in _steps(path) if isinstance(step, str)]
    struct = _struct_at(kind, ".".join(names[:-1])) if names else None
    return None if struct is None else _field(struct, names[-1])


def _field(struct: type, name: str) -> msgspec.structs.FieldInfo | None:
    return next((field for field in msgspec.structs.fields(struct) if field.encode_name == name), None)


def struct_in(kind: Any) -> type | None:
    """The struct that is this type, or a part of it."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next(filter(None, map(struct_in, typing.get_args(kind))), None)


RELOADABLE = object()
"""A mark in the annotation of a key: SIGHUP reloads it."""


class KeyMeta(NamedTuple):
    """The content of a key's annotation."""

    help: str
    example: str
    reloadable: bool


def meta_of(field: msgspec.structs.FieldInfo | None) -> KeyMeta:
    annotations = () if field is None else getattr(field.type, "__metadata__", ())
    text, example, *_ = [*(part for part in annotations if isinstance(part, str)), "", ""]
    return KeyMeta(text, example, RELOADABLE in annotations)


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
