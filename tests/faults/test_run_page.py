"""`elasticd run --ui`: the job's page, from the run itself."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
from pathlib import Path
from urllib.parse import urlencode

from tests.faults.conftest import StartJob
from tests.faults.job import PATIENCE_S, SCRIPTS, Job, until


def browse(
    where: str, path: str, cookie: str = "", method: str = "GET", host: str = "", form: dict[str, str] | None = None
) -> tuple[int, dict[str, str], str]:
    headers = {"Accept": "text/html", "Cookie": cookie, "Host": host or where}
    body = urlencode(form or {})
    if form is not None:
        headers["Content-Type"] = "application/x-www-form-urlencoded"
    connection = http.client.HTTPConnection(where, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


def test_run_serves_its_page_to_one_browser(job: StartJob) -> None:
    run: Job = job("train.py", "100000", workers="2", flags=["--ui", "0"])
    line = r"logs go to (\S+); the job's page: http://(127\.0\.0\.1:\d+)(/login\?code=[\w-]+)\n"
    found = until(lambda: re.search(line, run.err), "the URL")
    where, login = found[2], found[3]
    run.event("group_started")
    assert browse(where, "/")[0] == 401
    code, headers, _ = browse(where, login)
    assert (code, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"].partition(";")[0]
    again, outside = browse(where, login), browse(where, "/")
    assert (again[0], outside[0]) == (401, 401), "the URL is good for one browser"
    for text in (again[2], outside[2]):
        assert "elasticd open" not in text and "http.token_file" not in text
        (token_file,) = re.findall(r"The token is the one line in <code>(/[^<]+)</code>", text)
        assert browse(where, "/login", method="POST", form={"token": Path(token_file).read_text()})[0] == 303
    assert "agent.toml" not in browse(where, "/", host="elsewhere.example")[2]
    overview = browse(where, "/", cookie)[2]
    (path,) = re.findall(r'href="(/jobs/[^"]+)"', overview)[:1]
    assert 'name="key"' not in overview, "Ctrl-C stops the job; the page changes nothing"

    def page() -> str:
        return browse(where, path, cookie)[2].replace('<span class="quiet">rank </span>', "rank ")

    until(lambda: "rank 1" in page() and "Step times of 2 of 2 ranks" in page(), "both ranks and their steps")
    assert "steps/s<" in page()
    assert "train.py" in page()
    assert "round_published" in browse(where, f"{path}/log?stream=events", cookie)[2]
    assert browse(where, f"{path}/cancel", cookie, "POST")[0] == 403
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    shutil.rmtree(found[1])


def test_page_of_a_user_without_a_name(job: StartJob) -> None:
    run = job("plain.py", "${local_rank}", "polite", flags=["--ui", "0"], command=[str(SCRIPTS / "nameless.py")])
    until(lambda: "the job's page" in run.err or run.process.poll() is not None, "the URL")
    run.file("ready-1")
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM
