"""A table of plain values decoded into a struct, or one sentence with the key, the error and its correction.

msgspec checks the types; its errors are translated into the words of the file.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from elasticd.errors import UsageError
from elasticd_agent.config.quantities import Seconds, Size, decode_quantity, format_size
from elasticd_agent.model.phrases import did_you_mean, listing, shortened
from elasticd_agent.system.durations import format_duration

StructT = TypeVar("StructT", bound=msgspec.Struct)


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


def decode(table: Mapping[str, Any], kind: type[StructT], hints: KeyHints, *, text_numbers: bool = False) -> StructT:
    """Raises ConfigError. `text_numbers`: numbers may be text, as in the query of a URL."""
    try:
        return msgspec.convert(table, kind, dec_hook=decode_quantity, strict=not text_numbers)
    except msgspec.ValidationError as error:
        raise _translate_error(str(error), table, kind, hints) from None
    except RecursionError:
        raise ConfigError("", "tables and lists are nested too deep") from None


def _translate_error(text: str, table: Mapping[str, Any], kind: type, words: KeyHints) -> ConfigError:
    """Return msgspec's error in the words of the file: the key, what is wrong with it, and how to write it.

    `text` is msgspec's, as "Expected `int`, got `str` - at `$.http.port`".
    """
    what, _, place = text.rpartition(" - at ") if " - at " in text else (text, "", "")
    path = place.partition("`$")[2].removesuffix("`").lstrip(".").removesuffix("[...]")
    if "key` in" in place:
        return ConfigError(path, "every key must be text")
    if match := re.match(r"Object (contains unknown|missing required) field `(.*)`", what, re.DOTALL):
        name = match[2]
        struct = kind if not path else struct_in(_field_type(_field_at(kind, path)))
        problem = _unknown_key(name, struct, words) if match[1] == "contains unknown" else _missing_key(name, struct)
        return ConfigError(f"{path}.{name}" if path else name, problem)
    return ConfigError(path, _type_problem(what, path, _field_at(kind, path)))


def _unknown_key(name: str, struct: type | None, words: KeyHints) -> str:
    """Return the sentence for a key that is not known: where it belongs, or the nearest one that is."""
    spelled, known = name.replace("-", "_"), words.get(struct, {}) if struct else {}
    if spelled in known:
        return f"is not a key here: {known[spelled]}"
    names = [field.encode_name for field in msgspec.structs.fields(struct)] if struct else []
    listed = f"there are {', '.join(names)}" if len(names) <= 12 else "elasticd config example lists them"
    return f"is not a key; {did_you_mean(spelled, names, listed)}"


def _missing_key(name: str, struct: type | None) -> str:
    """Return the sentence for a key that has to be there, with its example."""
    example = meta_of(_field_at(struct, name)).example
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


def _type_problem(what: str, path: str, field: msgspec.structs.FieldInfo | None) -> str:
    """A value is not repeated: it may be a secret, or long."""
    if what.startswith("Invalid enum value"):
        return f"must be {listing(_choices(_field_type(field)), conjunction='or')}, not {what.split(' ', 3)[3]}"
    types = re.match(r"Expected `([^`]*)`(?:, got `([^`]*)`)?", what)
    if types is None:
        return what
    if re.match("Expected `int` [<>]=", what):
        return f"must be {_describe_range(_field_type(field))}"
    kinds = [] if "[" in path else _choices(_field_type(field))
    kinds = kinds or [_TYPE_NAMES.get(word, word) for word in types[1].split(" | ") if word != "null"]
    problem = f"must be {listing(kinds, conjunction='or')}, not {_TYPE_NAMES.get(types[2] or '', 'something else')}"
    if field is None or "[" in path:
        return problem
    example = meta_of(field).example or default_toml(field)
    if struct_in(field.type) is not None and not example:
        return f"{problem}; write [{field.encode_name}]"
    return f"{problem}; write it as in {field.encode_name} = {example}" if example else problem


def _describe_range(kind: Any) -> str:
    """The range of a whole number, from the msgspec.Meta in its type."""
    meta = next(part for part in _type_parts(kind) if isinstance(part, msgspec.Meta))
    return f"at least {meta.ge}" if meta.le is None else f"from {meta.ge} to {meta.le}"


def _type_parts(kind: Any) -> Iterator[Any]:
    yield kind
    for part in (*typing.get_args(kind), *getattr(kind, "__metadata__", ())):
        yield from _type_parts(part)


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
        return f'"{format_duration(value)}"'
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
    return shortened(to_toml(value), 60)


def _field_at(kind: Any, path: str) -> msgspec.structs.FieldInfo | None:
    """The field of the key at `path`, as in "http.tokens[0]"; None where no struct has it."""
    field = None
    for name in re.sub(r"\[[^\]]*\]", "", path).split("."):
        struct = struct_in(kind)
        fields = msgspec.structs.fields(struct) if struct is not None else ()
        field = next((field for field in fields if field.encode_name == name), None)
        kind = _field_type(field)
    return field


def _field_type(field: msgspec.structs.FieldInfo | None) -> Any:
    return None if field is None else field.type


def struct_in(kind: Any) -> type[msgspec.Struct] | None:
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


def _choices(kind: Any) -> list[str]:
    """The words that a type with literals allows; none of another type."""
    if typing.get_origin(kind) is typing.Literal:
        return [str(choice) for choice in typing.get_args(kind)]
    parts = [(part, _choices(part)) for part in typing.get_args(kind)]
    if not any(words for _, words in parts):
        return []
    return [word for part, words in parts for word in words or ["a whole number"] * (int in _type_parts(part))]
