"""The rendezvous of a job's nodes, from --nnodes and --rdzv-…: a Rendezvous and fields of Policy.

Options mean what they mean to torchrun. Combinations that cannot work are refused with the alternative: a random job id
per node, a misspelled key. Several nodes with the static backend meet over c10d at the master's address; their ranks
give the order of the nodes, and a node can be replaced. Only a password's file is read.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from elasticd.errors import UsageError
from elasticd_agent.config.quantities import parse_count_range
from elasticd_agent.model.job import Policy, Rendezvous, Tls
from elasticd_agent.model.phrases import did_you_mean
from elasticd_agent.system.files import read_secret_any_mode
from elasticd_agent.system.network.addresses import parse_endpoint

BACKENDS = ("static", "c10d", "etcd")
DEFAULT_PORTS = {"c10d": 29400, "etcd": 2379}
"""torchrun's for c10d, etcd's own for its clients."""
_TORCHRUN_PORT, _THIS_MACHINE = 29500, "127.0.0.1"
"""The defaults of torchrun."""
DEFAULT_KEEP_ALIVE_ATTEMPTS = 3
"""torchrun's default of keep_alive_max_attempt."""

_ELASTICD_TIMES = (
    *("lease", "renewal", "store_timeout", "seen_timeout", "replace_timeout", "hold_timeout", "adopt_timeout"),
    *("store_away", "grow_debounce", "node_cooloff"),
)
_TIME_FIELDS: Mapping[str, str] = {
    # torchrun's
    "join_timeout": "join_timeout_s",
    "timeout": "join_timeout_s",
    "last_call_timeout": "last_call_timeout_s",
    "keep_alive_interval": "renewal_s",
    **{name: f"{name}_s" for name in _ELASTICD_TIMES},
}
_TLS_FIELDS: Mapping[str, str] = {
    "cacert": "ca",
    "ca_cert": "ca",
    "cert": "cert",
    "ssl_cert": "cert",
    "key": "key",
    "ssl_cert_key": "key",
}
_ETCD_KEYS = (*_TLS_FIELDS, "protocol", "user", "password", "password_file")
_C10D_KEYS = ("is_host", "store_type")
_IGNORED_KEYS = ("close_timeout", "heartbeat_timeout", "read_timeout", "use_libuv", "rank")
"""Keys of torchrun's rendezvous without a counterpart here: what they limit is limited by store_timeout and lease."""
CONF_KEYS = (*_TIME_FIELDS, "keep_alive_max_attempt", *_C10D_KEYS, *_ETCD_KEYS, *_IGNORED_KEYS)

_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")  # as torchrun reads them


@dataclass(frozen=True, slots=True)
class RendezvousOptions:
    """The meaning of the rendezvous options.

    `policy_fields` are Policy's keyword arguments; `job_id` None: a random one will do; `run` tells two runs of one job
    apart.
    """

    rendezvous: Rendezvous
    policy_fields: Mapping[str, Any]
    job_id: str | None
    run: str | None


def read_rendezvous(parsed: Namespace, environ: Mapping[str, str], cwd: Path) -> RendezvousOptions:
    """Return what the parsed options mean. Raises UsageError for a combination that cannot work, with the alternative.

    Several nodes need a name that all of them know. It is `--rdzv-id`, or Slurm's job, or follows from the master's
    address; a random one would leave each node waiting alone. Their run is a number, so that a later run of the same
    job differs from an earlier one whose records are still in the store.
    """
    try:
        low, high = parse_count_range(parsed.nnodes)
    except ValueError as error:
        raise UsageError(f"--nnodes {error}") from None
    conf = _parse_conf(parsed.rdzv_conf)
    numbers = _policy_fields(conf, parsed)
    node_rank = None
    if parsed.rdzv_backend == "static" and high > 1 and not parsed.standalone:
        node_rank = parsed.node_rank
        parsed = _static_as_c10d(parsed, low, high)
        conf.setdefault("is_host", str(int(node_rank == 0)))
    backend = _choose_backend(parsed, high)
    job_id = None if parsed.standalone or parsed.rdzv_id in ("none", "") else str(parsed.rdzv_id)
    if backend == "memory":
        return RendezvousOptions(
            Rendezvous(local_addr=parsed.local_addr, node=parsed.node_id), numbers, job_id, parsed.run
        )
    run = parsed.run
    if high > 1:
        job_id = job_id or environ.get("SLURM_JOB_ID") or None
        if job_id is None and backend == "c10d":  # its store is this job's alone; etcd's has other jobs as well
            where = re.sub("[^A-Za-z0-9.-]+", "-", parsed.rdzv_endpoint)
            job_id = f"{'c10d' if node_rank is None else 'static'}-{where}"
        if job_id is None:
            raise UsageError(
                f"--nnodes {parsed.nnodes} with --rdzv-backend etcd needs --rdzv-id JOB, the same on every node: "
                "random ids, one per node, cannot meet"
            )
        # It tells two runs of a job apart and must be the same on all nodes, too: Slurm counts its requeues.
        run = parsed.run if parsed.run is not None else environ.get("SLURM_RESTART_COUNT") or "0"
        if not (run.isascii() and run.isdecimal()):
            raise UsageError(f"--run {run!r}: several nodes need a number: a run with a higher one is the later run")
    _check_keys_of_backend(conf, backend)
    try:
        endpoints, secure = parse_endpoints_and_tls(parsed.rdzv_endpoint, backend)
    except UsageError as error:
        raise UsageError(f"--rdzv-endpoint {error}") from None
    user, password = _credentials(conf, environ, cwd) if backend == "etcd" else (None, None)
    return RendezvousOptions(
        Rendezvous(
            backend=backend,
            endpoints=endpoints,
            tls=_tls_files(conf, secure, cwd),
            user=user,
            password=password,
            is_host=_parse_is_host(conf),
            local_addr=parsed.local_addr or None,
            node=parsed.node_id,
            node_rank=node_rank,
            min_nodes=low,
            max_nodes=high,
        ),
        numbers,
        job_id,
        run,
    )


# ---- by which backend


def _choose_backend(parsed: Namespace, high: int) -> Literal["memory", "c10d", "etcd"]:
    """The store; "memory" for one node without a rendezvous."""
    name, endpoint, nodes = parsed.rdzv_backend, parsed.rdzv_endpoint, f"--nnodes {parsed.nnodes}"
    if parsed.standalone:
        if high > 1:
            raise UsageError(f"{nodes} and --standalone contradict each other: --standalone is one node")
        return "memory"
    if name == "etcd-v2":
        raise UsageError(
            "--rdzv-backend etcd-v2: etcd 3.6 has dropped its v2 interface; write --rdzv-backend etcd, "
            "which speaks v3 here"
        )
    if name not in BACKENDS:
        raise UsageError(f"--rdzv-backend {name!r} is not supported: give {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}")
    if name == "static":
        if parsed.node_rank != 0:
            raise UsageError(f"--node-rank {parsed.node_rank}: the only node of a job has rank 0")
        return "memory"
    if name == "c10d" and high == 1 and (not endpoint or re.search(r":0+$", endpoint)):
        return "memory"  # nobody to meet, or at a port nobody could know
    if not endpoint:
        raise UsageError(f"{nodes} with --rdzv-backend {name} needs --rdzv-endpoint HOST:PORT, where the nodes meet")
    return cast(Literal["c10d", "etcd"], name)


def _static_as_c10d(parsed: Namespace, low: int, high: int) -> Namespace:
    """The same options for c10d at the master's address, which all nodes know."""
    nodes = f"--nnodes {parsed.nnodes}"
    if low < high:
        raise UsageError(
            f"{nodes} with the static backend: a number of nodes that changes needs --rdzv-backend c10d or etcd, "
            "--rdzv-endpoint and --rdzv-id"
        )
    if not 0 <= parsed.node_rank < high:
        raise UsageError(f"--node-rank {parsed.node_rank}: {nodes} have the ranks 0 to {high - 1}")
    endpoint = parsed.rdzv_endpoint
    if not endpoint:
        port = _TORCHRUN_PORT if parsed.master_port is None else parsed.master_port
        if parsed.master_port is None and parsed.master_addr == _THIS_MACHINE:
            raise UsageError(
                f"{nodes} needs --master-addr HOST --master-port PORT of the first node, or --rdzv-backend c10d or "
                "etcd with --rdzv-endpoint and --rdzv-id"
            )
        host = parsed.master_addr.strip("[]")
        endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Namespace(**{**vars(parsed), "rdzv_backend": "c10d", "rdzv_endpoint": endpoint})


# ---- where


def parse_endpoints_and_tls(text: str, backend: str) -> tuple[tuple[tuple[str, int], ...], bool | None]:
    """The addresses, and whether they want TLS: None where no scheme says so."""
    items = [item.strip() for item in text.split(",")]
    if backend == "c10d" and len(items) > 1:
        raise UsageError(f"{text!r}: c10d has one host; several endpoints are etcd's")
    schemes, endpoints = set(), []
    for item in items:
        scheme, mark, rest = item.rpartition("://")
        if mark and (backend == "c10d" or scheme.lower() not in ("http", "https")):
            known = "nothing goes before the host" if backend == "c10d" else "http:// or https:// is"
            raise UsageError(f"{item!r}: {scheme}:// is not understood for {backend}; {known}")
        schemes.add(scheme.lower())
        endpoints.append(_parse_store_endpoint(rest.removesuffix("/") if mark else rest, DEFAULT_PORTS[backend]))
    if len(schemes) > 1:
        raise UsageError(f"{text!r}: write https:// before all of them, or before none")
    return tuple(dict.fromkeys(endpoints)), {"": None, "http": False, "https": True}[schemes.pop()]


def _parse_store_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Return host and port. A user name in the address is refused, since addresses are logged."""
    if "@" in text:
        raise UsageError("holds a user name: give --rdzv-conf user=NAME,password_file=FILE instead")
    host, port = parse_endpoint(text, default_port)
    if port == 0:
        raise UsageError(f"{text!r}: 0 is no port nodes can meet at; ports go from 1 to 65535")
    return host, port


# ---- --rdzv-conf


def _parse_conf(text: str) -> dict[str, str]:
    """Return the keys of --rdzv-conf. Unknown keys are refused with the nearest known one, as a misspelled time would
    be ignored.
    """
    conf: dict[str, str] = {}
    # Quotes that a shell has left around the whole: torchrun ignores the keys that they spoil.
    for pair in filter(None, text.strip().strip("\"'").split(",")):
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key or not value:
            raise UsageError(f"--rdzv-conf: {pair!r} is not KEY=VALUE")
        if key not in CONF_KEYS:
            known = did_you_mean(key, CONF_KEYS, f"there are {', '.join(sorted(CONF_KEYS))}")
            raise UsageError(f"--rdzv-conf: unknown key {key!r}; {known}")
        if conf.setdefault(key, value) != value:
            raise UsageError(f"--rdzv-conf: {key} is given twice")
    return conf


def _check_keys_of_backend(conf: Mapping[str, str], backend: str) -> None:
    """Refuse keys that the chosen backend would ignore."""
    for key in conf:
        if key in (_ETCD_KEYS if backend == "c10d" else _C10D_KEYS):
            raise UsageError(f"--rdzv-conf: {key} is for {'etcd' if key in _ETCD_KEYS else 'c10d'}, not for {backend}")
    if conf.get("store_type", "tcp").lower() != "tcp":
        raise UsageError(f"--rdzv-conf: store_type={conf['store_type']} is not supported; nodes meet over tcp")


def _policy_fields(conf: Mapping[str, str], parsed: Namespace) -> dict[str, float]:
    """Policy's fields. A time that only follows from another is shortened with it, so that one key is enough."""
    numbers: dict[str, float] = {}
    sources: dict[str, str] = {}

    def take(field: str, value: float, source: str) -> None:
        if field in numbers and numbers[field] != value:
            raise UsageError(f"{sources[field]} and {source} contradict each other; leave one out")
        numbers[field], sources[field] = value, source

    for key, text in conf.items():
        if key in _TIME_FIELDS:
            take(_TIME_FIELDS[key], _parse_number(key, text), f"{key}={text}")
    for field in ("replace_timeout_s", "hold_timeout_s"):
        given = getattr(parsed, field.removesuffix("_s"))
        if given is not None:
            take(field, given, f"--{field.removesuffix('_s').replace('_', '-')} {given:g}")
    if "keep_alive_interval" in conf or "keep_alive_max_attempt" in conf:
        attempts = conf.get("keep_alive_max_attempt", str(DEFAULT_KEEP_ALIVE_ATTEMPTS))
        if not re.fullmatch("[0-9]{1,6}", attempts) or int(attempts) < 1:
            raise UsageError(f"--rdzv-conf: keep_alive_max_attempt={attempts} must be a whole number, at least 1")
        lease = int(attempts) * numbers.setdefault("renewal_s", Policy().renewal_s)
        take("lease_s", lease, f"keep_alive_interval × keep_alive_max_attempt = {lease:g}")
    return numbers


def _parse_number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--rdzv-conf: {key}={text} must be a number") from None


def _parse_is_host(conf: Mapping[str, str]) -> bool | None:
    text = conf.get("is_host")
    if text is None:
        return None
    if text.lower() not in _TRUE + _FALSE:
        raise UsageError(f"--rdzv-conf: is_host={text} must be 1 or 0")
    return text.lower() in _TRUE


# ---- TLS and credentials


def _tls_files(conf: Mapping[str, str], secure: bool | None, cwd: Path) -> Tls | None:
    """Return the TLS files, by torchrun's names or etcd's; None without TLS. Raises UsageError for contradictions."""
    protocol = conf.get("protocol", "").lower()
    if protocol not in ("", "http", "https"):
        raise UsageError(f"--rdzv-conf: protocol={conf['protocol']} is neither http nor https")
    if secure is not None and protocol and secure != (protocol == "https"):
        raise UsageError(f"--rdzv-conf: protocol={protocol} contradicts the scheme of --rdzv-endpoint")
    files: dict[str, Path] = {}
    used = [key for key in conf if key in _TLS_FIELDS]
    for key in used:
        if files.setdefault(_TLS_FIELDS[key], cwd / conf[key]) != cwd / conf[key]:
            raise UsageError(f"--rdzv-conf: {key} is given twice, under two names")
    if secure is False or protocol == "http":
        if files:
            raise UsageError(f"--rdzv-conf: {' and '.join(used)} for TLS, but the endpoint is http; write https")
        return None
    return Tls(**files) if files or secure or protocol == "https" else None


def _credentials(conf: Mapping[str, str], environ: Mapping[str, str], cwd: Path) -> tuple[str | None, str | None]:
    """Return user and password, from --rdzv-conf or the environment; a file keeps the password out of process lists."""
    user = conf.get("user", environ.get("ELASTICD_ETCD_USER")) or None
    if "password" in conf and "password_file" in conf:
        raise UsageError("--rdzv-conf: password and password_file contradict each other; leave one out")
    password = conf.get("password", environ.get("ELASTICD_ETCD_PASSWORD")) or None
    if "password_file" in conf:
        password = read_secret_any_mode(cwd / conf["password_file"], "--rdzv-conf: password_file")
    if user and password is None:
        raise UsageError(
            f"the etcd user {user!r} needs a password: --rdzv-conf password_file=FILE, or ELASTICD_ETCD_PASSWORD"
        )
    if password is not None and user is None:
        raise UsageError("an etcd password without a user: --rdzv-conf user=NAME, or ELASTICD_ETCD_USER")
    return user, password
