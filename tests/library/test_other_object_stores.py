"""Checkpoints in Azure's and Google's stores: their packages against servers that behave as these do.

`tests/install-servers system` brings them: Azurite, Microsoft's own, from npm, and gcp-storage-emulator.
"""

from __future__ import annotations

import inspect
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elasticd.checkpointing.storage import object_store, object_url
from elasticd.checkpointing.storage.checkpoint_files import relink
from elasticd.checkpointing.storage.directory_lock import DirectoryLock
from elasticd.checkpointing.storage.lineage import lineage
from elasticd.errors import ObjectStoreError
from tests.library import test_object_store as common
from tests.s3_server import BUCKET, ROOT

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("default")]

AZURITE = ROOT / ".venv" / "azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
# The account of every Azurite, from its documentation.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class Server:
    """The command, with {port}, and what a client finds it by."""

    scheme: str
    argv: list[str]
    variables: dict[str, str]


SERVERS = [
    Server(
        "az",
        [
            "node",
            str(AZURITE),
            *["--skipApiVersionCheck", "--inMemoryPersistence", "--disableTelemetry", "--blobPort", "{port}"],
        ],
        {
            "AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};"
            f"AccountKey={ACCOUNT_KEY};BlobEndpoint=http://127.0.0.1:{{port}}/{ACCOUNT};"
        },
    ),
    Server(
        "gs",
        [sys.executable, "-m", "tests.gcs_server", "{port}"],
        {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:{port}", "NO_GCE_CHECK": "true"},
    ),
]


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """In place of every test's: fsspec's thread keeps the clients and their connections."""


@pytest.fixture(scope="module", params=SERVERS, ids=lambda each: each.scheme)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server: Server = request.param
    package = object_url.PACKAGES[server.scheme]
    pytest.importorskip(package, reason=f"no {package}: tests/install-servers system installs it")
    if server.scheme == "az" and not AZURITE.exists():
        pytest.skip("no azurite: tests/install-servers system installs it where npm is")
    import fsspec

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    log = (tmp_path_factory.mktemp("store") / "log").open("wb")
    argv = [each.replace("{port}", port) for each in server.argv]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log)
    with pytest.MonkeyPatch.context() as patch, log:
        for name, value in server.variables.items():
            patch.setenv(name, value.replace("{port}", port))
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", int(port))):
            assert process.poll() is None and time.monotonic() < deadline, Path(log.name).read_text()
            time.sleep(0.05)
        fsspec.filesystem(server.scheme).mkdir(BUCKET)
        yield server
        process.kill()
        process.wait()


@pytest.fixture
def nodes(store: Server, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: Any) -> Iterator[Any]:
    monkeypatch.setattr(object_store, "_PATIENCE_S", 2.0)
    object_store.cached_store.cache_clear()
    made: list[common.Node] = []
    prefix = "".join(each if each.isalnum() else "-" for each in request.node.name)

    def make(name: str = "a", **options: Any) -> common.Node:
        node = common.Node(tmp_path / name, prefix, scheme=store.scheme, **options)
        made.append(node)
        return node

    yield make
    for node in made:
        node.lock.release()


CHECKS = [
    common.test_a_killed_upload_is_no_checkpoint_and_is_deleted,
    common.test_a_later_run_takes_the_store,
    common.test_a_name_is_committed_once,
    common.test_a_step_saved_twice,
    common.test_going_back,
    common.test_only_the_newest_is_kept_on_the_node,
    common.test_a_store_that_was_emptied_is_not_a_new_job,
    common.test_a_damaged_copy_is_made_again,
    common.test_the_command,
]


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("check", CHECKS, ids=lambda each: each.__name__.removeprefix("test_"))
def test_like_s3(check: Any, request: pytest.FixtureRequest) -> None:
    check(**{name: request.getfixturevalue(name) for name in inspect.signature(check).parameters})


@pytest.mark.parametrize("what", common.DAMAGE)
def test_damage_is_found(what: str, nodes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    common.test_damage_in_the_store_is_found(what, nodes, capsys)


def test_a_round_that_resumes_copies_in_the_store(nodes: Any) -> None:
    nodes().save(10)
    other = nodes("b")
    entries, _ = lineage(other.directory)
    relink(other.directory, entries[0], 2)
    assert nodes("c", claims=False).steps() == [10, 10]


def test_a_state_of_several_parts(nodes: Any) -> None:
    nodes().save(10, size=20 << 18)
    assert nodes("b", claims=False).steps() == [10]


def test_there_is_no_bucket(store: Server, tmp_path: Path) -> None:
    lock = DirectoryLock(object_url.resolve(f"{store.scheme}://other/prefix", str(tmp_path)), "lm", "1")
    with pytest.raises(ObjectStoreError, match=r"there is no bucket for|container does not exist") as raised:
        lock.acquire()
    assert f"{store.scheme}://other/prefix" in str(raised.value) and "\n" not in str(raised.value)
