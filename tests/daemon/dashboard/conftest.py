"""Browsers and agents that are closed after each test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elasticd_agent.system.network.http_auth import TokenAuth
from elasticd_daemon.api.routes import ApiRoutes
from elasticd_daemon.dashboard.login import LoginCookies
from elasticd_daemon.dashboard.routes import DashboardRoutes
from tests.daemon.dashboard.browser import Browser, missing
from tests.daemon.served import Served

Browse = Callable[..., Browser]
Serve = Callable[..., Served]
NOW = 1_800_000_000.0


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with ExitStack() as stack:

        def start(base_url: str = "", **how: Any) -> Served:
            made_routes = []

            def routes(api: ApiRoutes, token: TokenAuth, tls: bool) -> DashboardRoutes:
                made_routes.append(DashboardRoutes(api, token, LoginCookies(token, lambda: NOW, tls=tls), "0.1.0"))
                return made_routes[0]

            made = Served(tmp_path / f"n-{len(os.listdir(tmp_path))}", now=lambda: NOW, front=routes, **how)
            made_routes[0].base_url = base_url or "http://{}:{}".format(*made.address)
            stack.callback(made.close)
            return made

        yield start


@pytest.fixture
def browser() -> Iterator[Browse]:
    if why := missing():
        pytest.skip(why)
    with ExitStack() as stack:

        def start(**how: Any) -> Browser:
            made = Browser(**how)
            stack.callback(made.close)
            return made

        yield start
