"""agent.toml's [store] and times as the values of `elasticd run`: a Rendezvous and a Policy."""

from __future__ import annotations

from elasticd.errors import UsageError
from elasticd_agent.config.rendezvous_options import parse_endpoints_and_tls
from elasticd_agent.config.run_model import policy_with
from elasticd_agent.model.job import Policy, Rendezvous, Tls
from elasticd_agent.system.files import read_secret
from elasticd_daemon.config.agent_settings import NodeSettings
from elasticd_daemon.config.decode import ConfigError


def store_policy(settings: NodeSettings) -> Policy:
    """The times by which this agent uses the store. Raises ConfigError."""
    times = {"lease_s": settings.lease_s, "renewal_s": settings.renewal_s, "adopt_timeout_s": settings.adopt_timeout_s}
    try:
        return policy_with({field: float(value) for field, value in times.items()})
    except UsageError as error:
        raise ConfigError.of(error) from None


def store_rendezvous(settings: NodeSettings) -> Rendezvous:
    """The store of this agent and its runners, with the password. Raises ConfigError."""
    store = settings.store
    if store.backend == "local":
        return Rendezvous(node=settings.node, local_addr=settings.local_addr)
    for endpoint in store.endpoints:
        if not endpoint.strip() or "," in endpoint:
            raise ConfigError("store.endpoints", f"{endpoint!r} is not HOST:PORT; write one in each pair of quotes")
        if "@" in endpoint:
            raise ConfigError("store.endpoints", "hold a user; write user and password_file instead")
    try:
        endpoints, secure = parse_endpoints_and_tls(",".join(store.endpoints), "etcd")
    except UsageError as error:
        raise ConfigError("store.endpoints", str(error)) from None
    files = {"ca": store.ca, "cert": store.cert, "key": store.key}
    named = [f"store.{key}" for key, path in files.items() if path]
    if named and any(endpoint.startswith("http://") for endpoint in store.endpoints):
        raise ConfigError(named[0], "is for TLS, but store.endpoints say http://; write https://")
    password = None
    if store.password_file is not None:
        try:
            password = read_secret(store.password_file, "")
        except UsageError as error:
            raise ConfigError("store.password_file", str(error).removeprefix(": ")) from None
    return Rendezvous(
        backend="etcd",
        endpoints=endpoints,
        tls=Tls(**files) if named or secure else None,
        user=store.user,
        password=password,
        node=settings.node,
        local_addr=settings.local_addr,
    )
