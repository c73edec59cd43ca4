"""Checks of agent.toml against itself and this machine, before anything is started.

`decode` has checked types and ranges of single keys. Here are checks that need two keys, or the machine: users and
files that must exist, addresses and names that can be used, secrets that others must not read, limits that contradict
each other.

An error names its key as the file spells it, quotes the value, and says what to write instead. The first one ends the
check, since later ones often follow from it. SIGHUP runs the same checks as the start: what a reload accepts, a restart
accepts.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elasticd.errors import UsageError
from elasticd_agent.config.notice_options import parse_notice_service
from elasticd_agent.model.job import Rendezvous, Tls
from elasticd_agent.store import tls as certificate_files
from elasticd_agent.system.durations import format_duration
from elasticd_agent.system.files import find_secret_file_problem
from elasticd_agent.system.gpus.devices import cpu_count, visible_gpus
from elasticd_agent.system.network.http_auth import PeerCredentialAuth, read_token
from elasticd_daemon.config.agent_settings import HealthSettings, HttpSettings, Limits, NodeSettings, StoreSettings
from elasticd_daemon.config.decode import ConfigError
from elasticd_daemon.config.job_file import check_memory_limit
from elasticd_daemon.config.store_options import store_policy, store_rendezvous

MAX_SOCKET_PATH_BYTES = 107
"""Bytes of a Unix socket's path, by the kernel's sockaddr_un."""
SLOTS_PER_CPU, MIN_SLOT_LIMIT = 16, 64
"""More workers than this on a machine without GPUs are a slip of the keyboard."""


_KEY_PAIRS = (
    ("store.user", "store.password_file", "they come together"),
    ("store.cert", "store.key", "they come together"),
    ("http.tls_cert", "http.tls_key", "HTTPS needs both"),
)
_FILE_KEYS = ("store.ca", "store.cert", "http.tls_cert", "http.tls_ca")
_SECRET_FILE_KEYS = ("store.password_file", "store.key", "http.tls_key", "http.token_file", "http.agents_token_file")


def check_settings(settings: NodeSettings, environ: Mapping[str, str]) -> None:
    """Raises ConfigError for the first contradiction."""
    _check_node(settings, environ)
    _check_directories(settings)
    store_policy(settings)
    if settings.refuse_timeout_s < 1:
        raise ConfigError("refuse_timeout", f"{settings.refuse_timeout_s} must be at least 1")
    _check_store(settings.store)
    _check_files(settings)
    store_rendezvous(settings)
    _check_http(settings.http)
    _check_health(settings.health)
    _check_limits(settings.limits)


def _check_node(settings: NodeSettings, environ: Mapping[str, str]) -> None:
    """Check the node's own keys: its name, labels, notices, user and slots."""
    try:
        Rendezvous(node=settings.node)
    except UsageError as error:
        raise ConfigError("node", str(error).removeprefix("node id ")) from None
    for label in settings.labels:
        if not re.fullmatch("[!-~]{1,128}", label) or "," in label:
            raise ConfigError("labels", f"{label!r} must be printable ASCII without spaces or commas, as in rack=7")
    for service in settings.preemption_notices:
        try:
            parse_notice_service(service)
        except UsageError as error:
            raise ConfigError("preemption_notices", str(error).removeprefix("preemption notices: ")) from None
    _check_user("user", settings.user)
    slots = settings.slots
    if slots == "auto":
        return
    gpus, cpus = len(visible_gpus(environ)), cpu_count()
    if gpus and slots > gpus:
        raise ConfigError("slots", f"{slots}, but this machine has {gpus} GPU(s); write {gpus}, or auto")
    most = max(MIN_SLOT_LIMIT, SLOTS_PER_CPU * cpus)
    if slots > most:
        raise ConfigError(
            "slots", f"{slots}, but this machine has {cpus} CPU(s) and no GPU; write auto, at most {most}"
        )


def _check_user(key: str, name: str | None) -> None:
    """Check that a user exists, and that this process may run jobs as that user."""
    if name is None:
        return
    try:
        uid = pwd.getpwnam(name).pw_uid
    except KeyError:
        raise ConfigError(key, f"{name!r} does not exist on this machine; create it, or name another") from None
    if os.geteuid() not in (0, uid):
        raise ConfigError(key, f"{name!r} is another user, and only a daemon that runs as root can run jobs as others")


def _check_directories(settings: NodeSettings) -> None:
    """Check the directories: absolute, no files among their parents, and a socket's path that the kernel accepts."""
    for key, path in (("state_dir", settings.state_dir), ("run_dir", settings.run_dir), ("log_dir", settings.log_dir)):
        if path is not None and not path.is_absolute():
            raise ConfigError(key, f"{str(path)!r} is not an absolute path; begin it with /")
        for place in (path, *path.parents) if path is not None else ():
            if place.exists() and not place.is_dir():
                raise ConfigError(key, f"{str(place)!r} is a file, not a directory")
    if settings.state_dir == settings.run_dir:
        raise ConfigError("run_dir", "is state_dir, too; what must not outlive a reboot needs a directory of its own")
    key = "http.socket" if settings.http.socket else "run_dir"
    size = len(os.fsencode(settings.socket_path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            key,
            f"{str(settings.socket_path)!r} has {size} bytes, but a socket's path at most {MAX_SOCKET_PATH_BYTES}; "
            f"shorten it by {size - MAX_SOCKET_PATH_BYTES}",
        )
    if settings.socket_path.is_dir():
        raise ConfigError(key, f"{str(settings.socket_path)!r} is a directory, not a socket")


def _check_store(store: StoreSettings) -> None:
    """Check that keys of etcd are given for etcd only, and that its endpoints are known."""
    if store.backend == "local":
        for name in ("endpoints", "user", "password_file", "ca", "cert", "key"):
            if getattr(store, name):
                raise ConfigError(f"store.{name}", 'is etcd\'s, but store.backend is local; write backend = "etcd"')
        return
    if not store.endpoints:
        raise ConfigError("store.endpoints", 'is missing; where etcd is, as in endpoints = ["https://10.0.0.1:2379"]')


def _check_http(http: HttpSettings) -> None:
    """Check the HTTP server's address, TLS name, users and tokens."""
    _check_http_address(http)
    _check_tls_name(http)
    try:
        PeerCredentialAuth.from_names(http.users, http.groups)
    except UsageError as error:
        key, _, says = str(error).partition(": ")
        raise ConfigError(key, says) from None
    _check_http_tokens(http)


def _check_http_address(http: HttpSettings) -> None:
    """Check the address to listen on. A port in it is a common slip, and has a sentence of its own."""
    if not http.bind.strip() or not re.fullmatch(r"[\w.:%\[\]-]{1,255}", http.bind):
        raise ConfigError("http.bind", f"{http.bind[:60]!r} is no address to listen on, as in 127.0.0.1, 0.0.0.0 or ::")
    if re.fullmatch(r"\[.*\]|.*\]:\d+|[^:]*:\d+", http.bind):
        raise ConfigError(
            "http.bind", f"{http.bind!r} must be an address alone, without brackets; the port is http.port"
        )


def _check_tls_name(http: HttpSettings) -> None:
    """Check the name that the certificate is for."""
    if http.tls_name is not None:
        if http.tls_cert is None:
            raise ConfigError(
                "http.tls_name", "is given, but http.tls_cert is not: without it the agent does not serve HTTPS"
            )
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", http.tls_name):
            raise ConfigError("http.tls_name", f"{http.tls_name[:60]!r} is no name that a certificate can be for")


def _check_http_tokens(http: HttpSettings) -> None:
    """Check the tokens: names, files, and that agents do not share a token with people, whose tokens may do more."""
    for name in http.tokens:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
            raise ConfigError("http.tokens", f"{name[:70]!r} must be a name of letters, digits, - _ and .")
    if unknown := [name for name in http.read_only if name not in http.tokens]:
        raise ConfigError("http.read_only", f"{unknown[0][:70]!r} is not one of http.tokens")
    named = {f"http.tokens.{name}": path for name, path in http.tokens.items()}
    for key, path in {
        "http.token_file": http.token_file,
        "http.agents_token_file": http.agents_token_file,
        **named,
    }.items():
        if path is not None:
            _check_secret_file(key, path)
            try:
                read_token(path, "")
            except UsageError as error:
                raise ConfigError(key, str(error).removeprefix(": ")) from None
    if (agents := http.agents_token_file) is not None:
        for key, path in {"http.token_file": http.token_file, **named}.items():
            if path is not None and read_token(path, "") == read_token(agents, ""):
                why = f"holds the token of {key}, which may do more; it needs another"
                raise ConfigError("http.agents_token_file", why)


def _check_health(health: HealthSettings) -> None:
    """Check the health checks' intervals against each other."""
    for name in ("every_s", "plugin_timeout_s", "cooloff_s"):
        if not getattr(health, name) > 0:
            raise ConfigError(f"health.{name.removesuffix('_s')}", "0s must be more than 0 seconds")
    if health.every_s <= health.plugin_timeout_s:
        every, timeout = format_duration(health.every_s), format_duration(health.plugin_timeout_s)
        raise ConfigError(
            "health.every",
            f"{every} must exceed plugin_timeout {timeout}, so that one look is over before the next begins; raise it "
            f"by more than {health.plugin_timeout_s - health.every_s:.6g} s",
        )
    if health.cooloff_max_s < health.cooloff_s:
        raise ConfigError(
            "health.cooloff_max",
            f"{format_duration(health.cooloff_max_s)} must not be less than cooloff "
            f"{format_duration(health.cooloff_s)}; raise it by {health.cooloff_s - health.cooloff_max_s:.6g} s",
        )
    if health.kubernetes != "off":
        try:
            parse_notice_service("kubernetes")
        except UsageError:
            raise ConfigError(
                "health.kubernetes", f"{health.kubernetes!r} needs a pod, which this agent has not"
            ) from None
    if health.plugins_dir.exists() and not health.plugins_dir.is_dir():
        raise ConfigError("health.plugins_dir", f"{str(health.plugins_dir)!r} is a file, not a directory")


def _check_limits(limits: Limits) -> None:
    """Check what jobs may run and how much memory they may take."""
    for key, entries in (("commands", limits.commands), ("users", limits.users)):
        for entry in entries or ():
            if not entry.strip():
                raise ConfigError(f"limits.{key}", "holds an empty entry; leave it out")
            if key == "commands" and not entry.startswith("/"):
                raise ConfigError("limits.commands", f"{entry!r} is not an absolute path; begin it with /")
    check_memory_limit("limits.job_memory", limits.job_memory_bytes)


def _check_files(settings: NodeSettings) -> None:
    """The files of [store] and [http] that are needed, readable, and closed to others where they hold a secret."""

    def value_of(key: str) -> Any:
        table, _, name = key.partition(".")
        return getattr(getattr(settings, table), name)

    for one, other, why in _KEY_PAIRS:
        for given, missing in ((one, other), (other, one)):
            if value_of(given) is not None and value_of(missing) is None:
                raise ConfigError(missing, f"is missing, but {given} is given; {why}")
    for key in _FILE_KEYS:
        path = value_of(key)
        if path is not None and not path.is_file():
            raise ConfigError(key, f"{str(path)!r} {'is not a file' if path.exists() else 'does not exist'}")
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(key, f"{str(path)!r} cannot be read: permission denied")
    for key in _SECRET_FILE_KEYS:
        _check_secret_file(key, value_of(key))
    store, http = settings.store, settings.http
    for table, tls in (
        ("store.", Tls(store.ca, store.cert, store.key)),
        ("http.tls_", Tls(http.tls_ca, http.tls_cert, http.tls_key)),
    ):
        if (tls.ca or tls.cert) and (defect := certificate_files.find_problem(tls)) is not None:
            raise ConfigError(table + defect[0], defect[1])


def _check_secret_file(key: str, path: Path | None) -> None:
    """Check that a file with a secret exists, can be read, and is closed to other users."""
    if path is not None and (wrong := find_secret_file_problem(path)) is not None:
        raise ConfigError(key, wrong)
