"""The name under which this agent takes part in its job, claimed among the agents of this machine.

A name is claimed by binding an abstract Unix socket, which the kernel releases when the process ends, however it ends:
an agent that replaces a killed one gets its name, and a second agent beside a live one gets another. Agents on other
machines, and in other network namespaces, are told apart by their host names, and by the store.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import socket
from dataclasses import dataclass

from elasticd_agent.model.job import JobSpec


@dataclass(frozen=True, slots=True)
class NodeName:
    name: str
    free: bool  #: False: a live agent of the same job on this machine has the name, which was given explicitly


def claim_node_name(spec: JobSpec, stack: contextlib.ExitStack) -> NodeName:
    """--node-id; without it the host name, or the first of HOST-2, HOST-3 … that is free. `stack` releases it."""
    given, host = spec.rendezvous.node, socket.gethostname()
    if spec.rendezvous.backend == "memory":
        return NodeName(given or host, free=True)
    if given is not None:
        return NodeName(given, _claim(spec, given, stack))
    names = itertools.chain([host], (f"{host}-{number}" for number in itertools.count(2)))
    return NodeName(next(name for name in names if _claim(spec, name, stack)), free=True)


def _claim(spec: JobSpec, name: str, stack: contextlib.ExitStack) -> bool:
    where = spec.rendezvous
    key = json.dumps([where.backend, where.endpoints, spec.job_id, spec.run, name])
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0elasticd-node-{hashlib.sha256(key.encode()).hexdigest()}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            claim.close()
            return False
    stack.callback(claim.close)
    return True
