"""A median and how well it is known, without assuming anything about how the noise is distributed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    """A sample's median with a confidence interval for the population's, and the interval's true coverage."""

    median: float
    low: float
    high: float
    coverage: float


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The narrowest symmetric pair of order statistics that covers the median with at least this confidence.

    Exact by the sign test: the k-th smallest of n lies above the median with probability P(Binomial(n, 1/2) < k). With
    too few values for the confidence asked (fewer than six for 95 %) the whole range is given, with what it covers.

    Raises ValueError for no values.
    """
    if not values:
        raise ValueError("a median of no values")
    ordered, n = sorted(values), len(values)
    below, k = 0.0, 0  # P(Binomial(n, 1/2) < k)
    tail = 1 / 2**n
    while k + 1 <= n // 2 and 2 * (below + tail) <= 1 - confidence:
        below, k = below + tail, k + 1
        tail = math.comb(n, k) / 2**n
    if k == 0:
        below, k = 1 / 2**n, 1
    return Interval(statistics.median(ordered), ordered[k - 1], ordered[n - k], 1 - 2 * below)
