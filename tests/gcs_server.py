"""Google Cloud Storage's API, by gcp-storage-emulator, with its conditional puts: `python -m tests.gcs_server PORT`."""

from __future__ import annotations

import sys
import threading
from http import HTTPStatus
from typing import Any

from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.server import create_server


def main(port: int) -> None:
    put = objects._multipart_upload

    def put_if_absent(request: Any, response: Any, storage: Any) -> None:
        """`ifGenerationMatch=0`: 412 if there is such an object."""
        if request.query.get("ifGenerationMatch") == ["0"]:
            try:
                storage.get_file_obj(request.params["bucket_name"], request.data["meta"]["name"])
            except NotFound:
                pass
            else:
                response.status = HTTPStatus.PRECONDITION_FAILED
                return
        put(request, response, storage)

    objects._multipart_upload = put_if_absent
    create_server("127.0.0.1", port, in_memory=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
