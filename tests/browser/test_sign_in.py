"""Sign-in to the console in a real browser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from penstock.core.access import Role
from tests.browser.conftest import Watch
from tests.support.api_keys import gateway_with_keys, make_key, sent
from tests.support.gateways import Caller
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long


@pytest.fixture
async def site(kafka_servers: str, prefix: str, database: str, tmp_path: Path) -> AsyncIterator[Caller]:
    """A gateway that requires API keys, with a type and a task."""
    _, admin = await make_key(database, Role.ADMIN)
    async with gateway_with_keys(kafka_servers, prefix, database, tmp_path) as caller:

        async def is_accepted() -> bool:
            return (await caller.get("/tasks", headers=sent(admin))).status == 200

        await wait_until(is_accepted)
        await caller.post("/types", {"name": "acme--demo"}, headers=sent(admin))
        await caller.post("/tasks", {"type": "acme--demo", "context": 1}, headers=sent(admin))
        yield caller


async def sign_in(page: Page, site: Caller, token: str, path: str = "/tasks") -> None:
    """Opens a screen, and signs in on the way."""
    await page.goto(f"{site.url}/console{path}")
    await page.get_by_label("API key").fill(token)
    await page.get_by_role("button", name="Sign in").click()


async def test_sign_in_leads_to_the_screen_that_was_asked_for(
    site: Caller, page: Page, watch: Watch, database: str
) -> None:
    """And sign-out ends the session. The browser keeps neither key nor token where scripts read."""
    watch.may_fail = True
    _, operator = await make_key(database, Role.OPERATOR)
    await sign_in(page, site, "pk_0123456789abcdef_wrong", "/tasks?type=acme--demo")
    await expect(page.get_by_role("alert")).to_contain_text("not valid")
    await page.get_by_label("API key").fill(operator)
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_label("Tasks").locator("tbody tr")).to_have_count(1)
    await expect(page).to_have_url(f"{site.url}/console/tasks?type=acme--demo")
    kept = await page.evaluate("JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}])")
    assert operator not in kept
    assert "__Host-penstock" not in kept
    [cookie] = await page.context.cookies()
    assert (cookie["name"], cookie["httpOnly"], cookie["secure"], cookie["sameSite"]) == (
        "__Host-penstock",
        True,
        True,
        "Strict",
    )
    # A session changes things, with its token and origin.
    await page.locator("tbody a").first.click()
    await page.get_by_role("button", name="Cancel", exact=True).click()
    await page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    await expect(page.locator(".summary")).to_contain_text("cancelled")
    await page.get_by_role("button", name="Sign out").click()
    await expect(page.get_by_label("API key")).to_be_visible()
    assert await page.evaluate("fetch('/tasks').then((answer) => answer.status)") == 401


async def test_a_reader_has_no_buttons_that_change_anything(site: Caller, page: Page, database: str) -> None:
    _, reader = await make_key(database, Role.READER, ["acme"])
    await sign_in(page, site, reader)
    await expect(page.get_by_label("Tasks").locator("tbody tr")).to_have_count(1)
    await expect(page.get_by_label("Select all on this page")).to_have_count(0)
    await expect(page.get_by_role("link", name="Keys")).to_have_count(0)
    await page.locator("tbody a").first.click()
    await expect(page.locator(".summary")).to_be_visible()
    for verb in ("Pause", "Resume", "Recover", "Rerun", "Cancel"):
        await expect(page.get_by_role("button", name=verb, exact=True)).to_have_count(0)


async def test_an_administrator_makes_and_revokes_keys(site: Caller, page: Page, database: str) -> None:
    """A secret is shown once. The new key works until it is revoked."""
    _, admin = await make_key(database, Role.ADMIN)
    await sign_in(page, site, admin, "/keys")
    await page.get_by_role("button", name="Create", exact=True).click()
    await page.get_by_label("Name", exact=True).fill("pipeline")
    await page.get_by_role("combobox", name="Role").select_option("reader")
    await page.get_by_role("dialog").get_by_role("button", name="Create").click()
    shown = page.locator(".box.ok code")
    token = await shown.inner_text()

    async def works() -> bool:
        return (await site.get("/tasks", headers=sent(token))).status == 200

    await wait_until(works)
    await page.reload()
    row = page.get_by_label("API keys").locator("tbody tr", has_text="pipeline")
    await expect(row).to_be_visible()
    assert token not in await page.content()
    await row.get_by_role("button", name="Revoke").click()
    await page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    await expect(row).to_contain_text("revoked")

    async def is_refused() -> bool:
        return (await site.get("/tasks", headers=sent(token))).status == 401

    await wait_until(is_refused)
    await page.get_by_role("link", name="Audit").click()
    await expect(page.get_by_label("Audit").locator("tbody tr", has_text="DELETE /keys/{id}")).to_be_visible()
