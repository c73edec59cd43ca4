"""The documentation's site in Chromium: no page complains or is wider than a phone."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from tests.daemon.dashboard.browser import Browser, missing

ROOT = Path(__file__).parents[2]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.system
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_site_in_a_browser(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    site = tmp_path / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    subprocess.run(build, cwd=ROOT, check=True, timeout=120)
    pages = sorted(str(path.parent.relative_to(site)) for path in site.rglob("index.html"))
    assert len(pages) > 40
    serve = partial(Quiet, directory=str(site))
    found: dict[str, object] = {}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        browser = Browser()
        try:
            base = f"http://127.0.0.1:{server.server_address[1]}"
            for page in pages:
                browser.open(f"{base}/{page}/")
                browser.wide(360)
                wide = browser.run("return document.documentElement.scrollWidth")
                severe = [one for one in browser.complaints() if not one.startswith("INFO")]
                if wide > 360 or severe:
                    found[page] = wide, severe
            browser.prefers("dark")
            colours = "return document.documentElement.getAttribute('data-bs-theme')"
            browser.until(lambda: browser.run(colours) == "dark", "the system's colours")
        finally:
            browser.close()
            server.shutdown()
            thread.join()
    assert found == {}
