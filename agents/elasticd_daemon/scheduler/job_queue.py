"""Requests of people, written into the store: submit and cancel jobs, cordon and uncordon nodes; and reading it all.

Every function may be called from any thread of any agent, several at once: after a lost race it reads again, and it
returns the record that counts. UsageError: the request is impossible. StoreUnavailable: the store does not answer; the
sentence says what is known about the request.

Several agents serve requests at once, and a client repeats one whose answer it has not seen. Both are settled by the
records themselves: every write is a compare-and-swap against what was read, a submission has a token by which its
repetition is recognised, a result is final once it is written, and numbers are taken from one sequence that continues
above everything known even if it was lost.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import replace

from elasticd.errors import StoreUnavailable, UsageError, WireError
from elasticd_agent.model.job import TERMINATED_EXIT_CODE, check_identifier, check_new_id
from elasticd_agent.model.keys import decode_record
from elasticd_agent.model.phrases import shortened
from elasticd_agent.store import Store, Versioned
from elasticd_agent.store.cache import StoreCache
from elasticd_daemon import keys as names
from elasticd_daemon.records import ClusterView, Cordon, JobResult, KnownNode, NodeStatus, Placement, Submission

CACHED_PREFIXES = (names.SUBMISSIONS, names.PLACEMENTS, names.RESULTS, names.CORDONS)
"""The records that every agent keeps current; node statuses, which change most, concern the scheduler only."""
MAX_LOST_RACES = 100
"""A write that is lost this often in a row is a fault and no race."""
MAX_REASON_CHARS = 500
MAX_RESULT_ROUNDS = 200
MAX_ROUND_REASON_CHARS = 160
MAX_RESULT_NODES = 1000
MAX_SUBMISSION_SPEC_BYTES = 256 * 1024


def ignore_sentence(sentence: str) -> None:
    """Drop a sentence, for callers that do not report undecodable records."""


def cached_view(cache: StoreCache) -> ClusterView:
    """The records that `cache` keeps current, without node statuses."""
    return ClusterView(
        cordons=cache.records(names.CORDONS, Cordon),
        submissions=cache.records(names.SUBMISSIONS, Submission),
        placements=cache.records(names.PLACEMENTS, Placement),
        results=cache.records(names.RESULTS, JobResult),
    )


def read_view(
    store: Store,
    log: Callable[[str], None] = ignore_sentence,
    cache: StoreCache | None = None,
    *,
    watched: bool = False,
) -> ClusterView:
    """Everything that the store holds at this moment. `log` receives a sentence for each undecodable record.

    `watched`: all but the nodes as `cache` keeps it current, which spares reading ten thousand jobs.
    """
    cache = cache or StoreCache(store, ignore_sentence)
    return ClusterView(
        nodes=cache.read_records(names.NODES, NodeStatus, log),
        known_nodes=cache.read_records(names.KNOWN_NODES, KnownNode, log, cached_if_watched=watched),
        cordons=cache.read_records(names.CORDONS, Cordon, log, cached_if_watched=watched),
        submissions=cache.read_records(names.SUBMISSIONS, Submission, log, cached_if_watched=watched),
        placements=cache.read_records(names.PLACEMENTS, Placement, log, cached_if_watched=watched),
        results=cache.read_records(names.RESULTS, JobResult, log, cached_if_watched=watched),
    )


def submit(store: Store, request: Submission, *, stem: str = "job", cache: StoreCache | None = None) -> Submission:
    """Submit a job; its number, which `request` lacks, is its position in the queue. Without an id it gets
    `new_job_id(stem)`.

    `token` identifies this submission: repeated with it, e.g. after an outage, the job that was submitted the first
    time is returned. Without it, the id of an unfinished job is refused. `cache` saves decoding what is known already.
    """
    job, token = request.job, request.token
    if job:
        check_new_id("job id", job)
    if token:
        known = (cache or StoreCache(store, ignore_sentence)).read_records(
            names.SUBMISSIONS, Submission, ignore_sentence
        )
        if earlier := next((s for s in known if s.token == token), None):
            return earlier
    for _ in range(MAX_LOST_RACES):
        before = _require_free_id(store, job, token) if job else None
        if isinstance(before, Submission):
            return before
        number = _take_number(store, _ended_number(store, job) if job else 0)
        submission = replace(request, job=job or new_job_id(stem), number=number)
        _check_submission(submission)
        if _write_submission(store, before, submission):
            return submission
    raise _lost_races_error("the job was not submitted")


def submit_again(store: Store, job: str, number: int, record: bytes) -> None:
    """Put the submission of a job that runs back into a store that has lost it, or has only an earlier run's."""
    key = names.SUBMISSIONS + job
    before = store.read(key)
    if before is None or decode_record(Submission, key, before.value).number < number:
        store.compare_and_swap(key, None if before is None else before.version, record)


def new_job_id(stem: str) -> str:
    """train-lm-3f2a: a name that is taken already is made again."""
    return f"{stem}-{secrets.token_hex(2)}"


def cancel(store: Store, job: str, by: str, at: float) -> JobResult:
    """End a job. Returns the result that counts: the job's own if it ended first."""
    number = _newest_number(store, job)
    return record_result(
        store, JobResult(job, number, "cancelled", TERMINATED_EXIT_CODE, f"cancelled{_by_phrase(by)}", at)
    )


def record_result(store: Store, result: JobResult) -> JobResult:
    """Write how a job ended, once. Returns the result that counts; that of an earlier run is replaced."""
    result = _shorten_result(result)
    key = names.RESULTS + result.job
    for _ in range(MAX_LOST_RACES):
        before = store.read(key)
        if before is not None:
            try:
                known = decode_record(JobResult, key, before.value)
                if known.number >= result.number:
                    return known
            except WireError:
                pass  # no agent can tell what it was about: this one replaces it
        if store.compare_and_swap(key, None if before is None else before.version, result.to_json()):
            return result
    raise _lost_races_error(f"the result of {result.job!r} was not written")


def cordon(store: Store, node: str, drain: bool, reason: str, by: str, at: float) -> Cordon:
    """No new jobs for a node; with `drain` its jobs leave it. A cordon does not undo a drain; `uncordon` does."""
    check_identifier("node", node)
    key = names.CORDONS + node
    cordon = Cordon(node, drain, _short(reason), cordoned_by=by, cordoned_at=at)
    for _ in range(MAX_LOST_RACES):
        before = store.read(key)
        if before is not None:
            try:
                cordon = replace(cordon, drain=drain or decode_record(Cordon, key, before.value).drain)
            except WireError:
                pass  # this one, which can be decoded, replaces it
        if store.compare_and_swap(key, None if before is None else before.version, cordon.to_json()):
            return cordon
    raise _lost_races_error(f"{node!r} was not cordoned")


def uncordon(store: Store, node: str) -> bool:
    """The node takes jobs again. False: it was not cordoned."""
    check_identifier("node", node)
    return store.delete(names.CORDONS + node)


def _take_number(store: Store, above: int) -> int:
    """The next number, `above` that of the job's last run: a store that was restored may have an old sequence."""
    for _ in range(MAX_LOST_RACES):
        entry = store.read(names.SUBMISSION_SEQUENCE)
        text = b"0" if entry is None else entry.value
        # A sequence that was lost or damaged continues above every known number.
        number = int(text) if text.isdigit() and len(text) < 16 else 0
        if number == 0:
            known = read_view(store)
            taken = [*(s.number for s in known.submissions), *(p.number for p in known.placements)]
            number = max([0, *taken, *(r.number for r in known.results)])
        number = max(number, above) + 1
        if store.compare_and_swap(
            names.SUBMISSION_SEQUENCE, None if entry is None else entry.version, str(number).encode()
        ):
            return number
    raise _lost_races_error("the job got no number")


def _lost_races_error(what: str) -> StoreUnavailable:
    return StoreUnavailable(f"{what}: {MAX_LOST_RACES} attempts to write to the store lost a race")


def _ended_number(store: Store, job: str) -> int:
    """The number of the job's last run that has ended; 0 if there is none that can be decoded."""
    key = names.RESULTS + job
    entry = store.read(key)
    with contextlib.suppress(WireError):
        return 0 if entry is None else decode_record(JobResult, key, entry.value).number
    return 0


def _newest_number(store: Store, job: str) -> int:
    """The number of the job's newest run. Raises UsageError if there is no such job."""
    check_identifier("job id", job)
    for prefix, kind in ((names.SUBMISSIONS, Submission), (names.PLACEMENTS, Placement), (names.RESULTS, JobResult)):
        entry = store.read(prefix + job)
        if entry is not None:
            try:
                known = decode_record(kind, prefix + job, entry.value)
                assert isinstance(known, (Submission, Placement, JobResult))
                return known.number
            except WireError as error:
                why = f"; {error}"
                break
    else:
        why = "; `elasticd jobs` lists all jobs"
    raise UsageError(f"there is no job {job!r}{why}")


def _shorten_result(result: JobResult) -> JobResult:
    """A record of about 40 kB at most, however long the history: etcd takes at most 1.5 MB, and all agents read it."""
    rounds = tuple(
        replace(summary, reason=_short(summary.reason, MAX_ROUND_REASON_CHARS))
        for summary in result.rounds[-MAX_RESULT_ROUNDS:]
    )
    return replace(result, reason=_short(result.reason), rounds=rounds, nodes=result.nodes[:MAX_RESULT_NODES])


def _require_free_id(store: Store, job: str, token: str) -> Versioned | Submission | None:
    """The record of an earlier run that has ended, which may be replaced; or the submission with this `token`."""
    key, result_key = names.SUBMISSIONS + job, names.RESULTS + job
    entry = store.read(key)
    if entry is None:
        return None
    try:
        earlier = decode_record(Submission, key, entry.value)
        result = store.read(result_key)
        ended = result is not None and decode_record(JobResult, result_key, result.value).number >= earlier.number
    except WireError as error:
        raise UsageError(f"{error}; choose another id, or remove the record by hand") from None
    if earlier.removed:
        raise UsageError(f"the records of the ended job {job!r} are being removed; try again in a few seconds")
    if ended:
        return entry
    if token and earlier.token == token:
        return earlier
    raise UsageError(
        f"job {job!r} has not ended: it was submitted{_by_phrase(earlier.submitted_by)} as number {earlier.number}; "
        f"cancel it first (elasticd cancel {job}), or choose another id"
    )


def _write_submission(store: Store, before: Versioned | None, submission: Submission) -> bool:
    key, value = names.SUBMISSIONS + submission.job, submission.to_json()
    try:
        return store.compare_and_swap(key, None if before is None else before.version, value)
    except StoreUnavailable as error:
        if _has_value(store, key, value):  # no other submission has this number
            return True
        raise StoreUnavailable(
            f"{error}; whether job {submission.job!r} was submitted is not known: `elasticd jobs` shows it once the "
            f"store answers; submitted again with the id {submission.job!r}, it is never run twice"
        ) from error


def _has_value(store: Store, key: str, value: bytes) -> bool:
    try:
        entry = store.read(key)
    except StoreUnavailable:
        return False
    return entry is not None and entry.value == value


def _check_submission(submission: Submission) -> None:
    size = len(submission.spec.encode(errors="replace"))
    if size > MAX_SUBMISSION_SPEC_BYTES:
        raise UsageError(
            f"job {submission.job!r}: its job file has {size} bytes; the limit is {MAX_SUBMISSION_SPEC_BYTES}"
        )
    try:
        Submission.from_json(submission.to_json())
    except WireError as error:
        raise UsageError(str(error)) from None


def _by_phrase(person: str) -> str:
    return f" by {person}" if person else ""


def _short(text: str, most: int = MAX_REASON_CHARS) -> str:
    return shortened(" ".join(text.split()), most)
