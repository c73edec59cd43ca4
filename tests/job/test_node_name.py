"""The name that an agent claims among the agents of its machine."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elasticd_agent.job.join import NodeName, claim_node_name
from elasticd_agent.model.job import EntrypointMode, JobSpec, Rendezvous

HOST = socket.gethostname()
WHERE = Rendezvous("etcd", (("store.example", 2379),), max_nodes=2)
ALONE = Rendezvous()


def spec(where: Rendezvous = WHERE, node: str | None = None, job: str = "names", run: str = "0") -> JobSpec:
    where = replace(where, node=node)
    return JobSpec(sys.executable, EntrypointMode.SCRIPT, "train.py", (), Path(), job, run, rendezvous=where)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("earlier", "later", "expected"),
    [
        ([spec()], spec(), NodeName(f"{HOST}-2", True)),
        ([spec(), spec()], spec(), NodeName(f"{HOST}-3", True)),
        ([spec(node=f"{HOST}-2"), spec()], spec(), NodeName(f"{HOST}-3", True)),
        ([spec()], spec(node="a"), NodeName("a", True)),
        ([spec(node="a")], spec(node="a"), NodeName("a", False)),
        ([spec()], spec(job="another"), NodeName(HOST, True)),
        ([spec()], spec(run="1"), NodeName(HOST, True)),
        ([spec()], spec(replace(WHERE, endpoints=(("other.example", 2379),))), NodeName(HOST, True)),
        ([spec(ALONE)], spec(ALONE), NodeName(HOST, True)),
        ([spec(ALONE, "a")], spec(ALONE, "a"), NodeName("a", True)),
    ],
)
def test_name_beside_other_agents(
    stack: contextlib.ExitStack, earlier: list[JobSpec], later: JobSpec, expected: NodeName
) -> None:
    for each in earlier:
        claim_node_name(each, stack)
    assert claim_node_name(later, stack) == expected


def test_name_of_an_ended_agent_is_free(stack: contextlib.ExitStack) -> None:
    with contextlib.ExitStack() as first:
        assert claim_node_name(spec(), first).name == HOST
    assert claim_node_name(spec(), stack).name == HOST
