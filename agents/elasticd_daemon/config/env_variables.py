"""ELASTICD_ variables that override keys of agent.toml: ELASTICD_HTTP_PORT is port in [http]."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from elasticd.errors import UsageError
from elasticd_agent.model.phrases import did_you_mean
from elasticd_daemon.config.decode import struct_in

PREFIX = "ELASTICD_"
AGENT_FLAGS: Mapping[str, str] = {"--bind": "http.bind", "--port": "http.port", "--drain-timeout": "drain_timeout"}
"""The options of `elasticd agent` that stand in for a key, and that count more than its variable."""


@dataclass(frozen=True, slots=True)
class Override:
    """One that was set: what it is called, and its value as a file would have it."""

    name: str
    value: Any


def config_keys(kind: type[msgspec.Struct], outer: str = "") -> Iterator[tuple[str, msgspec.structs.FieldInfo]]:
    """Every key, "http.port", with its field."""
    for field in msgspec.structs.fields(kind):
        inner = struct_in(field.type)
        if inner is not None:
            yield from config_keys(inner, f"{outer}{field.encode_name}.")
        else:
            yield f"{outer}{field.encode_name}", field


def variable_name(key: str) -> str:
    """The name of the variable that stands in for `key`."""
    return PREFIX + key.upper().replace(".", "_")


def read_overrides(
    kind: type[msgspec.Struct], environ: Mapping[str, str], flags: Mapping[str, str]
) -> dict[str, Override]:
    """The variables that are set, and what `flags` say instead, by key. An empty variable is as if not set.

    Raises UsageError: VARIABLE: …
    """
    known = {variable_name(key): (key, field) for key, field in config_keys(kind)}
    given = {}
    for name in sorted(environ):
        text = environ[name]
        if name in known and text.strip():
            key, field = known[name]
            given[key] = Override(name, _to_plain(text.strip(), field.type))
        elif name not in known and name.startswith(PREFIX):
            _reject_misspelled(name, known, kind)
    fields = dict(known.values())
    for flag, text in flags.items():
        given[AGENT_FLAGS[flag]] = Override(flag, _to_plain(text.strip(), fields[AGENT_FLAGS[flag]].type))
    return given


def _reject_misspelled(name: str, known: Mapping[str, object], kind: type[msgspec.Struct]) -> None:
    """Refuse an unknown ELASTICD_ variable that resembles a key; other programs may own the rest."""
    tables = tuple(variable_name(f.encode_name) + "_" for f in msgspec.structs.fields(kind) if struct_in(f.type))
    is_ours = name.startswith(tables)
    near = did_you_mean(name, known, _HINT if is_ours else "", 0.7 if is_ours else 0.9)
    if near:
        raise UsageError(f"{name}: is not a variable elasticd reads; {near}")


_HINT = "elasticd config example lists the keys"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _to_plain(text: str, kind: Any) -> Any:
    """`text` as a file would have it; what cannot be is left as it is, for the decoder to refuse."""
    kinds = set(_member_types(kind))
    if tuple in kinds:
        return [item for item in (part.strip() for part in text.split(",")) if item]
    if bool in kinds:
        return True if text.lower() in _TRUE else False if text.lower() in _FALSE else text
    if kinds & {int, float} and re.fullmatch("-?[0-9]{1,18}", text):
        return int(text)
    return text


def _member_types(kind: Any) -> Iterator[Any]:
    origin = typing.get_origin(kind)
    if origin is tuple:
        yield tuple
    elif origin in (typing.Union, types.UnionType, typing.Annotated):
        for part in typing.get_args(kind):
            yield from _member_types(part)
    else:
        yield kind
