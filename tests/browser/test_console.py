"""The console in a real browser against a real deployment: screens, actions, live updates."""

from __future__ import annotations

import io
import os
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from playwright.async_api import BrowserContext, Page, expect

from tests.browser.conftest import AXE, Site, Watch, serious
from tests.support.waiting import wait_until

PICTURES = Path(__file__).parents[2] / "docs" / "images" / "console"
WIDTHS = {1280: 900, 390: 844}


def screens(site: Site) -> dict[str, str]:
    """The paths of all screens, by name."""
    ids = site.ids
    return {
        "overview": "/",
        "types": "/types",
        "type": "/types/idle",
        "tasks": "/tasks",
        "task": f"/tasks/{ids['flaky']}",
        "task-running": f"/tasks/{ids['running']}",
        "task-failed": f"/tasks/{ids['failed']}",
        "flows": "/flows",
        "flow": f"/flows/{ids['failed_flow']}?node=rows&children=failed",
        "flow-waiting": f"/flows/{ids['waiting_flow']}",
        "schedules": "/schedules",
        "schedule": "/schedules/weekly-berlin",
        "workers": "/workers",
        "targets": "/targets",
        "dead-letters": "/dead-letters",
        "operations": "/operations",
        "audit": "/audit",
        "keys": "/keys",
    }


async def show(page: Page, site: Site, path: str) -> None:
    """Opens a screen, and returns when its data is there."""
    await page.goto(f"{site.url}/console{path}")
    await expect(page.locator("main h1")).to_be_visible()
    await expect(page.locator(".skeleton")).to_have_count(0)


async def act(page: Page, verb: str, *, confirm: str | None = None) -> None:
    """Presses the button of an action, and confirms it."""
    await page.get_by_role("main").get_by_role("button", name=verb, exact=True).click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("button", name=confirm or verb).click()
    await expect(dialog).to_have_count(0)


@pytest.mark.long
async def test_every_screen_is_readable_in_both_themes_and_on_a_phone(
    site: Site, context: BrowserContext, watch: Watch
) -> None:
    """No serious finding of axe, nothing that the policy forbids, and no sideways scrolling of the
    page. PENSTOCK_WRITE_DOCS=1 writes the pictures of the docs."""
    await site.until("SELECT count(*) = 12 FROM task WHERE type = 'item' AND state = 'failed'")
    await site.until("SELECT EXISTS (SELECT FROM callback_target WHERE state = 'abnormal')")
    page = await context.new_page()
    watch.of(page)
    axe = AXE.read_text()
    found: list[str] = []
    for theme in ("light", "dark"):
        await page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        for width, height in WIDTHS.items():
            await page.set_viewport_size({"width": width, "height": height})
            for name, path in screens(site).items():
                await show(page, site, path)
                await page.evaluate(axe)
                results = await page.evaluate("axe.run({resultTypes: ['violations']})")
                found += [f"{name} {theme} {width}: {each}" for each in serious(results)]
                wider = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
                if wider > 0:
                    found.append(f"{name} {width}: the page is {wider} px wider than the screen")
                await keep_picture(page, f"{name}-{theme}-{width}")
    assert not found, "\n".join(found)


async def keep_picture(page: Page, name: str) -> None:
    """Writes a picture for the docs."""
    if not os.environ.get("PENSTOCK_WRITE_DOCS"):
        return
    PICTURES.mkdir(parents=True, exist_ok=True)
    picture = Image.open(io.BytesIO(await page.screenshot()))
    picture.convert("RGB").quantize(96).save(PICTURES / f"{name}.png", optimize=True)


async def test_an_operator_finds_what_is_wrong_and_puts_it_back(site: Site, page: Page) -> None:
    """From the overview to a failed flow, its failed items and a recovery, by the console alone."""
    await show(page, site, "/")
    problems = page.get_by_label("Problems")
    await expect(problems).to_contain_text("1 flow failed in the last hour")
    await expect(problems).to_contain_text("acme--billing has 1 task and no worker")
    await problems.locator("li", has_text="flow failed").get_by_role("link").click()
    await page.get_by_role("link", name=str(site.ids["failed_flow"])).click()
    await expect(page.locator(".sentence")).to_contain_text("item 7 of node rows failed")
    await page.get_by_label("Graph of the flow").get_by_role("button", name="rows").click()
    await page.get_by_role("combobox", name="Items").select_option("failed")
    items = page.get_by_label("Items of rows").locator("tbody tr")
    await expect(items).to_have_count(12)
    await act(page, "Recover")
    await site.until("SELECT generation = 1 FROM flow WHERE id = $1", site.ids["failed_flow"])
    # The page follows the flow without a reload: its items fail once more.
    await expect(page.get_by_role("heading", name="Earlier generations")).to_be_visible()


@pytest.mark.long
async def test_actions_on_tasks_have_their_effect(site: Site, page: Page) -> None:
    """On one task, on selected ones, and on all that match the filters, beyond the page."""
    ready, running = site.ids["ready"], site.ids["running"]
    await show(page, site, f"/tasks/{ready}")
    await expect(page.locator(".sentence")).to_contain_text("worker")
    await act(page, "Pause")
    await site.until("SELECT state = 'paused' FROM task WHERE id = $1", ready)
    await expect(page.locator(".summary")).to_contain_text("paused")
    await act(page, "Resume")
    await site.until("SELECT state <> 'paused' FROM task WHERE id = $1", ready)
    await act(page, "Cancel")
    await expect(page.locator(".summary")).to_contain_text("cancelled")
    assert await site.state(ready) == "cancelled"
    cancel = page.get_by_role("main").get_by_role("button", name="Cancel", exact=True)
    await expect(cancel).to_have_attribute("aria-disabled", "true")
    await expect(cancel).to_have_attribute("title", "the task has ended: cancelled")

    await show(page, site, f"/tasks/{running}")
    await act(page, "Cancel")
    await site.until("SELECT state = 'cancelled' FROM task WHERE id = $1", running)

    await show(page, site, f"/tasks/{site.ids['failed']}")
    await expect(page.locator(".box.bad")).to_contain_text("no decoder for notes.txt")
    await act(page, "Recover")
    await site.until("SELECT count(*) = 2 FROM attempt WHERE task_id = $1", site.ids["failed"])

    await show(page, site, f"/tasks/{site.ids['done']}")
    await page.get_by_role("button", name="Rerun", exact=True).click()
    await page.get_by_role("combobox", name="From stage").select_option("encode")
    await page.get_by_role("dialog").get_by_role("button", name="Rerun").click()
    await site.until("SELECT EXISTS (SELECT FROM task WHERE rerun_of = $1)", site.ids["done"])
    again = await site.fetch("SELECT id FROM task WHERE rerun_of = $1", site.ids["done"])
    await expect(page.locator("h1")).to_have_text(f"Task {again}")

    await show(page, site, "/tasks?type=broken")
    await page.get_by_label("Select all on this page").check()
    await page.get_by_role("group", name="Selected tasks").get_by_role("button", name="recover").click()
    await page.get_by_role("dialog").get_by_role("button", name="recover 5 tasks").click()
    await site.until(
        "SELECT count(*) >= 10 FROM attempt a JOIN task t ON t.id = a.task_id WHERE t.type = 'broken'"
    )

    left = await site.fetch("SELECT count(*) FROM task WHERE type = 'idle' AND state <> 'cancelled'")
    await show(page, site, "/tasks?type=idle")
    await page.get_by_role("group", name="All tasks that match").get_by_role("button", name="cancel").click()
    await page.get_by_role("dialog").get_by_role("button", name=f"cancel {left} tasks").click()
    await expect(page.locator("h1")).to_have_text("Operations")
    await site.until("SELECT count(*) = 0 FROM task WHERE type = 'idle' AND state <> 'cancelled'")
    await expect(page.get_by_label("Operations").locator("tbody tr").first).to_contain_text("cancel tasks")


@pytest.mark.long
async def test_actions_on_flows_schedules_types_and_targets_have_their_effect(site: Site, page: Page) -> None:
    flow = site.ids["waiting_flow"]
    await show(page, site, f"/flows/{flow}")
    await act(page, "Pause")
    await site.until("SELECT paused FROM flow WHERE id = $1", flow)
    await act(page, "Resume")
    await site.until("SELECT NOT paused FROM flow WHERE id = $1", flow)
    await act(page, "Cancel")
    await site.until("SELECT status = 'cancelled' FROM flow WHERE id = $1", flow)
    await act(page, "Rerun")
    await site.until("SELECT EXISTS (SELECT FROM flow WHERE rerun_of = $1)", flow)

    await show(page, site, "/schedules/weekly-berlin")
    ticks = page.get_by_label("Next ticks").locator("tbody tr")
    await expect(ticks).to_have_count(10)
    await expect(ticks.first).to_contain_text("02:30 +01:00")
    await act(page, "Pause")
    await site.until("SELECT paused FROM schedule WHERE name = 'weekly-berlin'")
    await act(page, "Resume")
    await site.until("SELECT NOT paused FROM schedule WHERE name = 'weekly-berlin'")
    await page.get_by_role("button", name="Backfill", exact=True).click()
    await page.get_by_label("From", exact=False).fill("2026-01-01T00:00")
    await page.get_by_label("Until").fill("2026-02-01T00:00")
    await page.get_by_label("Until").press("Tab")
    await expect(page.get_by_role("dialog")).to_contain_text("4 ticks: 4 would start")
    await page.get_by_role("dialog").get_by_role("button", name="Backfill").click()
    await site.until("SELECT started = 4 FROM backfill WHERE schedule = 'weekly-berlin'")
    await expect(page.get_by_label("Backfills")).to_contain_text("4 of 4")

    await show(page, site, "/types/idle")
    await act(page, "Pause")
    await site.until("SELECT paused FROM task_type WHERE name = 'idle'")
    await act(page, "Resume")
    await page.get_by_role("button", name="Limits", exact=True).click()
    await page.get_by_label("In flight at most").fill("7")
    await page.get_by_role("dialog").get_by_role("button", name="Limits").click()
    await site.until("SELECT max_in_flight = 7 FROM task_type WHERE name = 'idle'")

    await site.until(
        "SELECT EXISTS (SELECT FROM callback_target WHERE url LIKE '%/hung' AND state = 'abnormal')"
    )
    await show(page, site, "/targets")
    await page.get_by_role("link", name="/hung").click()
    await expect(page.locator(".summary")).to_contain_text("abnormal")
    await page.get_by_role("button", name="Disable", exact=True).click()
    await page.get_by_label("Why").fill("it hangs")
    await page.get_by_role("dialog").get_by_role("button", name="Disable").click()
    await site.until("SELECT why = 'it hangs' FROM callback_target WHERE url LIKE '%/hung'")
    await act(page, "Enable")
    await site.until("SELECT state <> 'disabled' FROM callback_target WHERE url LIKE '%/hung'")
    await page.get_by_role("button", name="Limit", exact=True).click()
    await page.get_by_label("Calls a second").fill("3")
    await page.get_by_role("dialog").get_by_role("button", name="Limit").click()
    await site.until("SELECT rate = 3 FROM callback_target WHERE url LIKE '%/hung'")


@pytest.mark.long
async def test_dead_letters_are_redriven_by_filter(site: Site, page: Page) -> None:
    """Only those that match: another target's stay dead."""
    await site.until("SELECT count(*) = 8 FROM callback WHERE target LIKE '%/broken'")
    await site.fetch(
        "UPDATE callback SET state = 'dead', finished_at = now() WHERE target LIKE '%/broken' OR target LIKE '%/hung'"
    )
    url = await site.fetch("SELECT target FROM callback WHERE target LIKE '%/broken' LIMIT 1")
    await show(page, site, "/dead-letters")
    await page.get_by_label("Target").fill(url)
    await page.get_by_role("button", name="Filter").click()
    await expect(page.get_by_label("Dead letters").locator("tbody tr")).to_have_count(8)
    await page.get_by_role("button", name="Redrive", exact=True).click()
    await page.get_by_role("dialog").get_by_role("button", name="Redrive 8 callbacks").click()
    await site.until("SELECT count(*) = 0 FROM callback WHERE state = 'dead' AND target LIKE '%/broken'")
    assert (
        await site.fetch("SELECT count(*) FROM callback WHERE state = 'dead' AND target LIKE '%/hung'") == 8
    )
    await expect(page.get_by_text("No dead letter matches")).to_be_visible()


@pytest.mark.long
async def test_screens_follow_what_happens(site: Site, page: Page, watch: Watch) -> None:
    """New rows wait behind a bar, a task changes without a reload, a log grows, the pause holds all
    still, and everything goes on after the gateway is back."""
    await show(page, site, "/tasks?type=idle")
    rows = page.get_by_label("Tasks").locator("tbody tr")
    first = await rows.first.inner_text()
    seed = {"type": "idle", "context": 1}
    async with site.http.post("/tasks", json=seed) as answer:
        new = (await answer.json())["id"]
    bar = page.get_by_role("button", name="1 new")
    await expect(bar).to_be_visible()
    assert await rows.first.inner_text() == first
    await bar.click()
    await expect(rows.first).to_contain_text(str(new))

    await show(page, site, f"/tasks/{new}")
    await expect(page.get_by_role("button", name="Live")).to_be_visible()
    async with site.http.post(f"/tasks/{new}/cancel"):
        pass
    await expect(page.locator(".summary")).to_contain_text("cancelled")

    await show(page, site, f"/tasks/{site.ids['running']}")
    log = page.get_by_role("log")
    await expect(log).to_contain_text("Part ")
    lines = await log.locator(".line").count()
    await expect(log.locator(".line").nth(lines + 1)).to_be_visible()

    watch.may_fail = True
    site.deployment.kill("gateway")
    await wait_until(site.answers)
    await expect(page.get_by_role("button", name="Live")).to_be_visible()
    async with site.http.post(f"/tasks/{site.ids['running']}/cancel"):
        pass
    await expect(page.locator(".summary")).to_contain_text("cancelled")
    watch.may_fail = False

    await show(page, site, f"/tasks/{site.ids['scheduled']}")
    await page.keyboard.press("p")
    await expect(page.get_by_role("button", name="Paused")).to_be_visible()
    async with site.http.post(f"/tasks/{site.ids['scheduled']}/cancel"):
        pass
    await site.until("SELECT state = 'cancelled' FROM task WHERE id = $1", site.ids["scheduled"])
    await expect(page.locator(".summary")).to_contain_text("scheduled")
    await page.keyboard.press("p")
    await expect(page.locator(".summary")).to_contain_text("cancelled")


@pytest.mark.long
async def test_eight_tabs_share_one_stream(site: Site, context: BrowserContext, watch: Watch) -> None:
    """A browser opens six connections to a server; the tabs tell each other."""
    streams: list[str] = []
    pages = []
    for _ in range(8):
        page = await context.new_page()
        watch.of(page)
        page.on("request", lambda request: streams.append(request.url) if "/live?" in request.url else None)
        await show(page, site, f"/tasks/{site.ids['ready']}")
        pages.append(page)
    for page in pages:
        await expect(page.get_by_role("button", name="Live")).to_be_visible()
    # The first tab leads. It opens the stream again only when the topics of all tabs change.
    assert len(streams) <= 2
    async with site.http.post(f"/tasks/{site.ids['ready']}/cancel"):
        pass
    for page in pages:
        await page.bring_to_front()
        await expect(page.locator(".summary")).to_contain_text("cancelled")
    await pages[0].close()
    await expect(pages[-1].get_by_role("button", name="Live")).to_be_visible()


@pytest.mark.long
async def test_everything_is_reached_by_keyboard(site: Site, page: Page) -> None:
    await show(page, site, "/")
    await page.keyboard.press("g")
    await page.keyboard.press("t")
    await expect(page.locator("h1")).to_have_text("Tasks")
    rows = page.get_by_label("Tasks").locator("tbody tr")
    await expect(rows.first).to_be_visible()
    await page.keyboard.press("j")
    await page.keyboard.press("j")
    await page.keyboard.press("x")
    await expect(page.get_by_role("group", name="Selected tasks")).to_contain_text("1 task selected")
    await page.keyboard.press("k")
    chosen = await page.locator("tr.active td.number a").first.inner_text()
    await page.keyboard.press("Enter")
    await expect(page.locator("h1")).to_have_text(f"Task {chosen}")
    await page.keyboard.press("/")
    await page.keyboard.type(f"f{site.ids['failed_flow']}")
    await page.keyboard.press("Enter")
    await expect(page.locator("h1")).to_have_text(f"Flow {site.ids['failed_flow']}")
    await page.keyboard.press("?")
    await expect(page.get_by_role("dialog")).to_contain_text("next and previous row")
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_have_count(0)
    await page.goto(f"{site.url}/console/tasks/{site.ids['ready']}")
    await expect(page.locator(".summary")).to_be_visible()
    await focus(page, "Cancel")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("dialog")).to_be_visible()
    await focus(page, "Cancel", inside="dialog")
    await page.keyboard.press("Enter")
    await site.until("SELECT state = 'cancelled' FROM task WHERE id = $1", site.ids["ready"])


async def focus(page: Page, name: str, *, inside: str = "main") -> None:
    """Presses Tab until a button has the focus."""

    async def has_focus() -> bool:
        await page.keyboard.press("Tab")
        found: bool = await page.evaluate(
            "([name, inside]) => document.activeElement.tagName === 'BUTTON' && document.activeElement.closest(inside)"
            " !== null && document.activeElement.textContent.trim() === name",
            [name, inside],
        )
        return found

    await wait_until(has_focus)


@pytest.mark.long
async def test_the_address_and_the_choices_of_the_user_are_kept(site: Site, page: Page) -> None:
    """A reload, a link and the browser's Back lead to the same list (filters are in the URL)."""
    await show(page, site, "/tasks")
    await page.get_by_label("Type", exact=True).fill("media")
    await page.get_by_role("combobox", name="State").select_option("succeeded")
    await expect(page).to_have_url(f"{site.url}/console/tasks?type=media&state=succeeded")
    await page.reload()
    await expect(page.get_by_label("Type", exact=True)).to_have_value("media")
    types = page.get_by_label("Tasks").locator("tbody tr td:nth-child(4)")
    await expect(types.first).to_have_text("media")
    assert set(await types.all_inner_texts()) == {"media"}
    await page.get_by_role("combobox", name="Theme").select_option("dark")
    await page.get_by_role("combobox", name="Times").select_option("utc")
    await page.reload()
    assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
    await expect(page.locator("td time").first).to_contain_text("Z")
    await page.locator("tbody a").first.click()
    await expect(page.locator("h1")).to_contain_text("Task ")
    await page.go_back()
    await expect(page).to_have_url(f"{site.url}/console/tasks?type=media&state=succeeded")
    await expect(types.first).to_have_text("media")


@pytest.mark.long
async def test_an_outage_keeps_what_is_on_the_screen(site: Site, page: Page, watch: Watch) -> None:
    watch.may_fail = True
    await show(page, site, "/tasks?type=media")
    await page.route(
        "**/tasks?*",
        lambda route: (
            route.fulfill(
                status=503,
                content_type="application/problem+json",
                body='{"title": "Unavailable", "detail": "PostgreSQL is away", "status": 503, "type": "about:blank"}',
            )
            if route.request.resource_type == "fetch"
            else route.continue_()
        ),
    )
    async with site.http.post("/tasks", json={"type": "idle", "context": 1}):
        pass
    await expect(page.get_by_role("alert")).to_contain_text("PostgreSQL is away")
    await expect(page.get_by_label("Tasks").locator("tbody tr").first).to_be_visible()
    await page.unroute_all()
    await page.get_by_role("button", name="Try again").click()
    await expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.long
async def test_an_operation_changes_what_its_dry_run_has_counted(site: Site, page: Page) -> None:
    """Also when the address has changed under the dialog."""
    await show(page, site, "/tasks?type=idle")
    await page.get_by_label("Type", exact=True).fill("broken")
    await page.get_by_role("button", name="Filter", exact=True).click()
    await expect(page.get_by_label("Tasks").locator("tbody tr")).to_have_count(5)
    await page.get_by_role("group", name="All tasks that match").get_by_role("button", name="recover").click()
    confirm = page.get_by_role("dialog").get_by_role("button", name="recover 5 tasks")
    await expect(confirm).to_be_enabled()
    await page.go_back()
    await expect(page).to_have_url(f"{site.url}/console/tasks?type=idle")
    # Keys of the page do nothing under a dialog.
    await page.keyboard.press("g")
    await page.keyboard.press("o")
    await confirm.click()
    await site.until("SELECT filter ->> 'type' = 'broken' FROM audit ORDER BY seq DESC LIMIT 1")


def test_names_of_pictures_are_those_of_screens() -> None:
    """The docs show what the tests have written."""
    site: Any = SimpleNamespace(ids=defaultdict(int))
    names = {
        f"{name}-{theme}-{width}.png"
        for name in screens(site)
        for theme in ("light", "dark")
        for width in WIDTHS
    }
    assert {file.name for file in PICTURES.glob("*.png")} == names
