"""A stream of watch requests and responses, on one event loop for all stores of the process.

gRPC's blocking streams wake three threads 15 times a second while nothing happens. A thousand idle agents used two
thirds of a core for it. With grpc.aio the loop waits in its selector and the reader in a queue, and both cost nothing.

grpc.aio's poller would end with the last channel, and what it still delivers to a running loop then reads a closed
descriptor. So it is kept until the loop has ended, with the last stream.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import grpc.aio

from elasticd_agent.store.etcd.proto import rpc


class WatchStream:
    """Watch responses, until the stream is cancelled or breaks; both end the iteration.

    One thread iterates, any may call the rest. `_cancel`, `_exchange` and `_send_requests` run on the event loop.
    """

    def __init__(self, open_channel: Callable[[], Any], metadata: Sequence[tuple[str, str]]) -> None:
        """`open_channel` makes a grpc.aio channel; it is called on the event loop."""
        self._open_channel = open_channel
        self._metadata = metadata
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._responses: queue.SimpleQueue[Any] = queue.SimpleQueue()  # None: the end
        self._call: Any = None
        self.ended = False
        self._loop = _event_loop.enter()
        asyncio.run_coroutine_threadsafe(self._exchange(), self._loop)

    def send(self, request: Any) -> None:
        """Never waits, and does nothing after the end."""
        self._call_on_loop(self._requests.put_nowait, request)

    def __iter__(self) -> WatchStream:
        return self

    def __next__(self) -> Any:
        if (response := self._responses.get()) is None:
            self._responses.put(None)
            raise StopIteration
        return response

    def cancel(self) -> None:
        self._call_on_loop(self._cancel)

    def _call_on_loop(self, call: Callable[..., object], *args: Any) -> None:
        with _event_loop.lock:  # the loop runs until this stream has left it
            if not self.ended:
                self._loop.call_soon_threadsafe(call, *args)

    def _cancel(self) -> None:
        self.ended = True
        if self._call is not None:
            self._call.cancel()
        self._responses.put(None)

    async def _exchange(self) -> None:
        # Not by iterators: they leave cycles, and a connection that stays open until the garbage is collected.
        sending = None
        try:
            async with self._open_channel() as channel:
                watch = channel.stream_stream(
                    "/etcdserverpb.Watch/Watch",
                    request_serializer=rpc.WatchRequest.SerializeToString,
                    response_deserializer=rpc.WatchResponse.FromString,
                )
                self._call = watch(metadata=self._metadata)
                sending = asyncio.ensure_future(self._send_requests())
                while not self.ended and (response := await self._call.read()) is not grpc.aio.EOF:
                    self._responses.put(response)
        except (grpc.RpcError, asyncio.CancelledError):
            pass  # the stream has broken, or was cancelled
        finally:
            self._cancel()
            self._call = None
            if sending is not None:
                sending.cancel()
            _event_loop.leave()

    async def _send_requests(self) -> None:
        try:
            while True:
                await self._call.write(await self._requests.get())
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the stream has ended


class _SharedEventLoop:
    """The loop of all streams, in a thread of its own while there are any."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  #: held while a stream enters or leaves
        self._streams = 0
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Event]

    def enter(self) -> asyncio.AbstractEventLoop:
        with self.lock:
            if not self._streams:
                started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
                threading.Thread(target=self._run, args=(started,), name="etcd streams", daemon=True).start()
                self._running = started.result()
            self._streams += 1
            return self._running[0]

    def leave(self) -> None:
        with self.lock:
            self._streams -= 1
            if not self._streams:
                loop, over = self._running
                loop.call_soon_threadsafe(over.set)

    @staticmethod
    def _run(started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
        async def serve() -> None:
            grpc.aio.init_grpc_aio()
            over = asyncio.Event()
            started.set_result((asyncio.get_running_loop(), over))
            await over.wait()

        try:
            asyncio.run(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)
        else:
            grpc.aio.shutdown_grpc_aio()


_event_loop = _SharedEventLoop()
