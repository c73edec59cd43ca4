"""Checks of agent.toml against itself and this machine, before anything is started."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from pathlib import Path

from elasticd.errors import UsageError
from elasticd_agent.config.quantities import MAX_SLOTS
from elasticd_agent.model.job import Rendezvous, Tls
from elasticd_agent.store import tls as certificate_files
from elasticd_agent.system.durations import setting_text
from elasticd_agent.system.files import find_problem
from elasticd_agent.system.gpus.devices import cpu_count, visible_gpus
from elasticd_agent.system.network.http_auth import PeerCredentialAuth, read_token
from elasticd_daemon.config.agent_settings import HealthSettings, HttpSettings, NodeSettings, StoreSettings
from elasticd_daemon.config.decode import ConfigError
from elasticd_daemon.config.job_file import check_limits
from elasticd_daemon.config.store_options import store_policy, store_rendezvous

MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path, by the kernel's sockaddr_un."""
SLOTS_PER_CPU, MIN_SLOT_LIMIT = 16, 64
"""More workers than this on a machine without GPUs are a slip of the keyboard."""


def check_settings(settings: NodeSettings, environ: Mapping[str, str]) -> None:
    """Raises ConfigError for the first contradiction."""
    _check_node(settings, environ)
    _check_directories(settings)
    store_policy(settings)
    _at_least(1, {"health.strikes": settings.health.strikes, "refuse_timeout": settings.refuse_timeout_s})
    _check_store(settings.store)
    store_rendezvous(settings)
    _check_http(settings.http)
    _check_health(settings.health)
    for key, entries in (("commands", settings.limits.commands), ("users", settings.limits.users)):
        for entry in entries or ():
            if not entry.strip():
                raise ConfigError(f"limits.{key}", "holds an empty entry; leave it out")
            if key == "commands" and not entry.startswith("/"):
                raise ConfigError("limits.commands", f"{entry!r} is not an absolute path; begin it with /")
    limits = settings.limits
    check_limits("limits.job_", limits.job_memory_bytes, limits.job_pids, limits.job_cpu_weight)
    if settings.limits.jobs_per_submitter is not None:
        _at_least(1, {"limits.jobs_per_submitter": settings.limits.jobs_per_submitter})


# ---- one by one


def _check_node(settings: NodeSettings, environ: Mapping[str, str]) -> None:
    try:
        Rendezvous(node=settings.node)
    except UsageError as error:
        raise ConfigError("node", str(error).removeprefix("node id ")) from None
    for label in settings.labels:
        if not re.fullmatch("[!-~]{1,128}", label) or "," in label:
            raise ConfigError("labels", f"{label!r} must be printable ASCII without spaces or commas, as in rack=7")
    _check_user("user", settings.user)
    slots = settings.slots
    if slots == "auto":
        return
    _at_least(1, {"slots": slots})
    if slots > MAX_SLOTS:
        raise ConfigError("slots", f"{slots}: a node has at most {MAX_SLOTS}")
    gpus, cpus = len(visible_gpus(environ)), cpu_count()
    if gpus and slots > gpus:
        raise ConfigError("slots", f"{slots}, but this machine has {gpus} GPU(s); write {gpus}, or auto")
    most = max(MIN_SLOT_LIMIT, SLOTS_PER_CPU * cpus)
    if slots > most:
        raise ConfigError(
            "slots", f"{slots}, but this machine has {cpus} CPU(s) and no GPU; write auto, at most {most}"
        )


def _check_user(key: str, name: str | None) -> None:
    if name is None:
        return
    try:
        uid = pwd.getpwnam(name).pw_uid
    except KeyError:
        raise ConfigError(key, f"{name!r} does not exist on this machine; create it, or name another") from None
    if os.geteuid() not in (0, uid):
        raise ConfigError(key, f"{name!r} is another user, and only a daemon that runs as root can run jobs as others")


def _check_directories(settings: NodeSettings) -> None:
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
    if size > MAX_SOCKET_PATH:
        raise ConfigError(
            key,
            f"{str(settings.socket_path)!r} has {size} bytes, but a socket's path at most {MAX_SOCKET_PATH}; "
            f"shorten it by {size - MAX_SOCKET_PATH}",
        )
    if settings.socket_path.is_dir():
        raise ConfigError(key, f"{str(settings.socket_path)!r} is a directory, not a socket")


def _check_store(store: StoreSettings) -> None:
    if store.backend == "local":
        for name in ("endpoints", "user", "password_file", "ca", "cert", "key"):
            if getattr(store, name):
                raise ConfigError(f"store.{name}", 'is etcd\'s, but store.backend is local; write backend = "etcd"')
        return
    if not store.endpoints:
        raise ConfigError("store.endpoints", 'is missing; where etcd is, as in endpoints = ["https://10.0.0.1:2379"]')
    for given, other in (("user", "password_file"), ("password_file", "user"), ("cert", "key"), ("key", "cert")):
        if getattr(store, given) is not None and getattr(store, other) is None:
            raise ConfigError(f"store.{other}", f"is missing, but store.{given} is given; they come together")
    _check_files("store", {"ca": store.ca, "cert": store.cert})
    _check_secrets({"store.password_file": store.password_file, "store.key": store.key})
    _check_certificates("store.", Tls(store.ca, store.cert, store.key))


def _check_http(http: HttpSettings) -> None:
    _check_http_address(http)
    _check_http_tls(http)
    try:
        PeerCredentialAuth.from_names(http.users, http.groups)
    except UsageError as error:
        key, _, says = str(error).partition(": ")
        raise ConfigError(key, says) from None
    _check_http_tokens(http)


def _check_http_address(http: HttpSettings) -> None:
    if not http.bind.strip() or not re.fullmatch(r"[\w.:%\[\]-]{1,255}", http.bind):
        raise ConfigError("http.bind", f"{http.bind[:60]!r} is no address to listen on, as in 127.0.0.1, 0.0.0.0 or ::")
    if re.fullmatch(r"\[.*\]|.*\]:\d+|[^:]*:\d+", http.bind):
        raise ConfigError(
            "http.bind", f"{http.bind!r} must be an address alone, without brackets; the port is http.port"
        )
    if not 0 <= http.port <= 65535:
        raise ConfigError("http.port", f"{http.port} is out of range; ports go from 1 to 65535, 0 is a free one")


def _check_http_tls(http: HttpSettings) -> None:
    for given, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if getattr(http, given) is not None and getattr(http, other) is None:
            raise ConfigError(f"http.{other}", f"is missing, but http.{given} is given; HTTPS needs both")
    if http.tls_name is not None:
        if http.tls_cert is None:
            raise ConfigError(
                "http.tls_name", "is given, but http.tls_cert is not: without it the agent does not serve HTTPS"
            )
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", http.tls_name):
            raise ConfigError("http.tls_name", f"{http.tls_name[:60]!r} is no name that a certificate can be for")
    _check_files("http", {"tls_cert": http.tls_cert, "tls_ca": http.tls_ca})
    _check_secrets({"http.tls_key": http.tls_key})
    _check_certificates("http.tls_", Tls(http.tls_ca, http.tls_cert, http.tls_key))


def _check_http_tokens(http: HttpSettings) -> None:
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
            _check_secrets({key: path})
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
    for name in ("every_s", "plugin_timeout_s", "cooloff_s"):
        if not getattr(health, name) > 0:
            raise ConfigError(f"health.{name.removesuffix('_s')}", "0s must be more than 0 seconds")
    _exceeds(
        "health.every",
        health.every_s,
        health.plugin_timeout_s,
        f"plugin_timeout {setting_text(health.plugin_timeout_s)}",
        "one look is over before the next begins",
    )
    if health.gpus is not None:
        _at_least(0, {"health.gpus": health.gpus})
    if health.cooloff_max_s < health.cooloff_s:
        raise ConfigError(
            "health.cooloff_max",
            f"{setting_text(health.cooloff_max_s)} must not be less than cooloff {setting_text(health.cooloff_s)}; "
            f"raise it by {health.cooloff_s - health.cooloff_max_s:.6g} s",
        )
    if health.plugins_dir.exists() and not health.plugins_dir.is_dir():
        raise ConfigError("health.plugins_dir", f"{str(health.plugins_dir)!r} is a file, not a directory")


def _at_least(least: int, values: Mapping[str, float]) -> None:
    for key, value in values.items():
        if value < least:
            raise ConfigError(key, f"{value} must be at least {least}")


def _exceeds(key: str, value: float, least: float, named: str, so_that: str) -> None:
    if not value > least:
        raise ConfigError(
            key,
            f"{setting_text(value)} must exceed {named}, so that {so_that}; raise it by more than "
            f"{least - value:.6g} s",
        )


def _check_files(table: str, files: Mapping[str, Path | None]) -> None:
    for key, path in files.items():
        if path is None:
            continue
        if not path.is_file():
            raise ConfigError(
                f"{table}.{key}", f"{str(path)!r} {'is not a file' if path.exists() else 'does not exist'}"
            )
        if not os.access(path, os.R_OK):
            raise ConfigError(f"{table}.{key}", f"{str(path)!r} cannot be read: permission denied")


def _check_certificates(keys: str, tls: Tls) -> None:
    if (tls.ca or tls.cert) and (defect := certificate_files.find_problem(tls)) is not None:
        which, why = defect
        raise ConfigError(f"{keys}{which}", why)


def _check_secrets(files: Mapping[str, Path | None]) -> None:
    for key, path in files.items():
        wrong = find_problem(path) if path is not None else None
        if wrong is not None:
            raise ConfigError(key, wrong)
