"""The shuffled order is a specification: these tests hold it to the last bit."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.shuffle import MAX_LENGTH, Permutation

GOLDEN_10 = [7, 9, 8, 0, 2, 1, 6, 3, 4, 5]
GOLDEN_5000 = "a2a812562f4139771188d4246095f5328e70c8a15561289c5e3039154cabcfb1"


def reference(position: int, n: int, seed: int, epoch: int) -> int:
    """The algorithm as the module's docstring writes it, in Python's unbounded integers."""
    rows = math.ceil(math.sqrt(n)) if n < 2**50 else math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    digest = hashlib.blake2b(f"elasticd/{seed}/{epoch}".encode(), digest_size=32).digest()
    key = [int.from_bytes(digest[4 * j : 4 * j + 4], "little") for j in range(8)]

    def mix(h: int) -> int:
        h ^= h >> 15
        h = h * 0x2C1B3C6D % 2**32
        h ^= h >> 12
        h = h * 0x297A2D39 % 2**32
        return h ^ h >> 15

    x = position
    while True:
        left, right = divmod(x, columns)
        for j in (0, 2, 4, 6):
            left = (left + mix(right ^ key[j])) % rows
            right = (right + mix(left ^ key[j + 1])) % columns
        x = left * columns + right
        if x < n:
            return x


def test_order_never_changes() -> None:
    assert Permutation(10, seed=0, epoch=0).at(list(range(10))) == GOLDEN_10
    order = Permutation(5000, seed=1234, epoch=7).at(list(range(5000)))
    assert hashlib.sha256(",".join(map(str, order)).encode()).hexdigest() == GOLDEN_5000


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_every_order_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(n, seed, epoch).at(list(range(n)))) == list(range(n))


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.integers(1, 100), st.integers(1, MAX_LENGTH), st.just(MAX_LENGTH)), st.integers(0, 9), st.data())
def test_tensor_arithmetic_matches_specification(n: int, epoch: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    assert Permutation(n, 3, epoch).at(positions) == [reference(position, n, 3, epoch) for position in positions]


@pytest.mark.parametrize("n", [3, 5, 10])
def test_order_is_uniform(n: int) -> None:
    epochs = 600
    seen = Counter(
        (position, sample)
        for epoch in range(epochs)
        for position, sample in enumerate(Permutation(n, 0, epoch).at(list(range(n))))
    )
    expected = epochs / n
    chi_squared = sum((seen[p, s] - expected) ** 2 / expected for p in range(n) for s in range(n))
    freedom = (n - 1) ** 2
    assert abs(chi_squared - freedom) < 5 * math.sqrt(2 * freedom)


def test_neighboring_seeds_and_epochs_differ() -> None:
    orders = {
        tuple(Permutation(100, seed, epoch).at(list(range(100)))) for seed in range(5) for epoch in range(5)
    }  # seed + epoch, which DistributedSampler seeds with, would leave 9
    assert len(orders) == 25
