"""The frame of all pages: head, header, footer, and the HTTP headers with the Content-Security-Policy.

The policy allows only the agent's own style, script and icon, and no frames. A page is complete without its script,
which only refreshes it.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib import resources

from elasticd_agent.node.dashboard import formatting
from elasticd_agent.node.dashboard.markup import Child, Html, joined, tag, text
from elasticd_agent.system.http_server import HttpResponse

HTML_TYPE = "text/html; charset=utf-8"
REFRESH_S = 2.0
"""The script's interval."""
RELOAD_S = 10
"""The reload interval without the script."""
ASSETS = {
    "style.css": "text/css; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


def asset(name: str) -> bytes:
    """One of FILES."""
    return resources.files(__package__).joinpath(name).read_bytes()


_STYLE = asset("style.css").decode()
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY = "default-src 'none'; {}; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
PAGE_POLICY = _POLICY.format("script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'")
PUBLIC_POLICY = _POLICY.format(f"style-src 'sha256-{_HASH}'; img-src data:")
"""For pages without login: the style is inline, since no file is public."""


def html_response(code: int, page: Html, policy: str = PAGE_POLICY, *headers: tuple[str, str]) -> HttpResponse:
    more = (
        ("Content-Security-Policy", policy),
        ("Referrer-Policy", "no-referrer"),
        ("Cross-Origin-Opener-Policy", "same-origin"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        *headers,
    )
    return HttpResponse(code, page.encode("utf-8", "replace"), HTML_TYPE, more)


def page(
    title: str, node: str, version: str, *content: Child, now: float, logout: bool, every_s: float | None = REFRESH_S
) -> Html:
    """A page after login. `logout`: with the button. `every_s`: None without refresh."""
    live = every_s is not None
    header = tag(
        "header",
        tag("a", "Skip to the content", href="#main", class_="skip"),
        tag("a", _logo(), tag("span", "elasticd"), href="/", class_="brand"),
        tag("span", "seen by ", tag("b", node), class_="node"),
        tag(
            "span",
            tag("span", class_="dot"),
            tag("span", formatting.clock(now), id="live-text"),
            id="live",
            class_="live",
            data_every=every_s,
        ),
        tag("form", tag("button", "Log out"), method="post", action="/logout") if logout else None,
    )
    footer = tag("footer", f"elasticd {version} · times are {formatting.time_zone()} of node {node}")
    head = [
        tag("link", rel="stylesheet", href="/page/style.css"),
        tag("link", rel="icon", href="/page/icon.svg", type="image/svg+xml"),
        tag("script", src="/page/live.js", defer=True) if live else None,
        tag("noscript", tag("meta", http_equiv="refresh", content=RELOAD_S)) if live else None,
    ]
    body = [header, tag("main", *content, id="main", tabindex="-1"), footer]
    return _document(title, head, body)


def public_page(title: str, *content: Child) -> Html:
    """A page before login."""
    head = [tag("style", Html(_STYLE)), tag("link", rel="icon", href="data:,")]
    brand = tag("p", _logo(), tag("span", "elasticd"), class_="brand")
    return _document(title, head, [tag("main", brand, *content, id="main", class_="outside")])


@dataclass(frozen=True, slots=True)
class LoginTexts:
    """What a visitor who is not logged in reads; the defaults are an agent's."""

    needed: str = "This page shows jobs, their logs and the nodes. It needs the agent's token."
    used: str = "This link was used, or is too old: `elasticd open` prints a new one. Or give the token."
    token_file: str = ""
    """A path; "": agent.toml names it."""
    no_tls: str = (
        "the token would cross the network in plain text. Give the agent a certificate (http.tls_cert in agent.toml), "
        "or open this page as http://localhost through a tunnel, ssh -L or kubectl port-forward"
    )


def login(why: str, then: str, token_file: str = "") -> Html:
    """`then`: the target after the login."""
    form = tag(
        "form",
        # Password managers need a user name.
        tag("input", name="username", value="elasticd", autocomplete="username", hidden=True),
        tag("label", "Token", for_="token"),
        tag(
            "input",
            id="token",
            name="token",
            type="password",
            required=True,
            autofocus=True,
            autocomplete="current-password",
            aria_describedby="why",
        ),
        tag("input", type="hidden", name="then", value=then),
        tag("button", "Log in"),
        method="post",
        action="/login",
        class_="login",
    )
    where = ["the agent's ", tag("code", "http.token_file")] if not token_file else tag("code", token_file)
    hint = tag("p", "The token is the one line in ", where, ".", class_="quiet")
    return public_page("Log in · elasticd", tag("h1", "Log in"), tag("p", why, id="why"), form, hint)


def _document(title: str, head: Child, body: Child) -> Html:
    opening = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
    ]
    return joined(Html("<!doctype html>"), tag("html", tag("head", opening, head), tag("body", body), lang="en"), "\n")


def _logo() -> Html:
    shape = tag("path", d="M2 9h4l2-6 3 12 2-6h3", fill="none", stroke_width="2")
    return tag("svg", shape, viewBox="0 0 18 18", class_="logo", aria_hidden="true")


def section(name: str, title: str, *content: Child, more: Child = None) -> Html:
    """A part of a page that the script refreshes."""
    heading = tag("div", tag("h2", title, id=f"{name}-title"), more, class_="heading")
    return tag("section", heading, *content, id=name, data_live=True, aria_labelledby=f"{name}-title")


def button(label: str, action: str, form_key: str, sure: str = "") -> Html | None:
    """A button that changes something, for a visitor who may. `sure`: the label of the button that opens after it."""
    if not form_key:
        return None
    form = tag(
        "form",
        tag("input", type="hidden", name="key", value=form_key),
        tag("button", sure or label),
        method="post",
        action=action,
        class_="act",
    )
    return tag("details", tag("summary", label), form, id=action) if sure else form


def chip(word: str, kind: str) -> Html:
    """A state: the word counts, the colour repeats it."""
    return tag("span", word, class_=Html(f"chip {text(kind)}"))


def banner(kind: str, *content: Child) -> Html:
    return tag("p", *content, class_=f"banner {kind}")
