"""`elasticd run --ui`: the job's page, from the run itself."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal

from tests.faults.conftest import StartJob
from tests.faults.job import PATIENCE_S, Job, until


def browse(where: str, path: str, cookie: str = "", method: str = "GET") -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(where, timeout=PATIENCE_S)
    try:
        connection.request(method, path, headers={"Accept": "text/html", "Cookie": cookie, "Content-Length": "0"})
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
    assert browse(where, login)[0] == 401, "the URL is good for one browser"
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
