"""Replaces the rendezvous handlers of torch's own network backends by the plug-in's, in this process."""

from __future__ import annotations

import os
from typing import Any

BACKENDS = ("c10d", "etcd", "etcd-v2")


def use() -> None:
    from torch.distributed.elastic.rendezvous import registry

    original = registry.get_rendezvous_handler

    def handler(params: Any) -> Any:
        if params.backend in BACKENDS:
            params.backend, params.endpoint = "elasticd", os.environ["ELASTICD_TEST_UPSTREAM_ETCD"]
        return original(params)

    registry.get_rendezvous_handler = handler
