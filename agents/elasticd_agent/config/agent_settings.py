"""agent.toml, and the ELASTICD_ variables that stand in for its keys, as one frozen `Settings`.

It exists so that everything an operator can choose for a node is in one value, described where it is declared: the
reference in docs/agent.md, the template of `elasticd config example` and the names of the variables are made from
these structs. What contradicts itself is found by validate.py; nothing here opens a socket or makes a file.
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
from elasticd_agent.config.decode import ConfigError, KeyHints, decode
from elasticd_agent.config.documents import format_of, parse
from elasticd_agent.config.env_variables import read_overrides
from elasticd_agent.config.job_file import JOB_KEY_HINTS as NOT_A_JOBS
from elasticd_agent.config.job_file import JobFile
from elasticd_agent.config.quantities import Seconds, Size
from elasticd_agent.config.validate import check_settings
from elasticd_agent.system.devices import cpu_count, visible_gpus

DEFAULT_FILE = Path("/etc/elasticd/agent.toml")
MAX_BYTES = 1 << 20
"""Bytes of agent.toml: room for many jobs."""
RELOADABLE = {"reload": True}
"""Of keys whose new value counts after SIGHUP."""


def _file_key(name: str) -> str:
    """Times are called drain_timeout in files, where they carry their unit, and drain_timeout_s in code."""
    return "job" if name == "jobs" else name.removesuffix("_s").removesuffix("_bytes")


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_file_key):
    backend: Annotated[
        Literal["local", "etcd"],
        Meta(
            description="Where nodes, jobs and their history are kept. local: on this node's disk, for a node that "
            "works alone; etcd: shared by all nodes whose agents name the same etcd."
        ),
    ] = "local"
    endpoints: Annotated[
        tuple[str, ...],
        Meta(
            description="etcd's addresses, HOST[:PORT]; https:// in front means TLS. Port 2379 if none is given.",
            examples=['["https://10.0.0.1:2379"]'],
        ),
    ] = ()
    user: Annotated[str | None, Meta(description="etcd's user, with password_file.", examples=['"elasticd"'])] = None
    password_file: Annotated[
        Path | None,
        Meta(
            description="A file that holds etcd's password in one line; nobody else may read it.",
            examples=['"/etc/elasticd/etcd.password"'],
        ),
    ] = None
    ca: Annotated[
        Path | None,
        Meta(
            description="The certificate authority of etcd's certificate, PEM; without it, the system's.",
            examples=['"/etc/elasticd/ca.pem"'],
        ),
    ] = None
    cert: Annotated[
        Path | None,
        Meta(description="This node's certificate for etcd (mTLS), PEM.", examples=['"/etc/elasticd/node.pem"']),
    ] = None
    key: Annotated[
        Path | None,
        Meta(
            description="The key of cert, PEM, without a passphrase; nobody else may read it.",
            examples=['"/etc/elasticd/node.key"'],
        ),
    ] = None


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_file_key):
    bind: Annotated[
        str,
        Meta(
            description="The address to listen on. On others than loopback, too, only /metrics, /healthz and /readyz "
            "are open without the token. Other nodes' daemons and `elasticd logs` from other machines need one that "
            "they can reach."
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Meta(description="The port to listen on; 0 for a free one.")] = 9411
    token_file: Annotated[
        Path | None,
        Meta(
            description="A file that holds the token, one line, the same on all nodes; nobody else may read it. "
            "Without it, only the local socket can ask and change.",
            examples=['"/etc/elasticd/token"'],
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        Meta(
            description="The server's certificate, PEM: with it, HTTPS is spoken.", examples=['"/etc/elasticd/x.pem"']
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        Meta(description="The key of tls_cert, PEM; nobody else may read it.", examples=['"/etc/elasticd/x.key"']),
    ] = None
    socket: Annotated[
        Path | None,
        Meta(
            description="The local socket; who asks there is known by the kernel's word. Not given: agent.sock in "
            "run_dir.",
            examples=['"/run/elasticd/agent.sock"'],
        ),
    ] = None
    tls_ca: Annotated[
        Path | None,
        Meta(
            description="The authority that signed the other nodes' certificates, PEM; without it, the system's count.",
            examples=['"/etc/elasticd/ca.pem"'],
        ),
    ] = None
    tls_name: Annotated[
        str | None,
        Meta(
            description="The name that the other nodes' certificates are for, where all have one and the same: pods, "
            "whose addresses come and go. Without it, each must be for the address in its node's card.",
            examples=['"elasticd-agent"'],
        ),
    ] = None
    users: Annotated[
        tuple[str, ...],
        Meta(
            description="Who may ask and change through the local socket besides root and the agent's own user. They "
            "can hand in jobs, so they can run whatever [limits] lets run, as any user that it names.",
            examples=['["alice"]'],
        ),
    ] = ()
    groups: Annotated[
        tuple[str, ...],
        Meta(description="The same for whoever is in one of these groups.", examples=['["elasticd"]']),
    ] = ()


class HealthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_file_key):
    every_s: Annotated[Seconds, Meta(description="How often the node is examined.", extra=RELOADABLE)] = Seconds(60)
    disk_free_min_bytes: Annotated[
        Size,
        Meta(
            description="The node is not well when less is free where directories, state_dir and log_dir are.",
            extra=RELOADABLE,
        ),
    ] = Size(1 << 30)
    directories: Annotated[
        tuple[Path, ...],
        Meta(
            description="More directories that must be writable and have room: where checkpoints go, say.",
            examples=['["/checkpoints"]'],
            extra=RELOADABLE,
        ),
    ] = ()
    gpus: Annotated[
        int | None,
        Meta(
            description="How many GPUs there should be. Not given: as many as were ever seen here.",
            examples=["8"],
            extra=RELOADABLE,
        ),
    ] = None
    plugins_dir: Annotated[
        Path,
        Meta(
            description="Executables in it are run at each look: exit code 0 is well, the first line says what is "
            "wrong. It need not exist.",
            extra=RELOADABLE,
        ),
    ] = Path("/etc/elasticd/health.d")
    plugin_timeout_s: Annotated[
        Seconds, Meta(description="A plugin that takes longer is a finding itself.", extra=RELOADABLE)
    ] = Seconds(10)
    all_reduce: Annotated[
        bool, Meta(description="Try a quick all-reduce among the slots before joining.", extra=RELOADABLE)
    ] = True
    strikes: Annotated[
        int, Meta(description="The node is set aside when it is to blame so many times in a row.", extra=RELOADABLE)
    ] = 2
    cooloff_s: Annotated[
        Seconds, Meta(description="For how long, the first time; it doubles each time.", extra=RELOADABLE)
    ] = Seconds(60)
    cooloff_max_s: Annotated[Seconds, Meta(description="For how long at most.", extra=RELOADABLE)] = Seconds(3600)


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_file_key):
    """What jobs may be; None means anything."""

    commands: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="Scripts and programs that jobs may start: absolute paths; one that ends in / stands for "
            "everything below it. Not given: any.",
            examples=['["/srv/train/"]'],
            extra=RELOADABLE,
        ),
    ] = None
    users: Annotated[
        tuple[str, ...] | None,
        Meta(description="Users that jobs may run as. Not given: any.", examples=['["trainer"]'], extra=RELOADABLE),
    ] = None
    directories: Annotated[
        tuple[Path, ...] | None,
        Meta(
            description="Where a job's workdir and checkpoint_dir may be: these directories and what is below them. "
            "Not given: anywhere.",
            examples=['["/home", "/checkpoints"]'],
            extra=RELOADABLE,
        ),
    ] = None


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_file_key):
    """One node's settings, all of them."""

    node: Annotated[
        str, Meta(description="The node's name, unlike any other's. Not given: the host name.", examples=['"node-17"'])
    ]
    slots: Annotated[
        int | Literal["auto"],
        Meta(description="Workers this node takes at once. auto: one per GPU, or per CPU where there is no GPU."),
    ] = "auto"
    labels: Annotated[
        tuple[str, ...],
        Meta(
            description="What else there is to say of the node, shown by elasticd nodes.",
            examples=['["rack=7", "a100"]'],
            extra=RELOADABLE,
        ),
    ] = ()
    user: Annotated[
        str | None,
        Meta(
            description="Who jobs that name no user run as. Not given: whoever the daemon runs as.",
            examples=['"elasticd"'],
        ),
    ] = None
    local_addr: Annotated[
        str | None,
        Meta(
            description="Which of this machine's addresses other nodes shall use. Not given: the one of the interface "
            "that reaches the store.",
            examples=['"10.0.0.17"'],
        ),
    ] = None
    state_dir: Annotated[
        Path, Meta(description="What outlives the daemon: jobs, their logs and events, a local store. Mode 0700.")
    ] = Path("/var/lib/elasticd")
    run_dir: Annotated[Path, Meta(description="Sockets and what need not outlive a reboot.")] = Path("/run/elasticd")
    log_dir: Annotated[
        Path | None,
        Meta(description="The daemon's own event log. Not given: logs in state_dir.", examples=['"/var/log/elasticd"']),
    ] = None
    drain_timeout_s: Annotated[
        Seconds,
        Meta(
            description="How long jobs have to leave this node (hold, checkpoint, end) when the daemon is stopped or "
            "the node drained, before they are killed.",
            extra=RELOADABLE,
        ),
    ] = Seconds(60)
    adopt_timeout_s: Annotated[
        Seconds,
        Meta(
            description="How long jobs on this node go on without a daemon before they leave by themselves.",
            extra=RELOADABLE,
        ),
    ] = Seconds(60)
    keep_ended_s: Annotated[
        Seconds, Meta(description="How long records and logs of ended jobs are kept.", extra=RELOADABLE)
    ] = Seconds(7 * 86400)
    lease_s: Annotated[Seconds, Meta(description="A node is lost when it has not renewed its lease for so long.")] = (
        Seconds(3)
    )
    renewal_s: Annotated[Seconds, Meta(description="How often it renews it.")] = Seconds(1)
    store: StoreSettings = StoreSettings()
    http: HttpSettings = HttpSettings()
    health: HealthSettings = HealthSettings()
    limits: Limits = Limits()
    jobs: Annotated[
        tuple[JobFile, ...],
        Meta(description="Jobs this node hands in by itself, [[job]], written as job files are.", extra=RELOADABLE),
    ] = ()

    @property
    def socket_path(self) -> Path:
        """Where the daemon is asked on this machine."""
        return self.http.socket or self.run_dir / "agent.sock"

    @property
    def logs(self) -> Path:
        return self.log_dir or self.state_dir / "logs"

    def devices(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        """The GPU each slot stands for, as CUDA_VISIBLE_DEVICES spells them; () where slots are not GPUs."""
        gpus = visible_gpus(environ)
        return gpus if len(gpus) >= self.slot_count(environ) else ()

    def slot_count(self, environ: Mapping[str, str]) -> int:
        """How many workers this node takes at once."""
        return self.slots if isinstance(self.slots, int) else len(visible_gpus(environ)) or cpu_count()


_SECRETS = "secrets are in files of their own; write"
_TABLE_NAMES = "tables are [store], [http], [health], [limits] and [[job]]"
KEY_HINTS: KeyHints = {
    JobFile: NOT_A_JOBS,
    StoreSettings: {
        "password": f"{_SECRETS} password_file",
        "token": f"{_SECRETS} password_file",
        "endpoint": 'write endpoints = ["HOST:PORT"]',
        "cacert": "write ca",
        "tls_ca": "write ca",
        "tls_cert": "write cert",
        "tls_key": "write key",
    },
    HttpSettings: {"token": f"{_SECRETS} token_file", "host": "write bind", "address": "write bind"},
    NodeSettings: {
        **dict.fromkeys(
            (field.encode_name for field in msgspec.structs.fields(JobFile)), "it is a job's; write it below [[job]]"
        ),
        **dict.fromkeys(("agent", "elasticd"), f"this file is all about the agent; {_TABLE_NAMES}"),
        "jobs": "write [[job]], once per job",
        "etcd": 'write [store] with backend = "etcd"',
        "token": f"{_SECRETS} token_file below [http]",
        "token_file": "write it below [http]",
        "port": "write it below [http]",
        "bind": "write it below [http]",
        "endpoints": "write it below [store]",
        "backend": "write it below [store]",
        "node_id": "write node",
    },
}
"""What to say of keys that are not keys, but that people may well try."""


def load(path: Path | None, environ: Mapping[str, str], flags: Mapping[str, str] | None = None) -> NodeSettings:
    """What `path` (None: nothing but defaults), the ELASTICD_ variables and `flags` say; the later count more.

    Raises UsageError in one line, FILE: KEY: what is wrong; what would be right; or VARIABLE: …, or FLAG: ….
    """
    where = str(path) if path is not None else "the environment"
    table = {} if path is None else parse(_read(path), format_of(path.name), where, MAX_BYTES)
    overrides = read_overrides(NodeSettings, environ, flags or {})
    try:
        merged = _merge(table, overrides)
        if isinstance(store := merged.get("store"), dict) and store.get("backend") == "c10d":
            raise ConfigError(
                "store.backend",
                "c10d has no password, so that whoever reaches it could run programs here, and forgets all jobs when "
                "its host ends; write etcd, or local for a node that works alone",
            )
        settings = decode(merged, NodeSettings, KEY_HINTS)
        check_settings(settings, environ)
    except ConfigError as error:
        variable = overrides.get(error.key.partition("[")[0])
        raise UsageError(f"{variable.name}: {error.problem}" if variable else f"{where}: {error}") from None
    return settings


def _merge(table: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {"node": socket.gethostname(), **table}
    for key, variable in given.items():
        outer, dot, name = key.partition(".")
        if not dot:
            merged[key] = variable.value
        elif isinstance(merged.get(outer, {}), dict):
            merged[outer] = {**merged.get(outer, {}), name: variable.value}
    return merged


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o002:
                raise UsageError(f"{path}: anybody can write it, and so have this node run anything; chmod o-w {path}")
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from None
    except ValueError:
        raise UsageError(f"{str(path)!r} cannot be the name of a file") from None
