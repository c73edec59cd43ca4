"""The cost of the rendezvous does not grow with the number of nodes, as the simulation of it counts requests."""

from __future__ import annotations

import pytest

from benchmarks.simulated_etcd import Clock, EtcdTimes, SimulatedEtcd, SimulatedStore
from benchmarks.simulation import STEPS, SimulationResult, simulate
from elasticd.errors import StoreUnavailable

GROWTH = 1.0
"""Requests a node may send more in a job of eight times as many."""


@pytest.fixture(scope="module")
def results() -> tuple[SimulationResult, SimulationResult]:
    return simulate(8), simulate(64)


@pytest.mark.parametrize("step", STEPS)
def test_requests_of_a_node_do_not_grow(results: tuple[SimulationResult, SimulationResult], step: str) -> None:
    few, many = results
    assert not few.trouble
    assert not many.trouble
    assert many.steps[step].requests <= few.steps[step].requests + GROWTH
    assert many.steps[step].seconds < 2.0


def test_only_a_lost_node_leads_to_a_round(results: tuple[SimulationResult, SimulationResult]) -> None:
    assert [f.rounds for f in results[1].steps.values()] == [1, 1, 1, 1, 0]


def test_same_arguments_give_the_same_figures(results: tuple[SimulationResult, SimulationResult]) -> None:
    assert simulate(8) == results[0]


def test_requests_queue_and_time_out() -> None:
    """An etcd that serves ten requests a second answers five of ten within its clients' half second."""
    clock = Clock()
    etcd = SimulatedEtcd(clock, EtcdTimes(request_s=0.1, timeout_s=0.55))
    outcomes: list[str] = []

    def ask(store: SimulatedStore) -> None:
        try:
            assert store.read("key") is None
            outcomes.append("answered")
        except StoreUnavailable:
            outcomes.append("late")

    for _ in range(10):
        store = SimulatedStore(etcd)
        store.task = clock.start(lambda store=store: ask(store))  # type: ignore[misc]
    clock.run(lambda: len(outcomes) == 10, 5.0)
    clock.end()
    assert sorted(outcomes) == ["answered"] * 5 + ["late"] * 5
