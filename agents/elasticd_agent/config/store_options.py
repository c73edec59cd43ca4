"""Where this daemon and its runners find their store, as whom they come, and by which times they deal with it.

It exists so that agent.toml's [store] means what `elasticd run` means by --rdzv-endpoint and --rdzv-conf: it goes
through that command's own checks. It opens no connection; of the disk it reads the password's file.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from elasticd.errors import UsageError
from elasticd_agent.config import run_options as arguments
from elasticd_agent.config.decode import ConfigError
from elasticd_agent.config.job_file import in_keys
from elasticd_agent.model.job import Policy, Rendezvous, Tls
from elasticd_agent.system.files import read_secret

if TYPE_CHECKING:
    from elasticd_agent.config.agent_settings import NodeSettings


def store_policy(settings: NodeSettings) -> Policy:
    """The numbers by which this daemon deals with the store. Raises KeyWrong."""
    lease, renewal, adopt = settings.lease_s, settings.renewal_s, settings.adopt_timeout_s
    conf = f"--rdzv-conf=lease={lease:.9g},renewal={renewal:.9g},adopt_timeout={adopt:.9g}"
    try:
        return arguments.parse_run([conf, "script"], {}, Path("/"))[1]
    except UsageError as error:
        raise in_keys(str(error)) from None


def store_rendezvous(settings: NodeSettings) -> Rendezvous:
    """Where this daemon and its runners find their store, the password included. Raises KeyWrong."""
    store = settings.store
    if store.backend == "local":
        return Rendezvous(node=settings.node, local_addr=settings.local_addr)
    for endpoint in store.endpoints:
        if not endpoint.strip() or "," in endpoint:
            raise ConfigError("store.endpoints", f"{endpoint!r} is not HOST:PORT; write one in each pair of quotes")
        if "@" in endpoint:
            raise ConfigError("store.endpoints", "hold a user; write user and password_file instead")
    endpoint = f"--rdzv-endpoint={','.join(store.endpoints)}"
    try:
        spec, _, _ = arguments.parse_run(["--rdzv-backend=etcd", endpoint, "--rdzv-id=x", "script"], {}, Path("/"))
    except UsageError as error:
        raise ConfigError("store.endpoints", re.sub("^--rdzv-endpoint:? ?", "", str(error))) from None
    found = spec.rendezvous
    files = {"ca": store.ca, "cert": store.cert, "key": store.key}
    named = [f"store.{key}" for key, path in files.items() if path]
    plain = any(endpoint.startswith("http://") for endpoint in store.endpoints)
    if named and plain:
        raise ConfigError(named[0], "is for TLS, but store.endpoints say http://; write https://")
    tls = Tls(store.ca, store.cert, store.key) if named else found.tls
    password = None
    if store.password_file is not None:
        try:
            password = read_secret(store.password_file, "")
        except UsageError as error:
            raise ConfigError("store.password_file", str(error).removeprefix(": ")) from None
    return replace(
        found, tls=tls, user=store.user, password=password, node=settings.node, local_addr=settings.local_addr
    )
