"""agent.toml as one frozen value; docs/agent.md, `elasticd config example` and the variables are made from it.

A key is Annotated with its help, an example where the default is none, and RELOADABLE if SIGHUP reloads it.

Times and sizes are written with their unit in the file ("60s", "1GB") and are numbers here, with the unit in the name.
A key that SIGHUP may change is read by the code at each use; all others are fixed when the agent starts: a reload keeps
their values, and says which new ones count after a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from elasticd_agent.config.quantities import MAX_SLOTS_PER_NODE, Seconds, Size
from elasticd_agent.system.gpus.devices import cpu_count, visible_gpus
from elasticd_daemon.config.decode import RELOADABLE
from elasticd_daemon.config.job_file import CpuWeight, Pids

NotNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]


def _file_key(name: str) -> str:
    """Files say drain_timeout, since the value has its unit; code says drain_timeout_s."""
    return "job" if name == "jobs" else name.removesuffix("_s").removesuffix("_bytes")


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_file_key):
    """The table [store]: where the agents of a cluster meet."""

    backend: Annotated[
        Literal["local", "etcd"],
        "Where nodes, jobs and their history are kept. local: on this node's disk, for a node that "
        "works alone; etcd: shared by all nodes whose agents name the same etcd.",
    ] = "local"
    endpoints: Annotated[
        tuple[str, ...],
        "etcd's addresses, HOST[:PORT]; https:// in front means TLS. Port 2379 if none is given.",
        '["https://10.0.0.1:2379"]',
    ] = ()
    user: Annotated[str | None, "etcd's user, with password_file.", '"elasticd"'] = None
    password_file: Annotated[
        Path | None,
        "A file with etcd's password in one line; only its owner and group may read it.",
        '"/etc/elasticd/etcd.password"',
    ] = None
    ca: Annotated[
        Path | None,
        "The certificate authority of etcd's certificate, PEM; without it, the system's.",
        '"/etc/elasticd/ca.pem"',
    ] = None
    cert: Annotated[Path | None, "This node's certificate for etcd (mTLS), PEM.", '"/etc/elasticd/node.pem"'] = None
    key: Annotated[
        Path | None,
        "The key of cert, PEM, without a passphrase; only its owner and group may read it.",
        '"/etc/elasticd/node.key"',
    ] = None


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_file_key):
    """The table [http]: the agent's port and socket, and who may use them."""

    bind: Annotated[
        str,
        "The address to listen on. Without the token only /metrics, /healthz and /readyz are open, on "
        "any address. Other nodes' agents, and `elasticd logs` from other machines, need one that they can reach.",
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), "The port to listen on; 0 for a free one."] = 9411
    token_file: Annotated[
        Path | None,
        "A file with the token in one line, the same on all nodes; only its owner and group may read "
        "it. Without it, only the local socket grants access.",
        '"/etc/elasticd/token"',
    ] = None
    agents_token_file: Annotated[
        Path | None,
        "A file with the token that agents send each other something derived from, the same on all nodes; it opens "
        "nothing else. A node that must not submit jobs has it in place of token_file. Not given: token_file.",
        '"/etc/elasticd/agents-token"',
    ] = None
    tokens: Annotated[
        dict[str, Path],
        "Further tokens by name, a file for each, for people and programs: their names are in records and in the audit "
        "log.",
        '{ alice = "/etc/elasticd/tokens/alice" }',
    ] = msgspec.field(default_factory=dict)
    read_only: Annotated[
        tuple[str, ...], "Names in tokens: these may read jobs, logs and nodes, and change nothing.", '["grafana"]'
    ] = ()
    tls_cert: Annotated[Path | None, "The server's certificate, PEM; it enables HTTPS.", '"/etc/elasticd/x.pem"'] = None
    tls_key: Annotated[
        Path | None, "The key of tls_cert, PEM; only its owner and group may read it.", '"/etc/elasticd/x.key"'
    ] = None
    socket: Annotated[
        Path | None,
        "The local socket; the kernel identifies its clients. Not given: agent.sock in run_dir.",
        '"/run/elasticd/agent.sock"',
    ] = None
    tls_ca: Annotated[
        Path | None,
        "The authority of the other nodes' certificates, PEM; without it, the system's authorities.",
        '"/etc/elasticd/ca.pem"',
    ] = None
    tls_name: Annotated[
        str | None,
        "The common name in the other nodes' certificates: for pods, whose addresses change. Without "
        "it, each certificate must be for the address in its node's status.",
        '"elasticd-agent"',
    ] = None
    users: Annotated[
        tuple[str, ...],
        "Users with access to the local socket besides root and the agent's own user. They can submit "
        "jobs, and so run anything that [limits] allows, as any user that it names.",
        '["alice"]',
    ] = ()
    groups: Annotated[tuple[str, ...], "Groups with the same access.", '["elasticd"]'] = ()


class HealthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_file_key):
    """The table [health]: what is checked, how often, and what follows from failures."""

    every_s: Annotated[Seconds, "Interval of the health checks.", RELOADABLE] = Seconds(60)
    disk_free_min_bytes: Annotated[
        Size, "With less free space the check of a directory fails: directories, state_dir and log_dir.", RELOADABLE
    ] = Size(1 << 30)
    directories: Annotated[
        tuple[Path, ...],
        "Shared directories that must be writable and have free space, such as those of checkpoints; while one fails, "
        "no job that uses it is started here.",
        '["/checkpoints"]',
        RELOADABLE,
    ] = ()
    gpus: Annotated[
        NotNegative | None, "Expected number of GPUs. Not given: the highest number ever seen here.", "8", RELOADABLE
    ] = None
    plugins_dir: Annotated[
        Path,
        "Executables in it are run as health checks: exit code 0 is healthy, otherwise the first line "
        "of output is the reason. It need not exist.",
        RELOADABLE,
    ] = Path("/etc/elasticd/health.d")
    plugin_timeout_s: Annotated[Seconds, "A plugin that takes longer counts as failed.", RELOADABLE] = Seconds(10)
    kubernetes: Annotated[
        Literal["off", "read", "report"],
        "In a pod. read: a taint or condition of this Kubernetes node that is listed below makes the node unhealthy; "
        "report: also write the condition ElasticdGPUQuarantined.",
        RELOADABLE,
    ] = "off"
    kubernetes_taints: Annotated[
        tuple[str, ...], "Such taints: KEY or KEY:EFFECT, with * as in shells; NVSentinel's.", RELOADABLE
    ] = ("nvidia.com/*-error", "AggregatedNodeHealth")
    kubernetes_conditions: Annotated[
        tuple[str, ...],
        "Such conditions with the status True; NVSentinel's, then node-problem-detector's.",
        RELOADABLE,
    ] = (
        *("Gpu*Watch", "SysLogsXIDError", "SysLogsSXIDError", "SysLogsGPUFallenOff", "NVSwitchFatalError"),
        *("NVSwitchDown", "KernelDeadlock", "ReadonlyFilesystem", "XfsShutdown", "CperHardwareErrorFatal"),
    )
    all_reduce: Annotated[
        bool, "Test a short all-reduce among the slots before the node is registered.", RELOADABLE
    ] = True
    strikes: Annotated[
        Positive,
        "A check counts once it failed so often among twice as many runs: the node is quarantined.",
        RELOADABLE,
    ] = 2
    cooloff_s: Annotated[Seconds, "Duration of the first quarantine; it doubles each time.", RELOADABLE] = Seconds(60)
    cooloff_max_s: Annotated[Seconds, "Longest quarantine.", RELOADABLE] = Seconds(3600)


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_file_key):
    """Restrictions on jobs; None: no restriction."""

    commands: Annotated[
        tuple[str, ...] | None,
        "Scripts and programs that jobs may start: absolute paths; one that ends in / stands for "
        "everything below it. Not given: any.",
        '["/srv/train/"]',
        RELOADABLE,
    ] = None
    users: Annotated[
        tuple[str, ...] | None, "Users that jobs may run as. Not given: any.", '["trainer"]', RELOADABLE
    ] = None
    directories: Annotated[
        tuple[Path, ...] | None,
        "Where a job's workdir and checkpoint_dir may be: these directories, or s3://BUCKET/PREFIX, and what is below "
        "them. Not given: anywhere.",
        '["/home", "/checkpoints"]',
        RELOADABLE,
    ] = None
    job_memory_bytes: Annotated[
        Size | None,
        "The most memory of one job on this node, by a control group (elasticd docs systemd); a job's own "
        "limits may be lower. Applies to jobs that start later, like the two keys below.",
        '"256GB"',
        RELOADABLE,
    ] = None
    job_pids: Annotated[Pids | None, "The most processes and threads of one job.", "8192", RELOADABLE] = None
    job_cpu_weight: Annotated[
        CpuWeight | None,
        "The highest share of one job in busy processors, 1 to 10,000; 100 is usual.",
        "100",
        RELOADABLE,
    ] = None
    jobs_per_submitter: Annotated[
        Positive | None,
        "Jobs that have not ended of one token, or of one user of the local socket. Not given: any number.",
        "20",
        RELOADABLE,
    ] = None


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=_file_key):
    """One node's settings, all of them."""

    node: Annotated[str, "The node's unique name. Not given: the host name.", '"node-17"']
    slots: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_SLOTS_PER_NODE)] | Literal["auto"],
        "Workers this node takes at once. auto: one per GPU, or per CPU where there is no GPU.",
    ] = "auto"
    labels: Annotated[
        tuple[str, ...], "Labels of the node, shown by elasticd nodes.", '["rack=7", "a100"]', RELOADABLE
    ] = ()
    user: Annotated[str | None, "The user of jobs that name none. Not given: the agent's own user.", '"elasticd"'] = (
        None
    )
    local_addr: Annotated[
        str | None,
        "The address of this machine for other nodes. Not given: that of the interface that reaches the store, or "
        "of the default route where that is loopback.",
        '"10.0.0.17"',
    ] = None
    state_dir: Annotated[
        Path, "State that outlives the agent: jobs, their logs and events, a local store. Mode 0700."
    ] = Path("/var/lib/elasticd")
    run_dir: Annotated[Path, "Sockets and other files that need not outlive a reboot."] = Path("/run/elasticd")
    log_dir: Annotated[
        Path | None, "Directory of the agent's own event log. Not given: logs in state_dir.", '"/var/log/elasticd"'
    ] = None
    scheduler: Annotated[
        bool,
        "Whether this agent may be the one that schedules jobs. false: for a node whose etcd user must not write other "
        "nodes' records; some agents have to be true.",
    ] = True
    drain_timeout_s: Annotated[
        Seconds,
        "Time for jobs to leave this node (pause, checkpoint, end) when the agent is stopped or the "
        "node drained, before they are killed. A job takes no longer than what counted at its start.",
        RELOADABLE,
    ] = Seconds(60)
    preemption_notices: Annotated[
        tuple[str, ...],
        "Services that are asked whether this machine is about to be taken away: aws, gcp, azure, kubernetes, or "
        "SERVICE=URL. A notice drains the node, with the notice as the reason, until it is withdrawn.",
        '["aws"]',
    ] = ()
    adopt_timeout_s: Annotated[
        Seconds, "How long jobs on this node continue without an agent before they leave by themselves.", RELOADABLE
    ] = Seconds(60)
    refuse_timeout_s: Annotated[
        Seconds,
        "How long a job stays pending that every node refuses which could run it, as where its script does not exist, "
        "before it has failed. The agent that schedules counts: give all agents the same.",
        RELOADABLE,
    ] = Seconds(60)
    keep_ended_s: Annotated[Seconds, "Retention of records and logs of ended jobs.", RELOADABLE] = Seconds(7 * 86400)
    lease_s: Annotated[Seconds, "A node counts as lost when it has not renewed its lease for this long."] = Seconds(3)
    renewal_s: Annotated[Seconds, "Interval between two renewals of the lease."] = Seconds(1)
    store: StoreSettings = StoreSettings()
    http: HttpSettings = HttpSettings()
    health: HealthSettings = HealthSettings()
    limits: Limits = Limits()

    @property
    def socket_path(self) -> Path:
        """The local socket."""
        return self.http.socket or self.run_dir / "agent.sock"

    @property
    def logs(self) -> Path:
        """The directory of the agent's own event log."""
        return self.log_dir or self.state_dir / "logs"

    def devices(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        """The GPU of each slot, as in CUDA_VISIBLE_DEVICES; () where slots are not GPUs."""
        gpus = visible_gpus(environ)
        return gpus if len(gpus) >= self.slot_count(environ) else ()

    def slot_count(self, environ: Mapping[str, str]) -> int:
        """The number of workers that this node takes at once."""
        return self.slots if isinstance(self.slots, int) else len(visible_gpus(environ)) or cpu_count()
