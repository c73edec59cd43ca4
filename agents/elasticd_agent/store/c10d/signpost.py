"""Says at the job's endpoint where its store is, once another agent hosts it.

Newcomers know the endpoint only, and a former host that is started again hosts an empty store there. The agent that
hosts the job's store tries the endpoint once a second and writes the current Round to what answers: every Round names
its store, and an agent that reads a Round of a later term moves there.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable

from elasticd.errors import StoreRefused, StoreUnavailable, WireError
from elasticd_agent.model.keys import decode_record
from elasticd_agent.model.records import Round
from elasticd_agent.store import Store
from elasticd_agent.system.network.addresses import format_endpoint, is_local, parse_endpoint

TRY_INTERVAL_S = 1.0
CONNECT_TIMEOUT_S = 0.5
FOREIGN_RETRY_S = 30.0
"""Before a store that is not elasticd's is tried again."""


class Signpost:
    """The signpost of one job. A thread tries the endpoint while a Round is shown; `open_store` opens what is there."""

    def __init__(
        self,
        endpoint: tuple[str, int],
        key: str,
        open_store: Callable[[], Store],
        log: Callable[[str], None],
    ) -> None:
        self._endpoint = endpoint
        self._key = key
        self._round: Round | None = None
        self._open_store = open_store
        self._log = log
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="c10d-signpost", daemon=True)

    def show(self, round: Round | None) -> None:
        """Say where the store of `round` is; None: say nothing."""
        self._round = round
        if round is not None and not self._thread.ident:
            self._thread.start()

    def close(self) -> None:
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(TRY_INTERVAL_S):
            if not self._is_needed():
                continue
            with contextlib.suppress(OSError), socket.create_connection(self._endpoint, CONNECT_TIMEOUT_S) as life:
                told = self._write_round()
                # The connection ends with the store's process: the next one at this address knows nothing.
                while not self._closing.wait(TRY_INTERVAL_S if told else FOREIGN_RETRY_S) and self._round is not None:
                    if not told or select.select([life], [], [], 0)[0]:
                        break

    def _is_needed(self) -> bool:
        """False where the job's store is at the endpoint itself."""
        round = self._round
        if round is None or round.store is None:
            return False
        host, port = self._endpoint
        return not (parse_endpoint(round.store.endpoint)[1] == port and is_local(host))

    def _write_round(self) -> bool:
        """False: what answers there is no store of elasticd's."""
        store = self._open_store()
        try:
            round, stored = self._round, store.read(self._key)
            if round is None:
                return True
            if stored is None or decode_record(Round, self._key, stored.value).precedes(round):
                version = None if stored is None else stored.version
                if store.compare_and_swap(self._key, version, round.to_json()):
                    self._log(f"the store at {format_endpoint(*self._endpoint)} says now where the job's is")
            return True
        except StoreUnavailable:
            return True
        except (StoreRefused, WireError):
            return False
        finally:
            store.close()
