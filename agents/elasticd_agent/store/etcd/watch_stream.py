"""One stream of etcd's watch responses, for as long as it holds: that it breaks is an end like any other.

It exists so that who follows watches sees an iteration that ends, not gRPC's errors and the thread it keeps. It knows
nothing of members and tokens, and never begins another one.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import grpc


class WatchStream:
    """Watch responses, until it is cancelled or breaks; both end the iteration."""

    def __init__(
        self,
        stream: Any,
        requests: queue.SimpleQueue[Any],
        sent: Callable[[Any], None],
        received: Callable[[Any], None],
        over: Callable[[], None],
    ) -> None:
        """`stream` is gRPC's, which takes what it asks out of `requests`. `sent` and `received` count, `over` hears of
        its end, perhaps twice."""
        self._stream, self._requests = stream, requests
        self._sent, self._received, self._ended = sent, received, over

    def send(self, request: Any) -> None:
        """Send it if the stream still is; never waits."""
        self._sent(request)
        self._requests.put(request)

    def __iter__(self) -> WatchStream:
        return self

    def __next__(self) -> Any:
        try:
            message = next(self._stream)
        except grpc.RpcError:
            self._over()
            raise StopIteration from None
        except StopIteration:
            self._over()
            raise
        self._received(message)
        return message

    def cancel(self) -> None:
        self._stream.cancel()
        self._over()

    def _over(self) -> None:
        self._requests.put(None)  # ends gRPC's thread that waits for what we might ask
        self._ended()
