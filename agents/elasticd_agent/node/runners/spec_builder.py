"""From a submission and a place on this node to the order for a runner, and the user it runs as.

It exists so that whether this node may run a job is judged once, right before it is started, by the node's own limits.
It starts nothing.
"""

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
    """`devices` is what the node's slots stand for, `meets` where the runners find the store."""

    settings: NodeSettings
    rendezvous: Rendezvous
    devices: tuple[str, ...]

    def build(self, start: RunnerStart) -> RunnerSpec:
        wants, settings, meets = start.submission, self.settings, self.rendezvous
        shared = meets.backend == "etcd"
        return RunnerSpec(
            wants.job,
            wants.number,
            settings.node,
            start.slots,
            wants.spec,
            submission=wants.to_json().decode(),
            adopt_timeout_s=float(settings.adopt_timeout_s),
            drain_timeout_s=float(settings.drain_timeout_s),
            backend="etcd" if shared else "memory",
            endpoints=meets.endpoints,
            tls=meets.tls is not None,
            user=meets.user,
            local_addr=meets.local_addr,
            job_user=settings.user,
            devices=self.devices,
            min_nodes=wants.min_nodes,
            max_nodes=wants.max_nodes,
        )

    def secrets(self) -> StoreSecrets:
        """Read anew each time: certificates are replaced while the daemon runs. Raises OSError."""
        tls = self.rendezvous.tls
        paths = (None, None, None) if tls is None else (tls.ca, tls.cert, tls.key)
        ca, cert, key = (None if path is None else path.read_text() for path in paths)
        return StoreSecrets(self.rendezvous.password, ca, cert, key)

    def account(self, spec: RunnerSpec) -> Account:
        """As whom it runs. Raises UsageError, in one sentence, for a job that this node may not or cannot run."""
        job = jobfile.from_json(spec.job_file)
        if (refusal := limits.refusal(self.settings.limits, job, self.settings.user)) is not None:
            raise UsageError(str(refusal))
        return Account.of(job.user or self.settings.user)


def required_id(job: JobFile) -> str:
    """The job's own name for it, without which an agent.toml cannot hand it in. Raises UsageError."""
    if job.id is None:
        raise UsageError("a [[job]] needs an id, so that it is handed in only once")
    return job.id
