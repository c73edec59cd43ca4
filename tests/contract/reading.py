"""Short forms of reads and writes of a store, for tests that know that the key is there."""

from __future__ import annotations

from elasticd.errors import StoreUnavailable
from elasticd_agent.store import Store, Versioned


def found(store: Store, key: str) -> Versioned:
    item = store.read(key)
    assert item is not None
    return item


def version(store: Store, key: str) -> int:
    return found(store, key).version


def values(store: Store, prefix: str = "") -> dict[str, bytes]:
    return {key: item.value for key, item in store.list(prefix).items()}


def put(store: Store, key: str, value: bytes) -> None:
    """Whatever is there."""
    item = store.read(key)
    assert store.compare_and_swap(key, None if item is None else item.version, value)


def answers(store: Store) -> bool:
    """True if it answers at this moment; also a way to wait until it does."""
    return not refusal(store)


def refusal(store: Store) -> str:
    """Why it does not answer at this moment, "" if it does."""
    try:
        store.read("job/k")
    except StoreUnavailable as error:
        return str(error)
    return ""
