"""A real deployment with data, its console, and a real browser that may load nothing else."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import asyncpg
import pytest
from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page, async_playwright, expect

from penstock.gateway.console import console_folder
from penstock.local.deployment import Deployment, Options
from tests.browser.seed import Seed, targets
from tests.support.callback_targets import LOOPBACK
from tests.support.waiting import wait_until

AXE = Path(__file__).parents[2] / "services" / "console" / "node_modules" / "axe-core" / "axe.min.js"
# A busy machine takes its time; a condition that never holds fails nevertheless.
expect.set_options(timeout=60_000)

# Messages of a browser while the gateway restarts.
_RESTART = ("Failed to load resource", "net::ERR_")


def browser_path() -> str | None:
    """The installed Chromium."""
    named = ("chromium", "chromium-browser", "google-chrome")
    return next((path for path in map(shutil.which, named) if path), None)


@pytest.fixture(autouse=True)
def needs_browser() -> None:
    """These tests are skipped where there is no browser, or no built console."""
    if browser_path() is None:
        pytest.skip("there is no Chromium: install Debian's package chromium")
    if console_folder() is None:
        pytest.skip("the console is not built: run `make console`")


@dataclass
class Site:
    """A running deployment.

    Attributes:
        url: of the gateway.
        deployment: its processes.
        ids: tasks and flows by what they show.
        http: calls the gateway without the browser.
    """

    url: str
    deployment: Deployment
    http: aiohttp.ClientSession
    ids: dict[str, int] = field(default_factory=dict)

    async def fetch(self, query: str, *arguments: Any) -> Any:
        """The first value of a query of PostgreSQL."""
        connection = await asyncpg.connect(
            self.deployment.postgres, server_settings={"search_path": "penstock"}
        )
        try:
            return await connection.fetchval(query, *arguments)
        finally:
            await connection.close()

    async def until(self, query: str, *arguments: Any) -> None:
        """Returns when a query of PostgreSQL is true."""

        async def is_true() -> Any:
            return await self.fetch(query, *arguments)

        await wait_until(is_true)

    async def answers(self) -> bool:
        """Whether the gateway serves."""
        try:
            async with self.http.get("/readyz") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def state(self, task: int) -> str:
        """The state of a task."""
        return str(await self.fetch("SELECT state FROM task WHERE id = $1", task))


@asynccontextmanager
async def working(deployment: Deployment) -> AsyncIterator[None]:
    """A worker of `console_worker`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.browser.console_worker",
        env={**os.environ, **deployment.environment},
    )
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


@pytest.fixture
async def site(kafka_servers: str, prefix: str, database: str, tmp_path: Path) -> AsyncIterator[Site]:
    """A deployment with data that shows everything, on the servers that all tests share."""
    options = Options(
        data_dir=tmp_path / "data",
        kafka=kafka_servers,
        postgres=database,
        prefix=prefix,
        gateway_port=0,
        environment={"PENSTOCK_CALLBACK_ALLOW": ",".join(LOOPBACK)},
    )
    async with AsyncExitStack() as stack:
        deployment = await stack.enter_async_context(Deployment(options))
        target = await stack.enter_async_context(targets())
        http = await stack.enter_async_context(aiohttp.ClientSession(deployment.gateway_url))
        seed = Seed(http, target)
        await seed.define()
        await stack.enter_async_context(working(deployment))
        site = Site(deployment.gateway_url, deployment, http, await seed.fill())
        await site.until("SELECT status = 'failed' FROM flow WHERE id = $1", site.ids["failed_flow"])
        await site.until("SELECT state = 'succeeded' FROM task WHERE id = $1", site.ids["flaky"])
        await site.until("SELECT state = 'running' FROM task WHERE id = $1", site.ids["running"])
        yield site


class Watch:
    """Collects faults of pages."""

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url).netloc
        self.faults: list[str] = []
        # While the gateway restarts, requests fail.
        self.may_fail = False

    def of(self, page: Page) -> None:
        """Watches a page."""
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        page.on("request", lambda request: self._asked(request.url))

    def _said(self, message: ConsoleMessage) -> None:
        if message.type not in ("error", "warning"):
            return
        if (
            "Content Security Policy" not in message.text
            and self.may_fail
            and any(word in message.text for word in _RESTART)
        ):
            return
        self.faults.append(f"{message.type}: {message.text}")

    def _asked(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob") and parts.netloc != self._host:
            self.faults.append(f"request to another host: {url}")


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """A browser."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=browser_path(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        await browser.close()


@pytest.fixture
async def context(browser: Browser) -> AsyncIterator[BrowserContext]:
    """A profile of a browser: its tabs share cookies and the live stream."""
    context = await browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(60_000)
    yield context
    await context.close()


@pytest.fixture
async def watch(site: Any) -> AsyncIterator[Watch]:
    """Fails the test on a fault of a page that it watches."""
    watch = Watch(site.url)
    yield watch
    assert watch.faults == []


@pytest.fixture
async def page(context: BrowserContext, watch: Watch) -> Page:
    """A tab that is watched."""
    page = await context.new_page()
    watch.of(page)
    return page


def serious(results: Any) -> Iterator[str]:
    """The serious findings of axe."""
    for finding in results["violations"]:
        if finding["impact"] in ("serious", "critical"):
            yield f"{finding['id']}: {[node['html'][:160] for node in finding['nodes'][:3]]}"
