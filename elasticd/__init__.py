"""elasticd, the library a training script imports: a session, rank-0 checkpoints and an elastic batch sampler.

    session = elasticd.init()
    sampler = elasticd.ElasticBatchSampler(dataset, global_batch=64)

`__all__` is the public API and follows semantic versioning; nothing else does. The import of elasticd imports neither
torch nor the agent: names are looked up when first used, so that the agent, which reads heartbeats, stays small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticd.errors import (
        BarrierTimeout,
        CheckpointCorrupt,
        CheckpointError,
        CheckpointRefused,
        DecisionTimeout,
        DirectoryInUse,
        ElasticdError,
        LaunchError,
        MissedCall,
        SamplerError,
        UsageError,
    )
    from elasticd.launching import launch
    from elasticd.sampler import ElasticBatchSampler
    from elasticd.session import Resumed, Session, init

    __version__: str

_MODULES = {
    **dict.fromkeys(("Session", "Resumed", "init"), "session"),
    "ElasticBatchSampler": "sampler",
    "launch": "launching",
}
"""The module of each public name; the other names are errors."""

__all__ = [
    "BarrierTimeout",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointRefused",
    "DecisionTimeout",
    "DirectoryInUse",
    "ElasticBatchSampler",
    "ElasticdError",
    "LaunchError",
    "MissedCall",
    "Resumed",
    "SamplerError",
    "Session",
    "UsageError",
    "init",
    "launch",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("elasticd")
    if name not in __all__:
        raise AttributeError(f"module 'elasticd' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(f"elasticd.{_MODULES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return __all__
