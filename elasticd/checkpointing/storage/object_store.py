"""Checkpoint directories in an object store, s3://bucket/prefix, gs://… or az://…, through fsspec.

    <url>/r3-s1200/state.pt         the files of a checkpoint are put first
    <url>/r3-s1200/manifest.json    is put last, and only if none is there: it commits
    <url>/r3-s1200.again/.reserved  the node that may put this one, at the end of a job
    <url>/.owner.json               the run that may commit; a later run takes over, and the earlier one is refused
    <url>/.newest                   the name of the last commit, for stores whose listings lag

The rest of this package works on a local directory, a copy of the store's: `pull` makes its names and manifests those
of the store, `fetch_and_open` gets a file when it is opened, and a new checkpoint is put into the store before it gets
its name here. So this node never has a checkpoint that the store lacks, and the copy may be deleted at any time. Its
path tells where the store is: …/s3:/bucket/prefix (docs/adr/0014). No torch here.

An object store gives less than a file system: no rename, no lock, and in some stores no immediate listing. What is
built instead:
- The manifest is the commit. It is put last and only if none is there, so a checkpoint is whole or invisible, and of
  two writers of one name the first one wins.
- The owner's record is the lock. Each change reads it first; a run that finds a later one is refused. Between the
  reading and the change a later run may take over, which is why names carry the round: what an earlier run still
  commits is not in the later one's lineage.
- `.newest` makes up for listings that lag: its name is looked up directly.

Calls are tried again for as long as the caller's patience lasts, which differs by what waits: training waits for no
save, a job without a state cannot begin.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import re
import secrets
import shutil
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from elasticd.bounded_json import JsonObject
from elasticd.checkpointing.storage.manifest import MANIFEST, Checksum, Manifest, SizeAndChecksum, parse
from elasticd.checkpointing.storage.object_url import CACHE_VARIABLE, missing_package_reason, scheme_index, url_of
from elasticd.errors import DirectoryInUse, ObjectStoreError

_ObjectInfo = Mapping[str, Any]
"""An object as fsspec describes it."""
_ObjectsByKey = dict[str, Any]
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    # Short timeouts, and few tries of the client's own: a call is tried again here. Four parts of 50 MB are in memory
    # at a time.
    "s3": {
        "config_kwargs": {"connect_timeout": 5, "read_timeout": 30, "retries": {"mode": "standard", "max_attempts": 2}},
        "max_concurrency": 4,
    },
}
_OWNER, _NEWEST, _REMOTE, _RESERVED = ".owner.json", ".newest", ".remote", ".reserved"
_WENT_BACK_MARK = re.compile(r"\.went-back-to-s[0-9]+")
_FILE_OF_CHECKPOINT = re.compile(r"r[0-9]+-s[0-9]+(\.again|\.aside[0-9]*)?/[^/]+")
_PATIENCE_S = 20.0
"""The patience of a save: training continues meanwhile, and the next save tries again. At a job's start a wrong address
is reported soon."""
RESTORE_PATIENCE_S = 300.0
"""The patience of a restore: without it the job cannot continue."""
BRIEF_PATIENCE_S = 3.0
"""The patience of a restore that has a state in memory."""
_FILE_LOCK_COUNT = 64
_MIN_TRIES, _PAUSE_MAX_S = 3, 5.0
_MAX_SUPERSEDED_RUNS = 100
_BLOCK_BYTES = 8 << 20
TakeoverWarning = str
"""A sentence about the run from which a store was taken, "" if it was free."""


def store_of(directory: str | os.PathLike[str]) -> ObjectStore | None:
    """None for a directory that is a copy of no store."""
    url = url_of(Path(directory))
    return None if url is None else cached_store(Path(directory), url)


class ObjectStore:
    """The store behind one local directory. Its calls raise ObjectStoreError when it refuses or does not answer."""

    def __init__(self, directory: Path, url: str) -> None:
        self.url = url
        self._directory = directory
        self._scheme, _, self._root = url.partition("://")
        self.patience_s = _PATIENCE_S
        """The time for which a call that fails is tried again."""
        self._run: dict[str, str] | None = None
        """The job and run that this process writes for; None: it only reads."""

    # --- which run may write -----------------------------------------------------------------------------------------

    def claim(self, job: str, run: str) -> TakeoverWarning:
        """Take the store for this run; returns a sentence if an earlier run has not released it. A second call changes
        nothing. Raises DirectoryInUse if a later run has taken it.
        """
        own = {"job": job, "run": run}
        self._make_private_directory()
        owner = self._read_owner()
        taken_from = ""
        if {key: owner.get(key) for key in own} != own:
            superseded = owner.get("superseded", [])
            if owner.get("run") is not None:
                if [job, run] in superseded:
                    raise DirectoryInUse(self._superseded_reason(owner, own))
                superseded = [*superseded, [owner["job"], owner["run"]]][-_MAX_SUPERSEDED_RUNS:]
                taken_from = (
                    f"{self.url} was not released by {_run_in_words(owner)}: this run takes it, and if the other one "
                    "still runs, its checkpoints are refused from now on"
                )
            record = {"version": "1.0", **own, "host": socket.gethostname(), "superseded": superseded}
            self._put(_OWNER, json.dumps(record).encode())
            self._abort_uploads("")
        self._run = own
        return taken_from

    def release(self, job: str, run: str) -> None:
        """The run has ended: the next one need not be warned."""
        owner = self._read_owner()
        if (owner.get("job"), owner.get("run")) == (job, run):
            self._put(_OWNER, json.dumps({**owner, "run": None}).encode())

    def holder(self) -> str | None:
        """The run that has not released the store, for people."""
        owner = self._read_owner()
        return _run_in_words(owner) if owner.get("run") is not None else None

    def _ensure_owner(self) -> None:
        """Before each change. Raises ObjectStoreError if a later run has taken the store."""
        if self._run is not None and not self._is_claimed():
            self.claim(self._run["job"], self._run["run"])

    def _is_claimed(self) -> bool:
        """False if no run has claimed the store. Raises ObjectStoreError if a later run has taken it."""
        owner, own = self._read_owner(), self._run
        if (
            own is not None
            and owner.get("run") is not None
            and (owner["job"], owner["run"]) != (own["job"], own["run"])
        ):
            raise ObjectStoreError(self._superseded_reason(owner, own))
        return bool(owner)

    def assume_claimed(self, job: str, run: str) -> None:
        """The launcher has claimed it for this run: the next change, or `pull`, finds out otherwise."""
        self._run = {"job": job, "run": run}

    def _read_owner(self) -> JsonObject:
        data = self._get(_OWNER)
        try:
            owner: JsonObject = json.loads(data or b"{}")
            return owner if {"job", "run", "host", "superseded"} <= owner.keys() else {}
        except (ValueError, AttributeError):
            return {}  # overwritten by hand

    def _superseded_reason(self, found: Mapping[str, Any], own: Mapping[str, str]) -> str:
        return (
            f"{self.url} was taken by {_run_in_words(found)}; this is run {own['run']!r} of job {own['job']!r}. "
            f"Stop one of them, or use another prefix; if that run has ended, delete {self.url}/{_OWNER}"
        )

    def has_bucket(self) -> bool:
        """True if the bucket exists, and these credentials may see it."""
        return bool(self._file_system.fs.exists(self._root.partition("/")[0]))

    # --- reading -----------------------------------------------------------------------------------------------------

    def pull(self, is_name: Callable[[str], bool]) -> None:
        """Make the local names and manifests those of the store. `is_name`: of a checkpoint, or of one set aside.

        Raises ObjectStoreError if the run of this process has claimed the store and it has been emptied, which must not
        look like a job that has not begun, or if a later run has taken it.
        """
        if self._run is not None and not self._is_claimed():
            raise ObjectStoreError(f"{self.url}/{_OWNER} is gone: was the prefix, or the bucket, deleted?")
        listed: dict[str, _ObjectsByKey] = {}
        marks = set()
        for key, info in self._list_below("").items():
            name, slash, file = key.partition("/")
            if slash and is_name(name):
                listed.setdefault(name, {})[file] = info
            elif _WENT_BACK_MARK.fullmatch(name):
                marks.add(name)
        newest = (self._get(_NEWEST) or b"").decode(errors="replace")
        self._make_private_directory()
        with self._lock_copy():
            local = {name for name in os.listdir(self._directory) if is_name(name)}
            for name in local | ({newest} if is_name(newest) else set()):
                if MANIFEST not in listed.get(name, {}) and (info := self._info(f"{name}/{MANIFEST}")) is not None:
                    listed.setdefault(name, {})[MANIFEST] = info  # the listing lags
            for name in local - listed.keys():
                _remove(self._directory / name)
            for name, files in listed.items():
                self._pull_name(name, files)
            for mark in {listed for listed in os.listdir(self._directory) if _WENT_BACK_MARK.fullmatch(listed)} ^ marks:
                if mark in marks:
                    (self._directory / mark).touch(0o600)
                else:
                    (self._directory / mark).unlink(missing_ok=True)

    def _pull_name(self, name: str, files: Mapping[str, Any]) -> None:
        path = self._directory / name
        version = _object_version(files[MANIFEST]) if MANIFEST in files else ""
        if path.is_dir() and _read_remote_record(path).get("version") == version:
            return
        data = self._get(f"{name}/{MANIFEST}") if version else None
        manifest = parse(data) if data is not None else None
        damage: dict[str, str] = {}
        if isinstance(manifest, Manifest):
            present = {f"{name}/{file}": info for file, info in files.items()}
            damage = self._find_missing(name, manifest.all_files, present)
        if data is not None and _read_or_none(path / MANIFEST) == data:
            _write_remote_record(path, version, damage)
        else:
            self._place_manifest(name, data, version, damage)

    def _find_missing(
        self, name: str, files: Mapping[str, SizeAndChecksum], present: Mapping[str, Any]
    ) -> dict[str, str]:
        """Sentences about the files that the store lacks. A listing may lag: the object itself is looked up."""
        missing: dict[str, str] = {}
        for file, (size, _) in files.items():
            info = present.get(f"{name}/{file}")
            if info is None or info["size"] != size:
                info = self._info(f"{name}/{file}")
            if info is None:
                missing[file] = f"{file} is missing in {self.url}/{name}"
            elif info["size"] != size:
                missing[file] = f"{file} has {info['size']} bytes in {self.url}/{name}, its manifest says {size}"
        return missing

    def _place_manifest(self, name: str, manifest: bytes | None, version: str, damage: Mapping[str, str]) -> None:
        """A checkpoint without its files, under its name."""
        staging = self._directory / f".pulled.{secrets.token_hex(4)}"
        staging.mkdir(mode=0o700)
        _write_remote_record(staging, version, damage)
        if manifest is not None:
            (staging / MANIFEST).write_bytes(manifest)
        _remove(self._directory / name)
        os.rename(staging, self._directory / name)

    def place_manifest(self, name: str, manifest: Manifest) -> None:
        """Know a checkpoint that another node has read, as `pull` would. Raises OSError."""
        self._make_private_directory()
        with self._lock_copy():
            if not (self._directory / name).is_dir():
                self._place_manifest(name, manifest.to_json(), "", {})

    def fetch_and_open(self, path: Path, file: str) -> int:
        """Open a file of the checkpoint `path`; it is copied to this node if it is not here. Raises FileNotFoundError
        if the store does not have it, ObjectStoreError if it cannot be copied.
        """
        with self._lock_copy(zlib.crc32(f"{path.name}/{file}".encode()) % _FILE_LOCK_COUNT):
            if not (path / file).exists():
                copy = path / f".{file}.copy"
                try:
                    self._call("get_file", f"{path.name}/{file}", str(copy), patience_s=RESTORE_PATIENCE_S)
                    os.rename(copy, path / file)
                except FileNotFoundError:
                    copy.unlink(missing_ok=True)
                    raise
                except OSError as error:
                    copy.unlink(missing_ok=True)
                    raise ObjectStoreError(f"{self.url}/{path.name}/{file} could not be copied: {error}") from error
            return os.open(path / file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def find_damage(self, name: str, manifest: Manifest) -> str | None:
        """Why a checkpoint cannot be used, after reading all of it from the store; None if it is whole."""
        for file, expected in manifest.all_files.items():
            file_object = self._call("open", f"{name}/{file}", "rb", block_size=_BLOCK_BYTES)
            checksum, size = Checksum(expected[1].partition(":")[0]), 0
            with file_object:
                while block := file_object.read(_BLOCK_BYTES):
                    checksum.update(block)
                    size += len(block)
            if (size, str(checksum)) != expected:
                return f"{file} does not match its checksum: it was damaged after it was written"
        return None

    # --- changing ----------------------------------------------------------------------------------------------------

    def free_name(self, name: str) -> str:
        """The name under which the files of a checkpoint are put: a step saved twice gets the other name, and so on all
        nodes.
        """
        return name if self._info(f"{name}/{MANIFEST}") is None else f"{name}.again"

    def put_part(self, name: str, part: str, content: bytes) -> None:
        """A message of another node about its files of a checkpoint, for `take_part`."""
        self._put(f"{name}/{part}", content)

    def take_part(self, name: str, part: str) -> bytes | None:
        """None: it is not there yet."""
        content = self._get(f"{name}/{part}")
        if content is not None:
            self._call("rm_file", f"{name}/{part}")
        return content

    def put_files(self, staged: Path, name: str, files: Iterable[str]) -> None:
        """Put files of the local directory `staged`. Raises ObjectStoreError if a later run has taken the store."""
        self._ensure_owner()
        for file in files:
            self._abort_uploads(f"{name}/{file}")
            self._call("put_file", str(staged / file), f"{name}/{file}")

    def _abort_uploads(self, below: str) -> None:
        """Abort what killed processes have left of uploads in parts: S3 keeps it, invisible, until it is aborted; the
        other stores delete it by themselves.
        """
        if self._scheme != "s3":
            return
        s3 = self._file_system.fs
        bucket, _, root = f"{self._root}/".partition("/")
        # It may be forbidden, and then a rule of the bucket has to do it; where the store is away, the upload says so.
        with contextlib.suppress(Exception):
            for upload in s3.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=root + below).get("Uploads", ()):
                # Others, such as a job with a prefix below this one, may be uploading there.
                if _FILE_OF_CHECKPOINT.fullmatch(upload["Key"].removeprefix(root)):
                    s3.call_s3("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    def reserve(self, name: str, who: str) -> bool:
        """True for one of the processes that want to put the checkpoint `name`, and for it also at a second try. Raises
        NotImplementedError if the store has no conditional puts.
        """
        key = f"{name}/{_RESERVED}"
        self._ensure_owner()
        with contextlib.suppress(FileExistsError):
            self._call("pipe_file", key, who.encode(), mode="create")
        return self._get(key) == who.encode()

    def is_reserved(self, name: str) -> bool:
        return self._get(f"{name}/{_RESERVED}") is not None

    def commit(self, staged: Path, name: str, manifest: Manifest, source: str | None) -> None:
        """Put a checkpoint from the local directory `staged` into the store, or copy the files of its checkpoint
        `source`. Raises ObjectStoreError, OSError.
        """
        self._ensure_owner()
        files = manifest.all_files
        if name.endswith(".again"):  # it is there as well if a process died before it had deleted the other one
            with contextlib.suppress(FileNotFoundError):
                self._call("rm_file", f"{name}/{MANIFEST}")
        if source is None:
            own = [file for file in files if (staged / file).exists()]  # the rest: by other nodes
            self.put_files(staged, name, own)
        else:
            for file in files:
                self._call("cp_file", f"{source}/{file}", f"{name}/{file}")
        if damage := self._find_missing(name, files, self._list_below(name)):
            raise ObjectStoreError("; ".join(damage.values()))
        self._ensure_owner()  # the upload may have taken long
        self._put(f"{name}/{MANIFEST}", manifest.to_json(), create=True)
        self._put(_NEWEST, name.encode())
        _write_remote_record(staged, _object_version(self._info(f"{name}/{MANIFEST}")), {})

    def delete_checkpoint(self, name: str) -> None:
        """The manifest first: it is no checkpoint from then on."""
        self._ensure_owner()
        with contextlib.suppress(FileNotFoundError):
            self._call("rm_file", f"{name}/{MANIFEST}")
        if keys := [key for key in self._list_below(name) if key != f"{name}/{MANIFEST}"]:
            with contextlib.suppress(FileNotFoundError):
                self._call("rm", keys)

    def rename_checkpoint(self, old: str, new: str) -> None:
        """A checkpoint is set aside."""
        self._ensure_owner()
        files = [key.partition("/")[2] for key in self._list_below(old)]
        for file in sorted(files, key=lambda file: file == MANIFEST):
            self._call("cp_file", f"{old}/{file}", f"{new}/{file}")
        self.delete_checkpoint(old)

    def write_small_file(self, name: str, content: bytes = b"") -> None:
        """A small file beside the checkpoints. Raises ObjectStoreError if a later run has taken the store."""
        self._ensure_owner()
        self._put(name, content)

    def read_small_file(self, name: str) -> bytes | None:
        """A small file beside the checkpoints; None without one."""
        return self._get(name)

    def drop_local_copies(self, keep: Path) -> None:
        """Files of other checkpoints than `keep` on this node: they can be fetched again."""
        with self._lock_copy():
            for mark in self._directory.glob(f"*/{_REMOTE}"):
                if mark.parent != keep:
                    for file in {*mark.parent.glob("*"), *mark.parent.glob(".*")}:
                        if file.name not in (MANIFEST, _REMOTE):
                            file.unlink(missing_ok=True)

    # --- calls -------------------------------------------------------------------------------------------------------

    def _list_below(self, name: str) -> _ObjectsByKey:
        """The objects below a name, by keys relative to the URL."""
        self._file_system.invalidate_cache()
        try:
            listed: _ObjectsByKey = self._call("find", name, detail=True)
        except FileNotFoundError:
            return {}
        return listed

    def _info(self, key: str) -> _ObjectInfo | None:
        self._file_system.invalidate_cache()
        try:
            info: _ObjectInfo = self._call("info", key)
        except FileNotFoundError:
            return None
        return info if info["type"] == "file" else None

    def _get(self, key: str) -> bytes | None:
        try:
            data: bytes = self._call("cat_file", key)
        except FileNotFoundError:
            return None
        return data

    def _put(self, key: str, data: bytes, create: bool = False) -> None:
        """`create`: only if there is none, where the store has conditional puts. Raises ObjectStoreError."""
        how: Mapping[str, Any] = {"mode": "create"} if create else {}
        try:
            self._call("pipe_file", key, data, **how)
        except FileNotFoundError:
            raise ObjectStoreError(f"there is no bucket for {self.url}") from None
        except FileExistsError:
            if self._get(key) != data:  # else an earlier try has put it, and its answer was lost
                raise ObjectStoreError(f"{self.url}/{key} is there already: another run writes there") from None
        except NotImplementedError:
            self._call("pipe_file", key, data)

    @functools.cached_property
    def _file_system(self) -> Any:
        """fsspec's file system of the URL. Raises ObjectStoreError without the package."""
        if why := missing_package_reason(self._directory):
            raise ObjectStoreError(why)
        import fsspec

        files = fsspec.filesystem(self._scheme, use_listings_cache=False, **_OPTIONS.get(self._scheme, {}))
        return fsspec.filesystem("dir", path=self._root, fs=files)

    def _call(self, verb: str, *args: Any, patience_s: float | None = None, **options: Any) -> Any:
        """One call of fsspec, tried again while the store fails. Raises FileNotFoundError, FileExistsError,
        NotImplementedError, and ObjectStoreError for everything else.
        """
        import tenacity

        again = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_transient),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=_PAUSE_MAX_S),
            stop=tenacity.stop_all(
                tenacity.stop_after_delay(patience_s or self.patience_s), tenacity.stop_after_attempt(_MIN_TRIES)
            ),
            reraise=True,
        )
        method = getattr(self._file_system, verb)
        try:
            return again(method, *args, **options)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, f"there is no such object in {self.url}", str(args[0])) from None
        except (FileExistsError, NotImplementedError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSYS:
                raise NotImplementedError from None
            raise ObjectStoreError(f"{self.url}: {_error_sentence(error)}") from error

    def _make_private_directory(self) -> None:
        """Make the local directory. Other users might have made the root of all copies, or what is below it."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        at = scheme_index(self._directory)
        for path in (self._directory, *self._directory.parents)[: len(self._directory.parts) - (at or 0) + 1]:
            if os.stat(path, follow_symlinks=False).st_uid not in (0, os.geteuid()):
                raise ObjectStoreError(f"{path} belongs to another user; set {CACHE_VARIABLE}")

    @contextlib.contextmanager
    def _lock_copy(self, number: int = _FILE_LOCK_COUNT) -> Iterator[None]:
        """One process of this node at a time changes the copy; numbers below _FILE_LOCK_COUNT: copies a file."""
        fd = os.open(self._directory / f".copying-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor, too
            os.close(fd)


def why_not_in_store(path: Path, file: str) -> str | None:
    """The reason why the store does not have a file that is not on this node; None: it does."""
    remote = _read_remote_record(path)
    return remote["damage"].get(file) if remote else f"{file} is missing"


@functools.lru_cache(maxsize=16)
def cached_store(directory: Path, url: str) -> ObjectStore:
    return ObjectStore(directory, url)


def _object_version(info: Mapping[str, Any] | None) -> str:
    """The version of an object: it changes with each put."""
    named = ("ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "created")
    return next((f"{info['size']} {info[name]}" for name in named if name in info), "") if info else ""


def _read_remote_record(path: Path) -> _ObjectsByKey:
    try:
        objects: _ObjectsByKey = json.loads((path / _REMOTE).read_bytes())
    except (OSError, ValueError):
        return {}
    return objects


def _write_remote_record(path: Path, version: str, damage: Mapping[str, str]) -> None:
    (path / _REMOTE).write_text(json.dumps({"version": version, "damage": damage}), encoding="ascii")


def _read_or_none(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _remove(path: Path) -> None:
    trash = path.with_name(f".dropped.{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, trash)
        shutil.rmtree(trash, ignore_errors=True)


def _is_transient(error: BaseException) -> bool:
    """True unless the same call would fail in the same way."""
    final = (
        FileNotFoundError,
        FileExistsError,
        PermissionError,
        NotImplementedError,
        TypeError,
        ImportError,
    )
    no_credentials = "Credentials" in type(error).__name__
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOSYS)
    return isinstance(error, Exception) and not (isinstance(error, final) or no_credentials or full)


def _run_in_words(found: Mapping[str, Any]) -> str:
    return f"run {found.get('run')!r} of job {found.get('job')!r} on {found.get('host')}"


def _error_sentence(error: Exception) -> str:
    text = (
        (isinstance(error, OSError) and error.strerror) or str(error).strip().partition("\n")[0] or type(error).__name__
    )
    return f"access denied ({text})" if isinstance(error, PermissionError) else text
