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
"""Of keys that SIGHUP reloads."""


def _file_key(name: str) -> str:
    """Files say drain_timeout, since the value has its unit; code says drain_timeout_s."""
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
            description="A file with etcd's password in one line; only its owner and group may read it.",
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
            description="The key of cert, PEM, without a passphrase; only its owner and group may read it.",
            examples=['"/etc/elasticd/node.key"'],
        ),
    ] = None


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_file_key):
    bind: Annotated[
        str,
        Meta(
            description="The address to listen on. Without the token only /metrics, /healthz and /readyz are open, on "
            "any address. Other nodes' agents, and `elasticd logs` from other machines, need one that they can reach."
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Meta(description="The port to listen on; 0 for a free one.")] = 9411
    token_file: Annotated[
        Path | None,
        Meta(
            description="A file with the token in one line, the same on all nodes; only its owner and group may read "
            "it. Without it, only the local socket grants access.",
            examples=['"/etc/elasticd/token"'],
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        Meta(description="The server's certificate, PEM; it enables HTTPS.", examples=['"/etc/elasticd/x.pem"']),
    ] = None
    tls_key: Annotated[
        Path | None,
        Meta(
            description="The key of tls_cert, PEM; only its owner and group may read it.",
            examples=['"/etc/elasticd/x.key"'],
        ),
    ] = None
    socket: Annotated[
        Path | None,
        Meta(
            description="The local socket; the kernel identifies its clients. Not given: agent.sock in run_dir.",
            examples=['"/run/elasticd/agent.sock"'],
        ),
    ] = None
    tls_ca: Annotated[
        Path | None,
        Meta(
            description="The authority of the other nodes' certificates, PEM; without it, the system's authorities.",
            examples=['"/etc/elasticd/ca.pem"'],
        ),
    ] = None
    tls_name: Annotated[
        str | None,
        Meta(
            description="The common name in the other nodes' certificates: for pods, whose addresses change. Without "
            "it, each certificate must be for the address in its node's status.",
            examples=['"elasticd-agent"'],
        ),
    ] = None
    users: Annotated[
        tuple[str, ...],
        Meta(
            description="Users with access to the local socket besides root and the agent's own user. They can submit "
            "jobs, and so run anything that [limits] allows, as any user that it names.",
            examples=['["alice"]'],
        ),
    ] = ()
    groups: Annotated[
        tuple[str, ...],
        Meta(description="Groups with the same access.", examples=['["elasticd"]']),
    ] = ()


class HealthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_file_key):
    every_s: Annotated[Seconds, Meta(description="Interval of the health checks.", extra=RELOADABLE)] = Seconds(60)
    disk_free_min_bytes: Annotated[
        Size,
        Meta(
            description="The node is unhealthy with less free space in directories, state_dir or log_dir.",
            extra=RELOADABLE,
        ),
    ] = Size(1 << 30)
    directories: Annotated[
        tuple[Path, ...],
        Meta(
            description="More directories that must be writable and have free space, such as those of checkpoints.",
            examples=['["/checkpoints"]'],
            extra=RELOADABLE,
        ),
    ] = ()
    gpus: Annotated[
        int | None,
        Meta(
            description="Expected number of GPUs. Not given: the highest number ever seen here.",
            examples=["8"],
            extra=RELOADABLE,
        ),
    ] = None
    plugins_dir: Annotated[
        Path,
        Meta(
            description="Executables in it are run as health checks: exit code 0 is healthy, otherwise the first line "
            "of output is the reason. It need not exist.",
            extra=RELOADABLE,
        ),
    ] = Path("/etc/elasticd/health.d")
    plugin_timeout_s: Annotated[
        Seconds, Meta(description="A plugin that takes longer counts as failed.", extra=RELOADABLE)
    ] = Seconds(10)
    all_reduce: Annotated[
        bool,
        Meta(description="Test a short all-reduce among the slots before the node is registered.", extra=RELOADABLE),
    ] = True
    strikes: Annotated[
        int, Meta(description="The node is quarantined after this many consecutive failures.", extra=RELOADABLE)
    ] = 2
    cooloff_s: Annotated[
        Seconds, Meta(description="Duration of the first quarantine; it doubles each time.", extra=RELOADABLE)
    ] = Seconds(60)
    cooloff_max_s: Annotated[Seconds, Meta(description="Longest quarantine.", extra=RELOADABLE)] = Seconds(3600)


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_file_key):
    """Restrictions on jobs; None: no restriction."""

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

    node: Annotated[str, Meta(description="The node's unique name. Not given: the host name.", examples=['"node-17"'])]
    slots: Annotated[
        int | Literal["auto"],
        Meta(description="Workers this node takes at once. auto: one per GPU, or per CPU where there is no GPU."),
    ] = "auto"
    labels: Annotated[
        tuple[str, ...],
        Meta(
            description="Labels of the node, shown by elasticd nodes.",
            examples=['["rack=7", "a100"]'],
            extra=RELOADABLE,
        ),
    ] = ()
    user: Annotated[
        str | None,
        Meta(
            description="The user of jobs that name none. Not given: the agent's own user.",
            examples=['"elasticd"'],
        ),
    ] = None
    local_addr: Annotated[
        str | None,
        Meta(
            description="The address of this machine for other nodes. Not given: that of the interface that reaches "
            "the store.",
            examples=['"10.0.0.17"'],
        ),
    ] = None
    state_dir: Annotated[
        Path, Meta(description="State that outlives the agent: jobs, their logs and events, a local store. Mode 0700.")
    ] = Path("/var/lib/elasticd")
    run_dir: Annotated[Path, Meta(description="Sockets and other files that need not outlive a reboot.")] = Path(
        "/run/elasticd"
    )
    log_dir: Annotated[
        Path | None,
        Meta(
            description="Directory of the agent's own event log. Not given: logs in state_dir.",
            examples=['"/var/log/elasticd"'],
        ),
    ] = None
    drain_timeout_s: Annotated[
        Seconds,
        Meta(
            description="Time for jobs to leave this node (pause, checkpoint, end) when the agent is stopped or the "
            "node drained, before they are killed.",
            extra=RELOADABLE,
        ),
    ] = Seconds(60)
    adopt_timeout_s: Annotated[
        Seconds,
        Meta(
            description="How long jobs on this node continue without an agent before they leave by themselves.",
            extra=RELOADABLE,
        ),
    ] = Seconds(60)
    keep_ended_s: Annotated[
        Seconds, Meta(description="Retention of records and logs of ended jobs.", extra=RELOADABLE)
    ] = Seconds(7 * 86400)
    lease_s: Annotated[
        Seconds, Meta(description="A node counts as lost when it has not renewed its lease for this long.")
    ] = Seconds(3)
    renewal_s: Annotated[Seconds, Meta(description="Interval between two renewals of the lease.")] = Seconds(1)
    store: StoreSettings = StoreSettings()
    http: HttpSettings = HttpSettings()
    health: HealthSettings = HealthSettings()
    limits: Limits = Limits()
    jobs: Annotated[
        tuple[JobFile, ...],
        Meta(
            description="Jobs that this node submits by itself, [[job]], with the keys of job files.", extra=RELOADABLE
        ),
    ] = ()

    @property
    def socket_path(self) -> Path:
        """The local socket."""
        return self.http.socket or self.run_dir / "agent.sock"

    @property
    def logs(self) -> Path:
        return self.log_dir or self.state_dir / "logs"

    def devices(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        """The GPU of each slot, as in CUDA_VISIBLE_DEVICES; () where slots are not GPUs."""
        gpus = visible_gpus(environ)
        return gpus if len(gpus) >= self.slot_count(environ) else ()

    def slot_count(self, environ: Mapping[str, str]) -> int:
        """How many workers this node takes at once."""
        return self.slots if isinstance(self.slots, int) else len(visible_gpus(environ)) or cpu_count()
