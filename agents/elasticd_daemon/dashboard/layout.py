"""Pages from templates, and the HTTP headers with the Content-Security-Policy.

Job ids, reasons, node names and log lines come from others: Jinja2 escapes every value where it is inserted, and
control characters, and those that change the direction of writing, are made visible. The policy allows only the agent's
own style, script and icon, and no frames. A page is complete without its script, which only refreshes it.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Mapping
from importlib import resources

from jinja2 import DictLoader, Environment, StrictUndefined

from elasticd_agent.model.phrases import count
from elasticd_agent.system.durations import in_words
from elasticd_agent.system.network.http_server import HttpResponse
from elasticd_daemon.dashboard import formatting
from elasticd_daemon.dashboard.overview import shorten_middle

HTML_TYPE = "text/html; charset=utf-8"
REFRESH_INTERVAL_S = 2.0
NOSCRIPT_RELOAD_S = 10
ASSET_TYPES = {
    "style.css": "text/css; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def read_asset(name: str) -> bytes:
    """One of ASSET_TYPES."""
    return resources.files(__package__).joinpath(name).read_bytes()


_STYLE = read_asset("style.css").decode()
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY_TEMPLATE = "default-src 'none'; {}; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
PAGE_POLICY = _POLICY_TEMPLATE.format("script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'")
PUBLIC_POLICY = _POLICY_TEMPLATE.format(f"style-src 'sha256-{_STYLE_HASH}'; img-src data:")
"""The policy of pages without login: the style is inline, since no file is public."""


def _escape_invisible(value: object) -> object:
    """Markup as it is; None is nothing; invisible characters of anything else as escapes."""
    if value is None or hasattr(value, "__html__"):
        return value or ""
    return _INVISIBLE.sub(lambda character: repr(character.group())[1:-1], str(value))


def _make_environment() -> Environment:
    """All templates are read now: an upgrade may replace the installation under a running agent.

    A line end in a template and the indentation after it are nothing: white space shows between elements.
    """
    folder = resources.files(__package__).joinpath("templates")
    sources = {file.name: re.sub(r"\n\s*", "", file.read_text(encoding="utf-8")) for file in folder.iterdir()}
    made = Environment(
        loader=DictLoader(sources), autoescape=True, undefined=StrictUndefined, finalize=_escape_invisible
    )
    made.filters["thousands"] = "{:,}".format
    made.globals |= {
        "shorten_middle": shorten_middle,
        "clock": formatting.clock,
        "count": count,
        "in_words": in_words,
        "iso": lambda at: time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(at)),
        "job_url": formatting.job_url,
        "same_day": lambda at, now: time.localtime(at)[:3] == time.localtime(now)[:3],
        "time_zone": lambda: time.strftime("%Z"),
    }
    return made


_TEMPLATES = _make_environment()


def html_response(code: int, page: str, policy: str = PAGE_POLICY, *headers: tuple[str, str]) -> HttpResponse:
    more = (
        ("Content-Security-Policy", policy),
        ("Referrer-Policy", "no-referrer"),
        ("Cross-Origin-Opener-Policy", "same-origin"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        *headers,
    )
    return HttpResponse(code, page.encode("utf-8", "replace"), HTML_TYPE, more)


def render_page(
    template: str,
    title: str,
    node: str,
    version: str,
    values: Mapping[str, object],
    *,
    now: float,
    has_logout_button: bool,
    refresh_s: float | None = REFRESH_INTERVAL_S,
) -> str:
    """A page after login. `refresh_s`: None without refresh."""
    frame = {
        "title": title,
        "node": node,
        "version": version,
        "has_logout_button": has_logout_button,
        "reload_s": NOSCRIPT_RELOAD_S,
    }
    return _TEMPLATES.get_template(template).render({**values, **frame, "now": now, "refresh_s": refresh_s})


def render_public_page(template: str, title: str, **values: object) -> str:
    """A page before login."""
    return _TEMPLATES.get_template(template).render(values, title=title, style=_STYLE)
