"""JSON encoding of frozen dataclasses: the base of every record that crosses a process or the network.

Processes may be one minor version apart: a document carries `version`, "major.minor"; fields this code does not know
are kept and written back, another major version is refused. Invalid input raises `WireError` with the field.

Records are decoded strictly and once, at the edge. A field has its type and its range, a name cannot come twice,
numbers are finite, and depth and length are bounded before anything is built. So code behind the edge reads attributes
of frozen dataclasses and checks nothing again.

Decoders are compiled from the type hints of a class at its first use: a Round of a thousand members is read by every
agent at the same moment, and an interpreter of hints would take seconds of it. An error finds its path on the way up,
so valid values pay nothing for it.

Evolution: a new field has a default, so an older document lacks it without harm; an older version keeps what it does
not know in `unknown` and writes it back, so a record that passes through it loses nothing. A change of meaning needs
another major version.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from elasticd import bounded_json
from elasticd.bounded_json import JsonObject
from elasticd.errors import WireError

VERSION = "1.0"

MIN_NUMBER = -256
"""The least number in a record, unless it says otherwise: -1 stands for unknown, and -256 is above no exit code."""
MAX_SECONDS = 1e11
"""The year 5138. Times of day and durations are bounded so that every page can show them."""
_MAX_DEPTH = 32  # above any record's need, and below Python's recursion limit when it is written back

Parser = Callable[[bytes | str, int], Any]
"""Makes values of a record's text, of at most so many bytes. Raises ValueError, RecursionError."""

_R = TypeVar("_R", bound="Record")
_D = TypeVar("_D", bound="Document")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Base of all records. `unknown`: fields that a newer minor version wrote, to be written back."""

    FLOAT_RANGE: ClassVar[tuple[float, float]] = (0.0, MAX_SECONDS)  #: the range of its numbers that are not whole
    unknown: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)

    def check(self) -> None:
        """Raise WireError if the fields make no sense together. Called after decoding."""

    def to_dict(self) -> JsonObject:
        """Plain JSON values; unknown fields are beside the known ones."""
        raw = dict(self.unknown)
        for name in _field_names(type(self)):  # type: ignore[arg-type]  # mypy: class taken for instance
            value = getattr(self, name)
            raw[name] = value if type(value) in _PLAIN_TYPES else _json_value(value)
        return raw

    @classmethod
    def from_dict(cls: type[_R], raw: object) -> _R:
        """The record that these plain JSON values make; records among them stay. Raises WireError, naming the field."""
        try:
            return _record_decoder(cls)(raw)  # type: ignore[no-any-return, arg-type]  # mypy: class taken for instance
        except _Mismatch as mismatch:
            raise WireError(f"{cls.__name__}{mismatch.path}: {mismatch.why}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Document(Record):
    """A record that is stored or sent on its own, with the version that wrote it."""

    FIELD_IN_KEY: ClassVar[str] = ""  #: the field that the last part of its key repeats
    NEVER_CHANGES: ClassVar[bool] = (
        False  #: never changed: once read, it holds even if its key is overwritten with garbage
    )
    MAX_BYTES: ClassVar[int] = 512 << 10  #: of its JSON: a larger one is refused before it is decoded
    COMPRESSED: ClassVar[bool] = False  #: where it is long, in the store
    version: str = VERSION

    def to_json(self) -> bytes:
        """UTF-8, one line, keys sorted. Lone surrogates (from undecodable output) become '?'."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8", "replace")

    @classmethod
    def from_json(cls: type[_D], text: bytes | str, parse: Parser | None = None) -> _D:
        """Raises WireError, with the field, for anything but a valid record. `parse`: in place of `parse_json`."""
        name = cls.__name__
        try:
            raw = (parse or parse_json)(text, cls.MAX_BYTES)
        except (ValueError, RecursionError) as e:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            raise WireError(f"{name}: not JSON: {e}") from None
        if not isinstance(raw, dict):
            raise WireError(f"{name}: expected an object, got {_json_type(raw)}")
        version = raw.get("version")
        major, dot, minor = version.partition(".") if isinstance(version, str) else ("", "", "")
        if not dot or not all(part.isascii() and part.isdigit() for part in (major, minor)):
            raise WireError(f"{name}.version: expected 'major.minor', got {_shortened(version)}")
        if major != VERSION.partition(".")[0]:
            raise WireError(
                f"{name}: version {version} cannot be read by this elasticd, which speaks {VERSION}; "
                "run the same major version everywhere"
            )
        return cls.from_dict(raw)


def parse_json(text: bytes | str, max_bytes: int) -> Any:
    """Plain values. Raises ValueError, RecursionError for what no record contains."""
    if len(text) > max_bytes:
        raise ValueError(f"it is longer than {max_bytes >> 10} KiB")
    raw = bounded_json.loads(
        text,
        max_bytes // 8,
        object_pairs_hook=_unique_fields,
        parse_constant=_reject_constant,
        parse_float=_finite_float,
    )
    _check_depth(raw)
    return raw


_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})
"""Most values: a list of ten thousand jobs has two hundred thousand of them."""


@functools.cache
def _field_names(cls: type[Record]) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls) if f.name != "unknown")


def _json_value(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_json_value(v) for v in value]
    return value


class _Mismatch(Exception):
    """A value does not fit its field. Each level prepends its part of `path` on the way up, so that valid values cost
    none: 256 agents read a Round of 256 members, a thousand values, at once."""

    def __init__(self, why: str) -> None:
        self.path = ""
        self.why = why

    def prefixed(self, part: str) -> _Mismatch:
        self.path = part + self.path
        return self


_Decoder = Callable[[Any], Any]
"""Turns a JSON value into a field's value. Raises _Mismatch; WireError where a record's own `check` does."""


@functools.cache  # keyed by the handful of classes above
def _record_decoder(cls: type[Record]) -> _Decoder:
    """Return the decoder of a class, made from its type hints once."""
    hints = typing.get_type_hints(cls)
    no = dataclasses.MISSING
    fields = [
        (f.name, _decoder_of_hint(hints[f.name], cls.FLOAT_RANGE), f.default is no and f.default_factory is no)
        for f in dataclasses.fields(cls)
        if f.name != "unknown"
    ]

    def read(raw: Any) -> Record:
        if type(raw) is cls:
            return raw
        if not isinstance(raw, dict):
            raise _Mismatch(f"expected an object, got {_json_type(raw)}")
        known: JsonObject = {}
        name = ""
        try:
            for name, read_field, required in fields:
                if name in raw:
                    known[name] = read_field(raw[name])
                elif required:
                    raise _Mismatch("missing")
        except _Mismatch as mismatch:
            raise mismatch.prefixed(f".{name}") from None
        if len(known) < len(raw):
            known["unknown"] = {k: v for k, v in raw.items() if k not in known}
        record = cls(**known)
        record.check()
        return record

    return read


def _decoder_of_hint(hint: Any, floats: tuple[float, float]) -> _Decoder:
    """Return the decoder of a type hint: scalars with ranges, tuples, mappings, choices, optional values, records."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin in (typing.Union, types.UnionType):
        (inner,) = (a for a in args if a is not type(None))
        read = _decoder_of_hint(inner, floats)
        return lambda v: None if v is None else read(v)
    if origin is Literal:
        return functools.partial(_decode_choice, args)
    if origin is tuple:
        return functools.partial(_decode_items, [_decoder_of_hint(a, floats) for a in args if a is not Ellipsis])
    if origin is Mapping:
        return functools.partial(_decode_mapping, *(_decoder_of_hint(a, floats) for a in args))
    if isinstance(hint, type) and issubclass(hint, Record):
        return _record_decoder(hint)  # type: ignore[arg-type]
    return _decode_text if hint is str else _number_decoder(hint, floats if hint is float else (MIN_NUMBER, 2**63 - 1))


def _decode_items(readers: Sequence[_Decoder], value: Any) -> tuple[Any, ...]:
    """A list: one reader for any number of items, else one reader for each."""
    if not isinstance(value, list):
        raise _Mismatch(f"expected a list, got {_json_type(value)}")
    if len(readers) > 1 and len(value) != len(readers):
        raise _Mismatch(f"expected a list of {len(readers)}, got {_shortened(value)}")
    items = iter(value)
    try:
        if len(readers) > 1:
            return tuple([read(item) for read, item in zip(readers, items, strict=True)])
        return tuple(map(readers[0], items))
    except _Mismatch as mismatch:
        raise mismatch.prefixed(f"[{len(value) - operator.length_hint(items) - 1}]") from None


def _decode_mapping(read_name: _Decoder, read: _Decoder, value: Any) -> JsonObject:
    """Decode an object whose names are values, too."""
    if not isinstance(value, dict):
        raise _Mismatch(f"expected an object, got {_json_type(value)}")
    return {read_name(name): read(item) for name, item in value.items()}


def _decode_choice(allowed: tuple[Any, ...], value: Any) -> Any:
    """Return the value if it is one of those allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise _Mismatch(f"expected one of {', '.join(allowed)}, got {_shortened(value)}")
    return value


def _decode_text(value: Any) -> Any:
    return value if type(value) is str and value.isascii() else _decode_scalar(str, (0, 0), value)


def _number_decoder(kind: type, bounds: tuple[float, float]) -> _Decoder:
    lowest, highest = bounds

    def read(value: Any) -> Any:
        given = type(value)
        return value if given is kind and lowest <= value <= highest else _decode_scalar(kind, bounds, value)

    return read


_SCALAR_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}


def _decode_scalar(kind: type, bounds: tuple[float, float], value: Any) -> Any:
    given = type(value)
    if given is not kind and not (kind is float and given is int):
        raise _Mismatch(f"expected {_SCALAR_NAMES[kind]}, got {_json_type(value)}")
    if given in (int, float) and not bounds[0] <= value <= bounds[1]:
        raise _Mismatch(f"expected a number from {bounds[0]:g} to {bounds[1]:g}, got {_shortened(value)}")
    if kind is str and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _Mismatch("a string with half a surrogate pair cannot be written anywhere") from None
    return float(value) if kind is float else value


def _unique_fields(pairs: list[tuple[str, Any]]) -> JsonObject:
    """Return the fields of an object. A name that comes twice is an error: readers would differ in
    which one they take.
    """
    known = dict(pairs)
    if len(known) != len(pairs):
        raise ValueError("an object names a field twice")
    return known


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def _check_depth(raw: Any) -> None:
    """Level by level: most values contain no others, and a Round has a thousand."""
    level = [raw] if type(raw) in (dict, list) else []
    for _ in range(_MAX_DEPTH):
        inside = [outer.values() if type(outer) is dict else outer for outer in level]
        level = [value for values in inside for value in values if type(value) in (dict, list)]
    if any(level):
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _shortened(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
