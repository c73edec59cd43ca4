"""The API through its routes: jobs, nodes, logs, and the errors."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from elasticd_agent.hangs.collector.record import NodeEvidence, RankEvidence
from elasticd_agent.model.log_events import TimeSplit
from elasticd_agent.system.network.addresses import format_endpoint
from elasticd_agent.system.network.http_auth import AGENT_AUTH_SCHEME
from elasticd_agent.telemetry.console import Level, QuietConsole
from elasticd_agent.telemetry.timeline import JobTimeline
from elasticd_daemon import keys as names
from elasticd_daemon.api.client import AgentClient, Reply, Unreachable
from elasticd_daemon.api.local import READ_TIMEOUT_S, LocalJobs
from elasticd_daemon.api.node_files import ClusterReader
from elasticd_daemon.api.peers import Peers
from elasticd_daemon.api.rank_logs import MAX_CHUNK_BYTES, LogRequest
from elasticd_daemon.api.schema import LogChunk
from elasticd_daemon.api.service import Conflict, JobService
from elasticd_daemon.journal import AgentJournal
from elasticd_daemon.records import ClusterView, JobResult, NodeStatus, RoundSummary, RunnerStatus, Submission
from elasticd_daemon.scheduler.job_queue import read_view
from elasticd_daemon.scheduler.policy import BEHIND_OTHERS_REASON
from tests.daemon.served import JOB, Outage, Served
from tests.etcd import Authority

Serve = Callable[..., Served]
Until = Callable[[Callable[[], object], float], object]
NOW = 1_800_000_000.0


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with ExitStack() as stack:

        def start(**how: Any) -> Served:
            made = Served(tmp_path / f"{how.get('node', 'n1')}-{len(os.listdir(tmp_path))}", now=lambda: NOW, **how)
            stack.callback(made.close)
            return made

        yield start


def running(number: int = 1, state: Any = "running", why: str = "") -> RunnerStatus:
    return RunnerStatus("llama", number, (0, 1), state, why)


def trained(one: Served) -> None:
    """A job of two rounds, whose second one made 90 more steps and is at it still."""
    one.announce(running())
    one.place("llama", one.submit(), "n1", reason="runs on n1 (slots 0-1)")
    one.event(
        "round_published", NOW - 100, 1, world_size=2, nodes=["n1"], restarts=0, reason="first round", cause="start"
    )
    one.event("group_started", NOW - 100, 1, ranks=[0, 1])
    one.event("first_step", NOW - 90, 1, step=1)
    one.event("checkpoint_saved", NOW - 80, 1, step=11)
    one.event("worker_exited", NOW - 70, 1, step=21, rank=1)
    one.event(
        "round_published",
        NOW - 70,
        2,
        world_size=2,
        nodes=["n1"],
        restarts=1,
        reason="rank 1 was killed",
        cause="crash",
    )
    one.event("resumed", NOW - 61, 2, step=20, donor=0, steps_saved=9)
    one.event("first_step", NOW - 60, 2, step=12)
    one.event("work_recovered", NOW - 50, 2, step=22, seconds=20.0)
    spent = TimeSplit(36.0, 20.0, 10.0, "useful")
    one.event("checkpoint_saved", NOW - 34, 2, step=40, bytes=600, seconds=0.5, spent=spent)
    one.answers["status"] = {"phase": "running", "round": 2, "world_size": 2, "step": 101, "steps_per_second": 1.5}
    one.answers["status"]["snapshot"] = {"step": 100, "round": 2, "at": NOW - 3}


# --- jobs -------------------------------------------------------------------------------------------------------------


def test_job_from_submission_to_end(serve: Serve) -> None:
    one = serve()
    one.announce()
    api = one.unix()
    assert api.get("/v1/jobs").document()["jobs"] == []
    assert one.submit() == 1
    row = api.get("/v1/jobs/llama").document()
    assert (row["state"], row["submitted_by"], row["requested"]) == (
        "pending",
        _me(),
        {"nodes": [1, 1], "slots": [1, 2], "spares": 0},
    )
    assert "not scheduled yet" in row["reason"]
    one.place("llama", 1, reason="n1 is drained; pending: needs 1 node with 1 free slot; n1 is drained")
    assert one.submit("late") == 2
    one.place("late", 2, reason=BEHIND_OTHERS_REASON)
    reasons = {row["job"]: row["reason"] for row in api.get("/v1/jobs").document()["jobs"]}
    assert reasons["llama"] == "n1 is drained; pending: needs 1 node with 1 free slot; n1 is drained"
    assert reasons["late"] == "pending behind llama, which is next and needs 1 node with 1 free slot"
    assert api.get("/v1/jobs/late").document()["reason"] == reasons["late"]
    assert api.post("/v1/jobs/late/cancel").code == 200
    one.place("llama", 1, "n1")
    assert api.get("/v1/jobs/llama").document()["state"] == "starting"
    one.announce(running(why="3 of 4 slots"))
    row = api.get("/v1/jobs/llama").document()
    assert row["assignments"] == [{"node": "n1", "slots": [0, 1], "state": "running", "reason": "3 of 4 slots"}]
    assert (row["state"], row["slots"], row["nodes"]) == ("running", 2, ["n1"])
    again = api.post("/v1/jobs", JOB, "application/toml", query={"id": "llama"})
    assert (again.code, "has not ended" in again.why) == (409, True)
    done = api.post("/v1/jobs/llama/cancel")
    assert (done.code, done.document()["reason"]) == (200, f"cancelled by {_me()}")
    assert api.post("/v1/jobs/llama/cancel").code == 200, "cancelled twice is cancelled"
    row = api.get("/v1/jobs/llama").document()
    assert (row["state"], row["exit_code"], row["ended_seconds"]) == ("cancelled", 143, 0.0)
    assert one.submit() == 3, "an id may be used again"


def test_list_of_jobs_has_no_field_of_records_and_says_what_cannot_be_read(serve: Serve) -> None:
    one = serve()
    one.announce()
    one.submit()
    one.store.compare_and_swap(names.SUBMISSIONS + "\udcff", None, b"?")
    answer = one.unix().get("/v1/jobs").document()
    (row,) = answer["jobs"]
    assert next(iter(row)) == "job"
    assert "unknown" not in row
    (problem,) = answer["problems"]
    assert names.SUBMISSIONS + "?" in problem


def test_ended_job_cannot_be_cancelled(serve: Serve) -> None:
    one = serve()
    number = one.submit()
    ending = JobResult(
        "llama", number, "failed", 1, "rank 3: ValueError", NOW, ("n7",), (RoundSummary(4, 8, "r", NOW),), 77
    )
    assert one.store.compare_and_swap(names.RESULTS + "llama", None, ending.to_json())
    reply = one.unix().post("/v1/jobs/llama/cancel")
    assert (reply.code, reply.why) == (409, "job 'llama' has failed already: rank 3: ValueError")
    row = one.unix().get("/v1/jobs/llama").document()
    assert (row["progress"]["step"], row["progress"]["rounds"][0]["round"]) == (77, 4), "what the ending remembers"


def test_result_fills_in_what_event_logs_lack(serve: Serve) -> None:
    """A full disk may cost lines of the event log, up to the job's end."""
    one = serve()
    number = one.submit()
    one.place("llama", number, "n1")
    one.event("round_published", NOW - 90, 1, world_size=2, nodes=["n1"], restarts=0, reason="began", cause="start")
    one.event("first_step", NOW - 60, 2, step=12)
    rounds = tuple(RoundSummary(each, 3, f"reason {each}", NOW - 90 + each) for each in (1, 2, 3))
    ending = JobResult("llama", number, "failed", 1, "rank 3: ValueError", NOW, ("n1",), rounds)
    assert one.store.compare_and_swap(names.RESULTS + "llama", None, ending.to_json())
    shown = one.unix().get("/v1/jobs/llama").document()["progress"]["rounds"]
    told = [(each["round"], each["world_size"], each["reason"], each["first_step"]) for each in shown]
    assert told == [(1, 2, "began", None), (2, 3, "reason 2", 12), (3, 3, "reason 3", None)]


def test_cancel_names_the_nodes_where_the_job_still_runs(serve: Serve) -> None:
    one = serve()
    one.announce()
    one.submit()
    one.place("llama", 1, "n1")
    for state, leaving in (("refused", []), ("running", ["n1"])):
        one.announce(running(state=state))
        assert one.unix().post("/v1/jobs/llama/cancel").document()["leaving"] == leaving
        assert one.unix().get("/v1/jobs/llama").document()["leaving"] == leaving


def test_progress_from_event_log_and_runner(serve: Serve) -> None:
    one = serve()
    trained(one)
    progress = one.unix().get("/v1/jobs/llama").document()["progress"]
    assert (progress["round"], progress["step"], progress["steps_per_second"]) == (2, 101, 1.5)
    saved = {"step": 40, "round": 2, "at": NOW - 34, "age_seconds": 34.0, "bytes": 600, "blocked_seconds": 0.5}
    assert progress["checkpoint"] == saved
    unknown = {"bytes": None, "blocked_seconds": None}
    assert progress["snapshot"] == {"step": 100, "round": 2, "at": NOW - 3, "age_seconds": 3.0, **unknown}
    assert (progress["donor_resumes"], progress["donor_steps"]) == (1, 9)
    assert progress["goodput"] == 0.7
    assert [one["reason"] for one in progress["rounds"]] == ["first round", "rank 1 was killed"]
    assert [(one["resumed_step"], one["donor"]) for one in progress["rounds"]] == [(None, None), (20, 0)]
    del one.answers["status"]
    progress = one.unix().get("/v1/jobs/llama").document()["progress"]
    assert (progress["step"], progress["steps_per_second"], progress["runner_problem"]) == (
        40,
        None,
        "no runner is there",
    )


def test_submission_repeated_with_its_token_is_one_job(serve: Serve) -> None:
    one = serve()
    made = [one.unix().post("/v1/jobs", JOB, "application/toml", query={"token": "t"}).document() for _ in range(2)]
    assert made[0] == made[1]
    assert len(one.unix().get("/v1/jobs").document()["jobs"]) == 1


@pytest.mark.parametrize(
    ("body", "kind", "code", "said"),
    [
        (b"command = [", "application/toml", 400, "the job: is not TOML"),
        (b'command = ["x"]\nworkdir = "/"\ncolour = 1', "application/toml", 400, "colour"),
        (b'{"command": ["x"], "workdir": "/", "nodes": "3:1"}', "application/json", 400, "nodes"),
        (b"command: [x]\nworkdir: /\n", "application/yaml", 415, "application/toml"),
        (b"\xff\xfe", "application/toml", 400, "UTF-8"),
        (b"", "application/toml", 400, "a job file is missing"),
        (JOB, "text/plain", 415, "application/toml"),
        (JOB, "", 415, "Content-Type"),
    ],
)
def test_invalid_job_is_refused_with_a_sentence(serve: Serve, body: bytes, kind: str, code: int, said: str) -> None:
    one = serve()
    reply = one.unix().post("/v1/jobs", body, kind)
    assert (reply.code, said in reply.why, "\n" in reply.why) == (code, True, False), reply.why
    assert not one.store.list("/")


def test_limits_apply_to_submitted_jobs(serve: Serve) -> None:
    from elasticd_daemon.config.decode import ConfigError
    from elasticd_daemon.config.job_file import JobFile

    def check(job: JobFile) -> None:
        raise ConfigError("user", "is not one of this node's [limits] users")

    one = serve()
    one.service.check_job = check
    reply = one.unix().post("/v1/jobs", JOB, "application/toml")
    assert (reply.code, reply.why) == (400, "user: is not one of this node's [limits] users")
    assert not one.store.list("/")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/jobs/nope"),
        ("GET", "/v1/jobs/nope/logs"),
        ("GET", "/v1/jobs/nope/explain"),
        ("POST", "/v1/jobs/nope/cancel"),
        ("POST", "/v1/jobs/nope/dump"),
        ("POST", "/v1/nodes/nope/cordon"),
        ("POST", "/v1/nodes/nope/drain"),
        ("POST", "/v1/nodes/nope/uncordon"),
    ],
)
def test_missing_thing_is_a_404_that_lists_existing_ones(serve: Serve, method: str, path: str) -> None:
    one = serve()
    one.announce()
    one.submit()
    before = one.store.list("/")
    reply = one.unix().request(method, path)
    what = "there is no node 'nope'; there is n1" if "nodes" in path else "there is no job 'nope'; there is llama"
    assert (reply.code, reply.why) == (404, what)
    assert one.store.list("/") == before


def test_store_outage_is_a_503_and_local_reads_still_work(serve: Serve) -> None:
    one = serve()
    one.submit()
    one.log(1, 0, "stdout", "hello\n")
    one.store.is_down = True
    api = one.unix()
    for method, path in [
        ("GET", "/v1/jobs"),
        ("GET", "/v1/nodes"),
        ("GET", "/v1/jobs/llama"),
        ("POST", "/v1/jobs/llama/cancel"),
    ]:
        reply = api.request(method, path)
        assert (reply.code, "the store does not answer: 127.0.0.1:2379 refuses" in reply.why) == (503, True)
    assert api.post("/v1/jobs", JOB, "application/toml").code == 503
    assert (api.get("/healthz").code, api.get("/status").code) == (200, 200)
    assert api.get("/v1/local/jobs/llama/logs", {"number": 1}).body == b"hello\n"
    one.store.is_down = False
    assert api.get("/v1/jobs/llama").code == 200


# --- nodes ------------------------------------------------------------------------------------------------------------


def test_cordon_drain_and_uncordon(serve: Serve) -> None:
    one = serve()
    one.announce(running(), gpus=("a", "b"), labels=("rack=7",))
    one.place("llama", one.submit(), "n1")
    api = one.unix()

    def shown() -> dict[str, Any]:
        (row,) = api.get("/v1/nodes").document()["nodes"]
        return {key: row[key] for key in ("state", "used", "slots", "jobs", "reason")}

    assert shown() == {"state": "ready", "used": 2, "slots": 4, "jobs": ["llama"], "reason": ""}
    assert api.post("/v1/nodes/n1/cordon", b'{"reason": "fan 3"}').document()["state"] == "cordoned"
    assert shown()["reason"] == f"fan 3 (by {_me()})"
    assert api.post("/v1/nodes/n1/drain").document()["state"] == "draining"
    one.announce()
    one.place("llama", 1)
    assert shown() == {"state": "drained", "used": 0, "slots": 4, "jobs": [], "reason": f"(by {_me()})"}
    assert api.post("/v1/nodes/n1/uncordon").code == 200
    reply = api.post("/v1/nodes/n1/uncordon")
    assert (reply.code, reply.why) == (409, "node 'n1' is not cordoned")
    for body in (b"reason", b"[]", b'{"reason": 7}', b'{"reason": "\\ud800"}', b"[" * 50_000):
        assert api.post("/v1/nodes/n1/cordon", body).code == 400
    assert shown()["state"] == "ready"


# --- logs -------------------------------------------------------------------------------------------------------------


def test_logs_are_read_in_pieces_from_the_newest_round(serve: Serve) -> None:
    one = serve()
    trained(one)
    one.log(1, 0, "stdout", "old\n")
    one.log(2, 0, "stdout", "0123456789")
    one.log(2, 1, "stderr", "trouble\n")
    one.files().runner_log.write_text("round 2: …\n")
    api = one.unix()

    def piece(**query: Any) -> tuple[bytes, int]:
        reply = api.get("/v1/jobs/llama/logs", query)
        assert reply.code == 200, reply
        assert (reply.headers["elasticd-node"], reply.headers["elasticd-newest"]) == ("n1", "2")
        assert reply.headers["elasticd-over"] == "0"
        return reply.body, int(reply.headers["elasticd-next"])

    assert piece() == (b"0123456789", 10)
    assert piece(offset=3, limit=4) == (b"3456", 7)
    assert piece(offset=10) == (b"", 10)
    assert piece(offset=-3) == (b"789", 10)
    assert piece(offset=11) == (b"0123456789", 10), "it was made smaller: from its start"
    assert piece(limit=0) == (b"", 0)
    assert piece(round=1) == (b"old\n", 4)
    assert piece(rank=1, stream="stderr") == (b"trouble\n", 8)
    assert piece(stream="elasticd")[0] == "round 2: …\n".encode()
    with (one.files().logs / "round-2" / "rank-0" / "stdout.log").open("ab") as file:
        file.truncate(3 * MAX_CHUNK_BYTES)
    assert piece(limit=99 * MAX_CHUNK_BYTES)[1] == MAX_CHUNK_BYTES
    reply = api.get("/v1/jobs/llama/logs", {"rank": 7})
    assert (reply.code, "n1 has rounds 1 to 2, of the last one ranks 0 and 1" in reply.why) == (404, True)


@pytest.mark.parametrize(
    "query",
    [
        "rank=../0", "rank=-1", "rank=", "rank=99999999999999999999", "round=0", "round=x", "offset=1.5",
        "stream=../../runner-spec",
        "stream=runner-spec.json", "stream=", "limit=-1", "rank=0&rank=1", "rank", "%00", "rank=%D9%A1",
    ],
)  # fmt: skip
def test_path_tricks_are_not_a_rank_round_or_stream(serve: Serve, query: str) -> None:
    one = serve()
    one.submit()
    one.log(1, 0, "stdout", "hello\n")
    one.files().agent_folder.mkdir(parents=True)
    one.files().runner_spec.write_text("password")
    assert one.unix().request("GET", f"/v1/jobs/llama/logs?{query}").code == 400
    assert one.unix().request("GET", f"/v1/local/jobs/llama/logs?number=1&{query}").code == 400


@pytest.mark.parametrize(
    "job", ["..", "..%2fx", "..%2f..%2fetc", "a/b", "a%2fb", "%2e%2e", ".x", "x%00y", "", "a%0ab", "x" * 200, "%ff"]
)
def test_job_id_cannot_leave_the_state_directory(serve: Serve, job: str) -> None:
    one = serve()
    outside = one.root / "state" / "x.1" / "logs" / "round-1" / "rank-0"  # which `../x` would be
    outside.mkdir(parents=True)
    (outside / "stdout.log").write_text("secret")
    (one.root / "state" / "jobs").mkdir()
    for path in (f"/v1/local/jobs/{job}/logs?number=1", f"/v1/jobs/{job}/logs", f"/v1/local/jobs/{job}?number=1"):
        assert one.unix().request("GET", path).code in (400, 404), path


def test_links_and_pipes_are_never_read(serve: Serve, tmp_path: Path) -> None:
    one = serve()
    one.submit()
    secret = tmp_path / "n1-secret"
    secret.write_text("secret")
    log = one.log(1, 0, "stdout", "")
    api = one.unix()

    def answer(stream: str = "stdout", round: int = 1) -> int:
        reply = api.get("/v1/jobs/llama/logs", {"stream": stream, "round": round})
        assert b"secret" not in reply.body
        return reply.code

    assert answer() == 200
    log.unlink()
    log.symlink_to(secret)
    assert answer() == 404, "a link"
    log.unlink()
    os.link(secret, log)
    assert answer() == 404, "another name of somebody's file"
    log.unlink()
    os.mkfifo(log)
    assert answer() == 404, "a pipe"
    log.unlink()
    log.mkdir()
    assert answer() == 404, "a directory"
    (tmp_path / "n1-elsewhere" / "rank-0").mkdir(parents=True)
    (tmp_path / "n1-elsewhere" / "rank-0" / "stdout.log").write_text("secret")
    (one.files().logs / "round-3").symlink_to(tmp_path / "n1-elsewhere")
    assert answer(round=3) == 404, "a link to a directory"
    one.files().runner_log.symlink_to(secret)
    assert answer("elasticd") == 404
    one.files().events.symlink_to(secret)
    assert b"secret" not in api.get("/v1/jobs/llama").body


# --- dump and explain -------------------------------------------------------------------------------------------------


def test_dump_reads_only_below_the_jobs_folder(serve: Serve, tmp_path: Path) -> None:
    one = serve()
    trained(one)
    taken = one.files().logs / "round-2" / "dump"
    taken.mkdir(parents=True)
    record = NodeEvidence(2, "n1", "somebody asked", 1.0, (RankEvidence(0, 7, state="S", phase="step", step=41),))
    (taken / record.file_name).write_bytes(record.to_json())
    one.answers["dump"] = {"path": str(taken)}
    (row,) = one.unix().post("/v1/jobs/llama/dump").document()["nodes"]
    assert (row["node"], row["document"]["ranks"][0]["step"]) == ("n1", 41)
    assert row["page"].startswith("Round 2: ")
    (row,) = one.unix().get("/v1/jobs/llama/explain").document()["nodes"]
    assert row["document"]["round"] == 2
    (row,) = one.unix().get("/v1/jobs/llama/explain", {"round": 7}).document()["nodes"]
    assert row["error"] == "no evidence of round 7; there is evidence of: 2: no hang was suspected here"
    elsewhere = tmp_path / "n1-elsewhere"
    elsewhere.mkdir()
    (elsewhere / record.file_name).write_bytes(record.to_json())
    one.answers["dump"] = {"path": str(elsewhere)}
    (row,) = one.unix().post("/v1/jobs/llama/dump").document()["nodes"]
    assert "document" not in row
    one.answers["dump"] = {"path": "/no\0where"}
    (row,) = one.unix().post("/v1/jobs/llama/dump").document()["nodes"]
    assert "document" not in row
    one.answers["dump"] = {"error": "no workers are running"}
    (row,) = one.unix().post("/v1/jobs/llama/dump").document()["nodes"]
    assert row["error"] == "no workers are running"


def test_pending_job_cannot_be_dumped(serve: Serve) -> None:
    one = serve()
    one.submit()
    reply = one.unix().post("/v1/jobs/llama/dump")
    assert (reply.code, "runs on no node" in reply.why, reply.why.count("pending")) == (409, True, 1)


# --- other nodes ------------------------------------------------------------------------------------------------------


def two(serve: Serve, **how: Any) -> tuple[Served, Served]:
    """n2 runs the job's second round; n1 is asked."""
    store = Outage()
    n1, n2 = serve(store=store, **how), serve(store=store, node="n2", **how)
    n1.announce()
    n2.announce(running())
    n1.place("llama", n1.submit(), "n2")
    n2.event("round_published", NOW - 50, 2, world_size=1, nodes=["n2"], reason="n1 left")
    n2.event("first_step", NOW - 40, 2, step=1)
    n1.log(1, 0, "stdout", "on n1\n")
    n2.log(2, 0, "stdout", "on n2\n")
    return n1, n2


def test_other_nodes_are_read_with_the_same_token(serve: Serve) -> None:
    n1, n2 = two(serve)
    api = n1.unix()
    reply = api.get("/v1/jobs/llama/logs")
    assert (reply.body, reply.headers["elasticd-node"], reply.headers["elasticd-round"]) == (b"on n2\n", "n2", "2")
    assert api.get("/v1/jobs/llama/logs", {"round": 1}).body == b"on n1\n"
    assert api.get("/v1/jobs/llama/logs", {"node": "n1"}).body == b"on n1\n"
    assert api.get("/v1/jobs/llama/logs", {"node": "n2", "offset": 3}).body == b"n2\n"
    assert api.get("/v1/jobs/llama").document()["progress"]["rounds"][0]["reason"] == "n1 left"
    n1.place("llama", 1, reason="waits: n2 is drained")
    row = api.get("/v1/jobs/llama").document()
    assert (row["nodes"], row["progress"]["rounds"][0]["reason"]) == ([], "n1 left"), "it is remembered where it ran"
    rows = api.get("/v1/jobs/llama/explain").document()["nodes"]
    assert {row["node"] for row in rows} == {"n1", "n2"}
    n2.token_file.write_text("n2 has another one, and refuses")
    reply = api.get("/v1/jobs/llama/logs", {"node": "n2"})
    assert (reply.code, "denies access" in reply.why) == (504, True)
    assert n1.token is not None and n1.token not in reply.why


def test_nodes_that_never_had_the_job_explain_nothing(serve: Serve) -> None:
    n1, n2 = two(serve)
    shutil.rmtree(n2.files().root)
    (row,) = n1.unix().get("/v1/jobs/llama/explain").document()["nodes"]
    assert (row["node"], "no hang was suspected" in row["error"]) == ("n1", True)


def test_ranks_of_all_nodes_are_merged(serve: Serve) -> None:
    n1, n2 = two(serve)
    n1.place("llama", 1, "n1", "n2")
    n1.event("round_published", NOW - 90, 1, world_size=1, nodes=["n1"], reason="first round")
    n1.event("round_published", NOW - 50, 2, world_size=2, nodes=["n1", "n2"], reason="n2 came")
    for one, rank in ((n1, 0), (n2, 1)):
        row = {"rank": rank, "slot": 0, "phase": "step", "step": 7 + rank, "idle_seconds": 0.1, "state": "S"}
        one.answers["status"] = {"phase": "running", "round": 2, "world_size": 2, "step": 7, "ranks": [row],
                              "step_samples": [[NOW - 40 - rank, 2, 1]]}  # fmt: skip
    for requested in (n1, n2):
        progress = requested.unix().get("/v1/jobs/llama").document()["progress"]
        assert [(rank["rank"], rank["node"], rank["step"]) for rank in progress["ranks"]] == [
            (0, "n1", 7),
            (1, "n2", 8),
        ]
        assert [one["round"] for one in progress["rounds"]] == [1, 2], f"{requested.node} has joined in round 2"
        assert (progress["node"], progress["step_samples"], progress["unreachable"]) == (
            requested.node,
            [[NOW - 41, 2, 1]],
            {},
        )
    brief = n1.tcp().get("/v1/local/jobs/llama", {"number": 1, "brief": 1}).document()
    assert (brief["rounds"], brief["step_samples"], [rank["rank"] for rank in brief["ranks"]]) == ([], [], [0])
    n2.server.close()
    silent = n1.unix().get("/v1/jobs/llama").document()["progress"]["unreachable"]
    assert "no agent answers at" in silent["n2"]


def test_sparse_event_log_costs_little_and_no_thread(serve: Serve) -> None:
    """A job's user makes it in a moment: 8 TB of zeros would be read for hours, by one more thread for each request."""
    one = serve()
    one.event("round_published", 100.0)
    with one.files().events.open("r+b") as file:
        file.truncate(8 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\n")
    one.event("round_published", 101.0, 2)
    before, began = threading.active_count(), time.monotonic()
    for _ in range(3):
        progress = one.service.local.progress("llama", 1, 200.0)
    assert progress.round == 2
    assert time.monotonic() - began < READ_TIMEOUT_S
    assert threading.active_count() <= before


def test_a_log_that_cannot_be_summed_up_is_not_locked_for_ever(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    one = serve()
    one.event("round_published", 100.0)
    with monkeypatch.context() as broken:
        broken.setattr(JobTimeline, "rounds_with_costs", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            one.service.local.progress("llama", 1, 200.0)
    assert one.service.local.progress("llama", 1, 200.0).round == 1


class SlowWrites(Outage):
    def compare_and_swap(
        self, key: str, expected: int | None, value: bytes, guard: tuple[str, int] | None = None
    ) -> bool:
        time.sleep(0.01)
        return super().compare_and_swap(key, expected, value, guard)


def test_unfinished_jobs_of_a_submitter_are_limited(serve: Serve) -> None:
    one = serve(store=SlowWrites())
    one.service.max_jobs_per_submitter = lambda: 2

    def submit(client: AgentClient, job: str, token: str = "") -> int:
        query = {"id": job, "token": token or None}
        return client.post("/v1/jobs", JOB, "application/toml", query=query).code

    assert [submit(one.unix(), job) for job in ("a", "b")] == [201, 201]
    reply = one.unix().post("/v1/jobs", JOB, "application/toml", query={"id": "c"})
    assert (reply.code, "jobs_per_submitter is 2" in reply.why) == (409, True)
    assert submit(one.tcp(), "c", token="once") == 201, "the token's holder is another submitter"
    assert submit(one.tcp(), "d") == 201
    assert submit(one.tcp(), "c", token="once") == 201, "the same submission, repeated after an outage"
    assert one.unix().post("/v1/jobs/a/cancel").code == 200
    assert submit(one.unix(), "e") == 201
    one.service.max_jobs_per_submitter = lambda: 5
    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(lambda n: submit(one.unix(), f"at-once-{n}"), range(16)))
    assert (codes.count(201), codes.count(409)) == (3, 13), "each is counted before the next one"


def test_submissions_at_several_agents_are_limited(serve: Serve) -> None:
    one = serve(store=SlowWrites())
    services = [
        replace(one.service, max_jobs_per_submitter=lambda: 4, check_job=lambda _: met.wait(60)) for _ in range(6)
    ]
    met = threading.Barrier(len(services))  # none counts before all have come

    def submit(service: JobService) -> str:
        try:
            service.submit(JOB, "toml", None, "uid 7")
        except Conflict as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(services)) as pool:
        refusals = list(pool.map(submit, services))
    assert len(read_view(one.store).unfinished()) == refusals.count("") <= 4
    assert {"jobs_per_submitter is 4" in why for why in refusals if why} == {True}


def test_reason_with_line_ends_is_one_line_of_the_log(tmp_path: Path) -> None:
    """It may be a job's, whose user must not write lines of the agent's log."""
    written: list[str] = []

    class Console(QuietConsole):
        def log(self, sentence: str, level: Level = "info") -> None:
            written.append(sentence)

    journal = AgentJournal(Console(cast(Any, None)), None, "n1")
    journal.log("job lm failed: one\n2026-01-01 elasticd[n1] two\u2028three\x85four")
    assert written == ["job lm failed: one\\n2026-01-01 elasticd[n1] two\\nthree\\nfour"]


def test_rounds_of_previous_nodes_belong_to_the_history(serve: Serve) -> None:
    n1, _ = two(serve)
    n1.place("llama", 1, "n1", last=("n3", "n2"))
    n1.event("round_published", NOW - 20, 4, world_size=1, nodes=["n1"], reason="first round")
    progress = n1.unix().get("/v1/jobs/llama").document()["progress"]
    assert [one["reason"] for one in progress["rounds"]] == ["n1 left", "first round"]
    assert progress["unreachable"] == {}, "n3 is no more, and nobody's business"
    assert progress["node"] == "n1"


def test_rounds_after_this_node_left_belong_to_a_cancelled_jobs_history(serve: Serve) -> None:
    """A cancel knows no rounds, and the last ones may be only in the event logs of other nodes."""
    n1, _ = two(serve)
    n1.event("round_published", NOW - 90, 1, world_size=1, nodes=["n1"], reason="first round")
    assert n1.unix().post("/v1/jobs/llama/cancel").code == 200
    progress = n1.unix().get("/v1/jobs/llama").document()["progress"]
    assert [one["reason"] for one in progress["rounds"]] == ["first round", "n1 left"]
    assert (progress["node"], progress["round"]) == ("n2", 2)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_forged_node_record_gets_no_token(serve: Serve, tmp_path: Path, until: Until, tls: bool) -> None:
    """It names a listener of the forger: no token is sent, over TLS nothing at all."""
    where: dict[str, Any] = {}
    if tls:
        (tmp_path / "pki-1").mkdir()
        authority = Authority(tmp_path / "pki-1")
        made = authority.server()
        where = {"tls_cert": made.cert, "tls_key": made.key, "tls_ca": authority.ca}
    n1 = serve(where=where)
    n1.announce()
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as forger:

        def listen() -> None:
            with contextlib.suppress(OSError):  # it is closed
                while True:
                    client, _ = forger.accept()
                    with client:
                        client.settimeout(30)
                        received.append(client.recv(1 << 16))

        thread = threading.Thread(target=listen)
        thread.start()
        address = format_endpoint(*forger.getsockname())
        forged = NodeStatus("n2", "i", 4, address, runners=(running(),)).to_json()
        assert n1.store.announce(names.NODES + "n2", forged, 1e6) is not None
        n1.place("llama", n1.submit(), "n2")
        api = n1.unix()
        asks = [api.get(f"/v1/jobs/llama{path}") for path in ("", "/logs", "/logs?node=n2", "/explain", "/steps")]
        asks += [api.post("/v1/jobs/llama/dump")]
        assert len(asks) == 6
        until(lambda: len(received) >= 5, 30)
        forger.shutdown(socket.SHUT_RDWR)
        thread.join(30)
    assert n1.token is not None
    for data in received:
        assert n1.token.encode() not in data
        if tls:
            assert data.startswith(b"\x16\x03") and b"HTTP" not in data, "a ClientHello, and nobody it trusts answers"
        else:
            assert b"Authorization: Elasticd-Agent " in data and b"Bearer" not in data
    if not tls:
        credential = received[0].partition(b"Elasticd-Agent ")[2].split()[0].decode()
        for path in ("/v1/jobs", "/v1/local/jobs/llama?number=1"):
            reply = AgentClient(None, *n1.address, credential, auth_scheme=AGENT_AUTH_SCHEME).get(path)
            assert reply.code == 401, "it is good for nothing elsewhere"


@pytest.mark.parametrize("name", [None, "agents"])
def test_peer_certificates_are_verified(serve: Serve, tmp_path: Path, name: str | None) -> None:
    (tmp_path / "n1-pki").mkdir()
    authority = Authority(tmp_path / "n1-pki")
    made, ca = authority.server(name or "127.0.0.1"), authority.ca
    n1, _ = two(serve, where={"tls_cert": made.cert, "tls_key": made.key, "tls_ca": ca, "tls_name": name})
    assert n1.unix().get("/v1/jobs/llama/logs").body == b"on n2\n"
    for other in {"others", "agents", None} - {name}:
        with pytest.raises(Unreachable, match="its certificate cannot be trusted"):
            Peers(lambda: n1.token, True, ca, other).request(format_endpoint(*n1.address), "GET", "/v1/jobs")


def test_nodes_beyond_the_limit_are_reported_as_not_asked() -> None:
    said = Peers(lambda: None).request_all({f"n{i}": "" for i in range(300)}, "GET", "/v1/local/jobs/llama")
    assert len(said) == 300
    assert said["n255"] == "its agent has no address that other nodes can reach (http.bind in its agent.toml)"
    assert said["n256"] == said["n299"] == "not asked: at most 256 nodes are"


def test_only_the_node_of_the_last_round_is_asked_for_a_log_of_an_ended_job(tmp_path: Path) -> None:
    """In a large cluster a page would wait longer for the others than it may."""
    asked: list[str] = []

    class CountedPeers(Peers):
        def request(self, address: str, *_: object) -> Reply:
            asked.append(address)
            return Reply(200, chunk.data, headers) if address == "n7" else Reply(404, b"{}")

    chunk = LogChunk(b"boom", "n7", 2, 0, 4, 4)
    headers = {name.lower(): value for name, value in chunk.headers()}
    rounds = (RoundSummary(1, 2, "first"), RoundSummary(2, 2, "restart"))
    view = ClusterView(
        nodes=tuple(NodeStatus(f"n{number}", "i", 1, f"n{number}") for number in range(1, 40)),
        results=(JobResult("llama", 1, "failed", 1, "rank 0 exited with code 1", nodes=("n7",), rounds=rounds),),
    )
    reader = ClusterReader(LocalJobs("n1", tmp_path), CountedPeers(lambda: None))
    job = Submission("llama", 1, "{}", 1, 1, 1, 1)
    found = reader.read_log(view, job, None, LogRequest(stream="stderr"))
    assert (found.data, found.round, asked) == (b"boom", 2, ["n7"])


def test_unreachable_node_is_named_and_the_others_shown(serve: Serve) -> None:
    n1, n2 = two(serve)
    n2.server.close()
    reply = n1.unix().get("/v1/jobs/llama/logs", {"round": 2})
    assert (reply.code, "some nodes do not answer: n2: no agent answers at" in reply.why) == (504, True)
    assert n1.unix().get("/v1/jobs/llama/logs", {"round": 1}).body == b"on n1\n"
    row = n1.unix().get("/v1/jobs/llama").document()
    assert (row["state"], row["progress"]["step"]) == ("running", None)
    n1.store.delete(names.NODES + "n2")
    row = n1.unix().get("/v1/jobs/llama").document()
    assert row["assignments"] == [
        {"node": "n2", "slots": [0, 1], "state": "offline", "reason": "its agent is not registered"}
    ]


def _me() -> str:
    return "root" if os.geteuid() == 0 else f"uid {os.geteuid()}"
