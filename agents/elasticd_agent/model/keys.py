"""The keys of a job's records in the store, and how their values are decoded.

Other versions rely on the keys: docs/protocol.md lists them. A value that cannot be decoded is reported with its key
and left alone.
"""

from __future__ import annotations

import zlib
from typing import TypeVar

from elasticd import bounded_json
from elasticd.errors import WireError
from elasticd_agent.model.codec import Document, Parser

D = TypeVar("D", bound=Document)

COMPRESSED_FROM_BYTES = 16 * 1024
"""Bytes. A Round of 4,096 nodes is 430 kB, a quarter of that compressed, and every node receives it."""


def encode_record(record: Document) -> bytes:
    """The record's value in the store: JSON, of some kinds compressed by zlib where it is long."""
    text = record.to_json()
    return zlib.compress(text) if record.COMPRESSED and len(text) >= COMPRESSED_FROM_BYTES else text


def decode_record(kind: type[D], key: str, value: bytes, parse: Parser | None = None) -> D:
    """The record under `key`; `parse` as for `from_json`. Raises WireError: a whole sentence with the key."""
    try:
        # Of the other kinds nobody compresses one: a list of small ones could stand for gigabytes.
        is_compressed = kind.COMPRESSED and not value.startswith(b"{")
        record = kind.from_json(_decompressed(value, kind.MAX_BYTES) if is_compressed else value, parse)
        if kind.FIELD_IN_KEY and (name := getattr(record, kind.FIELD_IN_KEY)) != key.rpartition("/")[2]:
            raise WireError(f"it is of another {kind.FIELD_IN_KEY}, {name!r}")
    except WireError as error:
        raise WireError(f"{key} in the store cannot be decoded and is left alone: {error}") from None
    return record


def _decompressed(value: bytes, max_bytes: int) -> bytes:
    """`value` itself if zlib has not written it: the JSON decoder names what is wrong with it."""
    unzip = zlib.decompressobj()
    try:
        text = unzip.decompress(value, max_bytes)
    except zlib.error:
        return value
    if not unzip.eof:
        raise WireError(f"it is cut off, or longer than {max_bytes >> 10} KiB")
    return text


def decode_master_address(key: str, value: bytes) -> tuple[str, int]:
    """The address of the workers' store of a round, from a `master` key: [address, port]. Raises WireError, too."""
    try:
        where, port = bounded_json.loads(value, 8)
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"{key} in the store is not an address and is left alone: {error}") from None
    if not isinstance(where, str) or type(port) is not int:
        raise WireError(f"{key} in the store is not an address and is left alone: {value[:60]!r}")
    return where, port


ALL_JOBS = "/elasticd/v1/jobs/"
"""The prefix of all jobs' keys."""


class Keys:
    """One job's keys. A name that ends in "/" is a prefix, of one round if a number is given."""

    def __init__(self, job: str) -> None:
        self.job = job
        self._root = root = f"{ALL_JOBS}{job}"
        self.spec = f"{root}/spec"
        self.planner = f"{root}/planner"
        self.round = f"{root}/round"
        self.ended = f"{root}/ended"
        self.pause = f"{root}/pause"
        self.ahead = f"{root}/ahead"
        self.nodes = f"{root}/nodes/"
        self.hang_report_request = f"{root}/hang_report_request"  # no prefix of `hang_reports`: watches are separate

    def node(self, node: str) -> str:
        return f"{self.nodes}{node}"

    def master(self, number: int | None = None) -> str:
        return f"{self._root}/master/" + ("" if number is None else str(number))

    def failures(self, number: int | None = None) -> str:
        return f"{self._root}/failures/" + ("" if number is None else f"{number}/")

    def done(self, number: int | None = None) -> str:
        return f"{self._root}/done/" + ("" if number is None else f"{number}/")

    def hang_reports(self, number: int | None = None) -> str:
        return f"{self._root}/hang_reports/" + ("" if number is None else f"{number}/")
