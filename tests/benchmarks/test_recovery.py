"""The benchmark's arithmetic, and its yardstick held against a real job."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.intervals import median_interval
from benchmarks.measurements import Recoveries
from benchmarks.report import recovery_table


def test_interval_of_twenty_matches_textbook() -> None:
    # n = 20: the 6th and the 15th order statistic cover the median with 95.86 % (Conover, table of the sign test).
    found = median_interval([float(n) for n in range(1, 21)])
    assert (found.low, found.high) == (6, 15)
    assert found.coverage == pytest.approx(0.9586, abs=1e-4)


def test_interval_of_few_values_has_its_coverage() -> None:
    found = median_interval([3.0, 1.0, 2.0])
    assert found == (2, 1, 3, 0.75)


@given(st.lists(st.floats(0, 10), min_size=6, max_size=60))
def test_interval_coverage_is_exact_and_minimal(values: list[float]) -> None:
    found, n = median_interval(values), len(values)
    assert found.low <= found.median <= found.high
    k = next(k for k in range(1, n) if math.isclose(found.coverage, _coverage(n, k)))
    assert _coverage(n, k) >= 0.95 > _coverage(n, k + 1)


def _coverage(n: int, k: int) -> float:
    return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n


def test_table_shows_stalls() -> None:
    results = [
        Recoveries("elasticd", 2, [2.0], [0.1, 0.3, 0.2], [0.1], 1, 3, 1),
        Recoveries("torchrun", 2, [3.0], [2.0], [], 1, 3, 2),
    ]
    row = recovery_table(results).splitlines()[3]
    assert row == "| SIGKILL of a rank other than 0 → next step, 2 workers | 0.200 (0.300), 3/3 | 2.000 (2.000), 1/3 |"
    assert recovery_table(results).splitlines()[4].endswith("| never, 0/2 |")
