"""All nodes of a round go, and others come under new ids: they start at once only where every old port is closed."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest

from benchmarks.history import breaches
from tests.scenarios.nodes import ScriptedCluster

FATES = ("kill {}", "vanish {}", "freeze {}", "cut {} from store", "cut {} from store peers")


@pytest.mark.parametrize("fates", list(combinations_with_replacement(FATES, 2)), ids="; ".join)
def test_new_nodes_start_beside_no_group_that_may_train(fates: tuple[str, str]) -> None:
    script = ScriptedCluster(["nodes=2", "holds", "last_call_timeout_s=5"])
    for line in ("start a b", "wait 3", *map(str.format, fates, "ab"), "start x y"):
        verb, *words = line.split()
        script.happen(verb, words)
    cluster, began = script.cluster, script.cluster.now
    while cluster.nodes["x"].group is None and cluster.now < began + 80:
        cluster.wait(0.25)
    waited_s = cluster.now - began
    if fates == (FATES[0],) * 2:
        assert waited_s < 5, "every port is closed"
    else:
        assert 59 < waited_s < 70
    assert breaches(cluster.history) == []
