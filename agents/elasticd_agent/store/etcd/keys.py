"""Keys as etcd has them: bytes, and ranges of them."""

from __future__ import annotations


def to_bytes(key: str) -> bytes:
    # Other programs' keys need not be UTF-8; ours are.
    return key.encode("utf-8", "surrogateescape")


def to_text(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def key_range(prefix: str) -> dict[str, bytes]:
    """The keys that begin with `prefix`, as arguments of etcd's requests; b"\\0" as an end means no end."""
    first = to_bytes(prefix)
    stem = first.rstrip(b"\xff")
    return {"key": first or b"\0", "range_end": stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"}
