"""agent.toml as one frozen value; docs/agent.md, `elasticd config example` and the variables are made from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from elasticd_agent.config.job_file import JobFile
from elasticd_agent.config.quantities import Seconds, Size
from elasticd_agent.system.devices import cpu_count, visible_gpus

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
