"""Builds the spec of a runner, and checks the job against this node's limits right before its start."""

from __future__ import annotations

from dataclasses import dataclass

from elasticd.errors import UsageError
from elasticd_agent.config import job_file as jobfile
from elasticd_agent.config import limits
from elasticd_agent.config.agent_settings import NodeSettings
from elasticd_agent.config.job_file import JobFile
from elasticd_agent.model.job import Rendezvous
from elasticd_agent.node.reconcile import RunnerStart
from elasticd_agent.node.runners.spawn import Account
from elasticd_agent.node.runners.spec import RunnerSpec, StoreSecrets


@dataclass(frozen=True, slots=True)
class SpecBuilder:
    settings: NodeSettings
    rendezvous: Rendezvous
    """Of the store, for the runners."""
    devices: tuple[str, ...]
    """Of the node's slots."""

    def build(self, start: RunnerStart) -> RunnerSpec:
        job, settings, store = start.submission, self.settings, self.rendezvous
        return RunnerSpec(
            job.job,
            job.number,
            settings.node,
            start.slots,
            job.spec,
            submission=job.to_json().decode(),
            adopt_timeout_s=float(settings.adopt_timeout_s),
            drain_timeout_s=float(settings.drain_timeout_s),
            backend="etcd" if store.backend == "etcd" else "memory",
            endpoints=store.endpoints,
            tls=store.tls is not None,
            user=store.user,
            local_addr=store.local_addr,
            job_user=settings.user,
            devices=self.devices,
            min_nodes=job.min_nodes,
            max_nodes=job.max_nodes,
        )

    def secrets(self) -> StoreSecrets:
        """Read each time, because certificates are replaced while the agent runs. Raises OSError."""
        tls = self.rendezvous.tls
        paths = (None, None, None) if tls is None else (tls.ca, tls.cert, tls.key)
        ca, cert, key = (None if path is None else path.read_text() for path in paths)
        return StoreSecrets(self.rendezvous.password, ca, cert, key)

    def account(self, spec: RunnerSpec) -> Account:
        """The user it runs as. Raises UsageError for a job that this node may not or cannot run."""
        job = jobfile.from_json(spec.job_file)
        if (refusal := limits.refusal(self.settings.limits, job, self.settings.user)) is not None:
            raise UsageError(str(refusal))
        return Account.of(job.user or self.settings.user)


def required_id(job: JobFile) -> str:
    """Raises UsageError for a [[job]] without an id."""
    if job.id is None:
        raise UsageError("a [[job]] needs an id, so that it is submitted only once")
    return job.id
