"""The launcher's calls of an object store, in a process of its own: they may hang, and need much memory.

python -I object_store_process.py open DIRECTORY JOB RUN     claims it for the run, and prints what is there:
                                                        {error}, or {taken, highest_round, newest}
python -I object_store_process.py release DIRECTORY JOB RUN  the run has ended
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # run as a file, isolated: the package of this copy comes before an installed one
    _SITE_PACKAGES_INDEX = next((at for at, path in enumerate(sys.path) if path.endswith("-packages")), len(sys.path))
    sys.path.insert(_SITE_PACKAGES_INDEX, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))

from elasticd.bounded_json import JsonObject
from elasticd.checkpointing.storage.lineage import highest_round, lineage
from elasticd.checkpointing.storage.object_store import store_of
from elasticd.errors import ElasticdError


def main(verb: str, directory: Path, job: str, run: str) -> JsonObject:
    store = store_of(directory)
    assert store is not None
    try:
        if verb == "release":
            store.release(job, run)
            return {}
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        taken = store.claim(job, run)
        entries, _ = lineage(directory)
        newest = (entries[0].manifest.round, entries[0].manifest.step) if entries else None
        return {"taken": taken, "highest_round": highest_round(directory), "newest": newest}
    except (ElasticdError, OSError) as error:
        return {"error": str(error)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4])))
