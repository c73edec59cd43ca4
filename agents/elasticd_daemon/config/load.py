"""Reads agent.toml and the ELASTICD_ variables into one checked NodeSettings.

A key counts as its variable says; else as the file says; else as its default. The variables are merged into the table
of the file before anything is decoded, so that a value is checked alike wherever it is from, and an error names where
it was written: FILE: KEY, or VARIABLE. A variable that is no key but nearly one is an error, too: a misspelled
ELASTICD_HTTP_TOKEN_FILE must not leave an agent without its token. Names that resemble none may be another program's.

SIGHUP loads everything again, and an error leaves all as it was. Keys that can change under running jobs (RELOADABLE in
agent_settings.py) count at once; for the others the old value stays, with a sentence that says when the new one counts.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from elasticd.errors import UsageError
from elasticd_agent.model.phrases import did_you_mean
from elasticd_daemon.config.agent_settings import HttpSettings, NodeSettings, StoreSettings
from elasticd_daemon.config.decode import ConfigError, KeyHints, decode, meta_of, short_toml, struct_in
from elasticd_daemon.config.documents import format_of, parse
from elasticd_daemon.config.job_file import JobFile
from elasticd_daemon.config.validate import check_settings

VARIABLE_PREFIX = "ELASTICD_"


@dataclass(frozen=True, slots=True)
class Override:
    """A variable that is set: its name, and its value as a file would have it."""

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
    return VARIABLE_PREFIX + key.upper().replace(".", "_")


def read_overrides(kind: type[msgspec.Struct], environ: Mapping[str, str]) -> dict[str, Override]:
    """The variables that are set, by key. An empty variable is as if not set.

    Raises UsageError: VARIABLE: …
    """
    known = {variable_name(key): (key, field) for key, field in config_keys(kind)}
    given = {}
    for name in sorted(environ):
        text = environ[name]
        if name in known and text.strip():
            key, field = known[name]
            given[key] = Override(name, _parse_variable(text.strip(), field.type))
        elif name not in known and name.startswith(VARIABLE_PREFIX):
            _reject_misspelled(name, known, kind)
    return given


def _reject_misspelled(name: str, known: Mapping[str, object], kind: type[msgspec.Struct]) -> None:
    """Refuse an unknown ELASTICD_ variable that resembles a key; other programs may own the rest."""
    tables = tuple(variable_name(f.encode_name) + "_" for f in msgspec.structs.fields(kind) if struct_in(f.type))
    is_ours = name.startswith(tables)
    near = did_you_mean(name, known, _LISTED_KEYS_HINT if is_ours else "", 0.7 if is_ours else 0.9)
    if near:
        raise UsageError(f"{name}: is not a variable elasticd reads; {near}")


_LISTED_KEYS_HINT = "elasticd config example lists the keys"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _parse_variable(text: str, kind: Any) -> Any:
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


DEFAULT_FILE = Path("/etc/elasticd/agent.toml")
MAX_CONFIG_BYTES = 1 << 20
FileMode = int
"""The permissions, as in `st_mode`."""

_SECRET_HINT = "secrets are in files of their own; write"
_TABLES_HINT = "tables are [store], [http], [health] and [limits]"
KEY_HINTS: KeyHints = {
    StoreSettings: {
        "password": f"{_SECRET_HINT} password_file",
        "token": f"{_SECRET_HINT} password_file",
        "endpoint": 'write endpoints = ["HOST:PORT"]',
        "cacert": "write ca",
        "tls_ca": "write ca",
        "tls_cert": "write cert",
        "tls_key": "write key",
    },
    HttpSettings: {"token": f"{_SECRET_HINT} token_file", "host": "write bind", "address": "write bind"},
    NodeSettings: {
        **dict.fromkeys(
            (field.encode_name for field in msgspec.structs.fields(JobFile)), "it is a job's; write it in a job file"
        ),
        **dict.fromkeys(("agent", "elasticd"), f"this file is all about the agent; {_TABLES_HINT}"),
        **dict.fromkeys(("job", "jobs"), "submit each job with elasticd submit FILE"),
        "etcd": 'write [store] with backend = "etcd"',
        "token": f"{_SECRET_HINT} token_file below [http]",
        "token_file": "write it below [http]",
        "port": "write it below [http]",
        "bind": "write it below [http]",
        "endpoints": "write it below [store]",
        "backend": "write it below [store]",
        "node_id": "write node",
    },
}
"""Likely words that are not keys: what to write instead."""


def load(path: Path | None, environ: Mapping[str, str]) -> NodeSettings:
    """The settings of `path` (None: the defaults); ELASTICD_ variables override the file.

    Raises UsageError in one line, FILE: KEY: the error; its correction; or VARIABLE: ….
    """
    where = str(path) if path is not None else "the environment"
    table: dict[str, Any] = {}
    if path is not None:
        data, mode = read_config(path)
        if mode & 0o002:
            raise UsageError(f"{path}: anybody can write it, and so have this node run anything; chmod o-w {path}")
        table = parse(data, format_of(path.name), where, MAX_CONFIG_BYTES)
    overrides = read_overrides(NodeSettings, environ)
    try:
        merged = _merge_overrides(table, overrides)
        if isinstance(store := merged.get("store"), dict) and store.get("backend") == "c10d":
            raise ConfigError(
                "store.backend",
                "c10d has no password, so anybody who reaches it could run programs here, and loses all jobs when its "
                "host ends; write etcd, or local for a node that works alone",
            )
        settings = decode(merged, NodeSettings, KEY_HINTS)
        check_settings(settings, environ)
    except ConfigError as error:
        variable = overrides.get(error.key.partition("[")[0])
        raise UsageError(f"{variable.name}: {error.problem}" if variable else f"{where}: {error}") from None
    except OSError as error:  # as of a path behind a directory that is closed to this user
        raise UsageError(f"{where}: {error.filename!r} cannot be reached: {error.strerror}") from None
    return settings


def installed_config() -> Path | None:
    """The configuration of this node's agent, which this user may not be able to read; None if there is none."""
    with contextlib.suppress(PermissionError):
        return DEFAULT_FILE if DEFAULT_FILE.exists() else None
    return DEFAULT_FILE


def _merge_overrides(table: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {"node": socket.gethostname(), **table}
    for key, variable in given.items():
        outer, dot, name = key.partition(".")
        if not dot:
            merged[key] = variable.value
        elif isinstance(merged.get(outer, {}), dict):
            merged[outer] = {**merged.get(outer, {}), name: variable.value}
    return merged


def read_config(path: Path) -> tuple[bytes, FileMode]:
    """The content, up to one byte beyond MAX_CONFIG_BYTES, and the mode. Raises UsageError."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from None
    except ValueError:
        raise UsageError(f"{str(path)!r} cannot be the name of a file") from None


# ---- SIGHUP

_AFTER_RESTART = "takes effect at the next start (SIGUSR2, which disturbs no job, or systemctl restart, which drains)"
_AFTER_DRAIN = "takes effect at the next start (systemctl restart, which drains)"
KEYS_THAT_LOSE_JOBS = ("node", "state_dir")
"""An agent with another one finds none of the jobs that run."""


def merge_reloaded(old: NodeSettings, new: NodeSettings) -> tuple[NodeSettings, list[str]]:
    """The settings after SIGHUP, and a sentence for each key that differs."""
    sentences: list[str] = []
    return _merge_structs(old, new, "", sentences), sentences


def _merge_structs(old: Any, new: Any, outer: str, sentences: list[str]) -> Any:
    settled: dict[str, Any] = {}
    for field in msgspec.structs.fields(type(old)):
        before, now, key = getattr(old, field.name), getattr(new, field.name), outer + field.encode_name
        if isinstance(before, msgspec.Struct):
            settled[field.name] = _merge_structs(before, now, f"{key}.", sentences)
        elif before != now:
            at_once = meta_of(field).reloadable
            restart = _AFTER_DRAIN if key in KEYS_THAT_LOSE_JOBS else _AFTER_RESTART
            when = "from now on" if at_once else restart
            sentences.append(f"{key}: {_value_text(now)} instead of {_value_text(before)} {when}")
            if not at_once:
                settled[field.name] = before
    return msgspec.structs.replace(new, **settled)


def _value_text(value: Any) -> str:
    return "nothing" if value is None else short_toml(value)
