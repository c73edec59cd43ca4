"""agent.toml, and the ELASTICD_ variables that stand in for its keys, as one frozen `Settings`.

It exists so that a mistake in a node's configuration is one line at the start (file, key, what is wrong, what would be
right), never a surprise in the third month. It reads the files it is told of only to see that secrets are secret.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from elasticd.errors import UsageError
from elasticd_agent.config import Rendezvous
from elasticd_agent.daemon.decoding import KeyWrong, decode
from elasticd_agent.daemon.documents import kind_of, parse
from elasticd_agent.daemon.jobfile import NOT_KEYS, JobFile, check
from elasticd_agent.daemon.quantities import Seconds, Size
from elasticd_agent.devices import cpu_count, visible_gpus


def _in_files(name: str) -> str:
    """Times are called drain_timeout in files, where they carry their unit, and drain_timeout_s in code."""
    return "job" if name == "jobs" else name.removesuffix("_s").removesuffix("_bytes")


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_in_files):
    backend: Literal["local", "etcd"] = "local"
    endpoints: Annotated[tuple[str, ...], Meta(examples=['["https://10.0.0.1:2379"]'])] = ()
    user: str | None = None
    password_file: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_in_files):
    bind: str = "127.0.0.1"
    port: int = 9411
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    socket: Path | None = None


class HealthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_in_files):
    every_s: Seconds = Seconds(60)
    disk_free_min_bytes: Size = Size(1 << 30)
    directories: tuple[Path, ...] = ()
    plugins_dir: Path = Path("/etc/elasticd/health.d")
    plugin_timeout_s: Seconds = Seconds(10)
    all_reduce: bool = True
    strikes: int = 2
    cooloff_s: Seconds = Seconds(60)
    cooloff_max_s: Seconds = Seconds(3600)


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_in_files):
    commands: tuple[str, ...] | None = None
    users: tuple[str, ...] | None = None
    directories: tuple[Path, ...] | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_in_files):
    node: str
    slots: int | Literal["auto"] = "auto"
    labels: tuple[str, ...] = ()
    user: str | None = None
    local_addr: str | None = None
    state_dir: Path = Path("/var/lib/elasticd")
    run_dir: Path = Path("/run/elasticd")
    log_dir: Path | None = None
    drain_timeout_s: Seconds = Seconds(60)
    adopt_timeout_s: Seconds = Seconds(60)
    keep_ended_s: Seconds = Seconds(7 * 86400)
    lease_s: Seconds = Seconds(3)
    renewal_s: Seconds = Seconds(1)
    store: StoreSettings = StoreSettings()
    http: HttpSettings = HttpSettings()
    health: HealthSettings = HealthSettings()
    limits: Limits = Limits()
    jobs: tuple[JobFile, ...] = ()

    @property
    def socket(self) -> Path:
        """Where the daemon is asked on this machine."""
        return self.http.socket or self.run_dir / "agent.sock"

    def devices(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        """The GPU each slot stands for, as CUDA_VISIBLE_DEVICES spells them; () where slots are not GPUs."""
        gpus = visible_gpus(environ)
        return gpus if len(gpus) >= self.slot_count(environ) else ()

    def slot_count(self, environ: Mapping[str, str]) -> int:
        """How many workers this node takes at once: one per GPU, or per CPU where there is none."""
        return self.slots if isinstance(self.slots, int) else len(visible_gpus(environ)) or cpu_count()


def load(path: Path | None, environ: Mapping[str, str]) -> Settings:
    """What `path` (None: nothing but defaults) and the ELASTICD_ variables say. Raises UsageError: FILE: KEY: …"""
    where = str(path) if path is not None else "the environment"
    try:
        table = {} if path is None else parse(_read(path), kind_of(path.name), where)
        return _settings(table)
    except KeyWrong as error:
        raise UsageError(f"{where}: {error}") from None


def _settings(table: dict[str, Any]) -> Settings:
    settings = decode({"node": socket.gethostname(), **table}, Settings, NOT_KEYS)
    for number, job in enumerate(settings.jobs):
        try:
            check(job)
        except KeyWrong as error:
            raise error.inside(f"job[{number}]") from None
    return settings


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from None


def meets(settings: Settings) -> Rendezvous:
    """Where this daemon and its runners find their store. Raises UsageError when a password cannot be read."""
    if settings.store.backend == "local":
        return Rendezvous(node=settings.node, local_addr=settings.local_addr)
    raise UsageError("store.backend: etcd comes soon")
