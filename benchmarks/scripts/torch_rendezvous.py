"""How long N of torch's own c10d rendezvous handlers take to join, as threads of this process: prints the seconds."""

from __future__ import annotations

import sys
import threading
import time

from torch import distributed
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

RUN = "bench"
tcp_store = vars(distributed)["TCPStore"]  # torch exports it without saying so


def main() -> None:
    count = int(sys.argv[1])
    server = tcp_store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    handlers = []
    for index in range(count):
        store = tcp_store("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        parameters = RendezvousParameters(
            "c10d", f"127.0.0.1:{server.port}", RUN, count, count, local_addr=f"127.0.0.{1 + index % 250}"
        )
        backend = C10dRendezvousBackend(store, RUN)
        handlers.append(DynamicRendezvousHandler.from_backend(RUN, store, backend, count, count, parameters.local_addr))
    began = time.monotonic()
    threads = [threading.Thread(target=handler.next_rendezvous, daemon=True) for handler in handlers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{time.monotonic() - began:.3f}", flush=True)


if __name__ == "__main__":
    main()
