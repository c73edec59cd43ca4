"""What people ask of the daemons, written into the store: submit and cancel jobs, cordon and uncordon nodes.

Everything here may be called from any thread, by any daemon, several at once: a lost race is another look, the answer
is what counts in the end. Nothing waits, nothing is decided about where a job runs. UsageError: what was asked cannot
be; StoreUnavailable: the store does not answer, and the sentence says what is known then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from elasticd.errors import StoreUnavailable, UsageError, WireError
from elasticd_agent.model.exit_codes import TERMINATED
from elasticd_agent.model.job import check_identifier
from elasticd_agent.model.keys import decode_record
from elasticd_agent.node import keys as names
from elasticd_agent.node.records import Cordon, JobResult, Placement, Submission
from elasticd_agent.node.scheduler.policy import ClusterView
from elasticd_agent.node.scheduler.snapshot import StoreSnapshot
from elasticd_agent.store import Store, Versioned

MAX_RACES = 100
"""A write that is lost so often in a row is not a race but a fault."""
REASON_CHARS = 500
MAX_ROUNDS = 200
ROUND_REASON_CHARS = 160
MAX_NODES = 1000
"""How much of a job's history its ending keeps: the newest rounds, and the beginning of each one's reason."""
MAX_SPEC_BYTES = 256 * 1024


def submit(
    store: Store,
    spec_json: str,
    *,
    job: str | None,
    nodes: tuple[int, int],
    slots: tuple[int, int],
    submitted_by: str,
    submitted_at: float,
    token: str = "",
    grow: bool = True,
    snapshot: StoreSnapshot | None = None,
) -> Submission:
    """Hand a job in; its number is its place in the queue. Without an id it gets one, `job-<number>`.

    `token` is the caller's own word for this one submission: repeated with it, e.g. after an outage, the job that was
    handed in the first time is found again. Without it, an id whose job has not ended is refused. `looking`: who has
    looked at the store before, and so needs less time to.
    """
    if job is not None:
        check_identifier("job id", job)
    if token and (found := _by_token(snapshot or StoreSnapshot(store), token)) is not None:
        return found
    for _ in range(MAX_RACES):
        before = None if job is None else _require_free_id(store, job, token)
        if isinstance(before, Submission):
            return before
        number = _next_number(store)
        wants = Submission(
            job or f"job-{number}",
            number,
            spec_json,
            *nodes,
            *slots,
            submitted_by=submitted_by,
            submitted_at=submitted_at,
            token=token,
            grow=grow,
        )
        _check(wants)
        if _create(store, before, wants):
            return wants
    raise StoreUnavailable(f"the store lets nobody submit: {MAX_RACES} tries were lost to others")


def cancel(store: Store, job: str, by: str, at: float) -> JobResult:
    """End a job. The ending that counts comes back: the job's own if it was faster, or ended long ago."""
    number = _number(store, job)
    return record_result(store, JobResult(job, number, "cancelled", TERMINATED, f"cancelled{_by(by)}", at))


def record_result(store: Store, ending: JobResult) -> JobResult:
    """Write down how a job ended, once: the ending that counts comes back. An earlier run's is replaced."""
    ending = _bounded(ending)
    key = names.RESULTS + ending.job
    for _ in range(MAX_RACES):
        before = store.read(key)
        if before is not None:
            try:
                known = decode_record(JobResult, key, before.value)
                if known.number >= ending.number:
                    return known
            except WireError:
                pass  # nobody can tell what it was about; what is known now is more than that
        if store.compare_and_swap(key, None if before is None else before.version, ending.to_json()):
            return ending
    raise StoreUnavailable(
        f"the store does not take the ending of {ending.job!r}: {MAX_RACES} tries were lost to others"
    )


def cordon(store: Store, node: str, drain: bool, reason: str, by: str, at: float) -> Cordon:
    """No new work for a node; with `drain` its jobs leave it, too. A cordon takes no drain back; uncordon does."""
    check_identifier("node", node)
    key = names.CORDONS + node
    wanted = Cordon(node, drain, _short(reason), cordoned_by=by, cordoned_at=at)
    for _ in range(MAX_RACES):
        before = store.read(key)
        if before is not None:
            try:
                wanted = replace(wanted, drain=drain or decode_record(Cordon, key, before.value).drain)
            except WireError:
                pass  # it is replaced by one that can be understood
        if store.compare_and_swap(key, None if before is None else before.version, wanted.to_json()):
            return wanted
    raise StoreUnavailable(f"the store does not take the cordon of {node!r}: {MAX_RACES} tries were lost to others")


def uncordon(store: Store, node: str) -> bool:
    """The node takes work again. False: it was not cordoned."""
    check_identifier("node", node)
    return store.delete(names.CORDONS + node)


def read_view(store: Store, log: Callable[[str], None] = lambda sentence: None) -> ClusterView:
    """Everything that daemons have said, for people to look at; what cannot be understood is said and left out."""
    return StoreSnapshot(store).view(log)


# ---- submitting


def _next_number(store: Store) -> int:
    for _ in range(MAX_RACES):
        found = store.read(names.SEQUENCE)
        text = b"0" if found is None else found.value
        # A sequence that was lost or damaged goes on above every number that is known.
        number = int(text) if text.isdigit() and len(text) < 16 else 0
        if number == 0:
            known = read_view(store)
            taken = [*(s.number for s in known.submissions), *(p.number for p in known.placements)]
            number = max([0, *taken, *(e.number for e in known.results)])
        number += 1
        if store.compare_and_swap(names.SEQUENCE, None if found is None else found.version, str(number).encode()):
            return number
    raise StoreUnavailable(f"the store gives out no number: {MAX_RACES} tries were lost to others")


def _number(store: Store, job: str) -> int:
    """The number under which a job runs or waits, or ran last. Raises UsageError if there is none of that name."""
    check_identifier("job id", job)
    for prefix, kind in ((names.SUBMISSIONS, Submission), (names.PLACEMENTS, Placement), (names.RESULTS, JobResult)):
        found = store.read(prefix + job)
        if found is not None:
            try:
                known = decode_record(kind, prefix + job, found.value)
                assert isinstance(known, (Submission, Placement, JobResult))
                return known.number
            except WireError as error:
                why = f"; {error}"
                break
    else:
        why = "; `elasticd jobs` lists those there are"
    raise UsageError(f"there is no job {job!r}{why}")


def _bounded(ending: JobResult) -> JobResult:
    """A history of any length in a record of some 40 kB at most: etcd takes no more than 1.5 MB, and reads all."""
    rounds = tuple(
        replace(note, reason=_short(note.reason, ROUND_REASON_CHARS)) for note in ending.rounds[-MAX_ROUNDS:]
    )
    return replace(ending, reason=_short(ending.reason), rounds=rounds, nodes=ending.nodes[:MAX_NODES])


def _require_free_id(store: Store, job: str, token: str) -> Versioned | Submission | None:
    """What is there of an earlier run, which has ended; or the submission that `token` stands for."""
    found = store.read(names.SUBMISSIONS + job)
    if found is None:
        return None
    try:
        earlier = decode_record(Submission, names.SUBMISSIONS + job, found.value)
        ending = store.read(names.RESULTS + job)
        over = (
            ending is not None and decode_record(JobResult, names.RESULTS + job, ending.value).number >= earlier.number
        )
    except WireError as error:
        raise UsageError(f"{error}; choose another id, or remove it by hand") from None
    if earlier.removed:
        raise UsageError(f"what is left of job {job!r} is just being removed; try again in a few seconds")
    if over:
        return found
    if token and earlier.token == token:
        return earlier
    raise UsageError(
        f"job {job!r} has not ended: it was submitted{_by(earlier.submitted_by)} as number {earlier.number}; "
        f"cancel it first (elasticd cancel {job}), or choose another id"
    )


def _create(store: Store, before: Versioned | None, wants: Submission) -> bool:
    key, value = names.SUBMISSIONS + wants.job, wants.to_json()
    try:
        return store.compare_and_swap(key, None if before is None else before.version, value)
    except StoreUnavailable as error:
        if _is_there(store, key, value):  # the number is ours alone, so this is our record
            return True
        raise StoreUnavailable(
            f"{error}; whether job {wants.job!r} was submitted is not known: `elasticd jobs` shows it once the store "
            f"answers; submitted again with the id {wants.job!r}, it is never run twice"
        ) from error


def _is_there(store: Store, key: str, value: bytes) -> bool:
    try:
        found = store.read(key)
    except StoreUnavailable:
        return False
    return found is not None and found.value == value


def _by_token(looking: StoreSnapshot, token: str) -> Submission | None:
    return next((s for s in looking.submissions() if s.token == token), None)


def _check(wants: Submission) -> None:
    if (size := len(wants.spec.encode(errors="replace"))) > MAX_SPEC_BYTES:
        raise UsageError(f"job {wants.job!r}: its job file has {size} bytes; at most {MAX_SPEC_BYTES} are taken")
    try:
        Submission.from_json(wants.to_json())
    except WireError as error:
        raise UsageError(str(error)) from None


def _by(who: str) -> str:
    return f" by {who}" if who else ""


def _short(text: str, most: int = REASON_CHARS) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
