"""The dashboard in a real browser, over a run while it goes on and after it has ended."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
import yaml

from commands import Cli, Started, processes_of, steps_of, wait_until
from needs import require

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

require("chromium")
pytestmark = pytest.mark.slow

WIDTHS = {"desktop": 1280, "phone": 390}
PATIENCE = 120_000  # milliseconds for anything in the page: other processes need the cores too
# Selectors that each panel shows once it has data.
PANELS = {
    "overview": (".figure", "[data-chart=reward] path.curve", ".advice"),
    "trajectories": ("tr.open",),
    "timeline": ("svg rect.state-rollout", "svg rect.state-train"),
    "flow": ("td:has-text('trained')",),
    "nodes": ("td:has-text('rollout-0')",),
    "weights": ("td:has-text('prompts, within')",),
    "balance": ("section:has-text('versions') table",),
    "algorithms": ("[data-chart=flat] path.curve",),
    "metrics": ("[data-chart=advantage_mean] path.curve",),
    "logs": (".log div",),
}
WORKFLOW = """
async def play(episode):
    question = {"role": "user", "content": episode.payload["question"]}
    if "socks" in question["content"]:
        raise ValueError("no socks today")

    async def ask(*messages):
        reply = await episode.client.chat.completions.create(model=episode.model, messages=messages, max_tokens=6)
        return reply.choices[0].message.model_dump(exclude_none=True)

    said = await ask(question)
    for word in ("Sure?", "Again!"):
        await ask(question, said, {"role": "user", "content": word})
    return said.get("content")


def reward(payload, answer):
    return float(len(answer or "") % 3)
"""
RECIPE = """
extends: stockroom
name: forking
workflow: forking.py:play
reward: forking.py:reward
dataflow: {group_size: 4, balance_every: 2}
trainer: {steps: 100000, batch_groups: 2, lr: 1.0e-9}
rollout: {episodes: 8}
data: {heldout: {arguments: {count: 4}}}
evaluation: {every: 2}
"""


@contextmanager
def complaints(page: Page, base: str) -> Iterator[None]:
    """Fail for what the page logs as an error or a warning, and for what it asks of anybody but its server."""
    found: list[str] = []
    page.on("console", lambda message: found.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(base) else found.append(f"asked {request.url}"))
    yield
    assert found == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's own sandbox does not work for root, as which CI runs.
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def run(shared_cli: Cli) -> Started:
    """A run whose episodes fork, and sometimes fail, which goes on until a test stops it."""
    (shared_cli.cwd / "forking.py").write_text(WORKFLOW)
    (shared_cli.cwd / "forking.yaml").write_text(RECIPE)
    started = shared_cli.start("run", "forking.yaml")
    wait_until(lambda: steps_of_run(started) >= 5, "five steps", 600)
    return started


def steps_of_run(started: Started) -> int:
    assert started.process.poll() is None, started.output()[-3000:]
    return steps_of(started.folder) if any(started.runs.iterdir()) else 0


def address(output: str) -> tuple[str, str]:
    """The URL that a command has printed, and its server."""
    url = output.split("dashboard: ")[1].split(maxsplit=1)[0]
    return url, url.split("/?")[0]


@pytest.fixture(scope="module")
def ended(run: Started, shared_cli: Cli) -> tuple[str, str, list[str]]:
    """The run after its end, and a copy of it with another seed, in one dashboard: its URL, server and run names."""
    run.interrupt()
    assert run.wait(120) == 130, run.output()[-3000:]
    other = run.runs / "other"
    shutil.copytree(run.folder, other)
    recipe = yaml.safe_load((other / "recipe.yaml").read_text())
    (other / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "seed": 99}, sort_keys=False))
    folder = next(path for path in run.runs.iterdir() if path != other)
    shown = shared_cli.start("dashboard", str(folder), str(other))
    wait_until(lambda: "dashboard: " in shown.output(), "the dashboard", 120)
    return *address(shown.output()), [folder.name, "other"]


@contextmanager
def opened(browser: Browser, url: str, width: int = 1280, theme: str = "light") -> Iterator[Page]:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)  # type: ignore[arg-type]
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    with complaints(page, url.split("/?", maxsplit=1)[0]):
        page.goto(url)
        page.wait_for_selector("nav a")
        yield page
        page.wait_for_load_state("networkidle")
    context.close()


def look_at_every_panel(page: Page, width: int) -> None:
    for name, has in PANELS.items():
        page.evaluate("name => { location.hash = location.hash.split('/').slice(0, 2).join('/') + '/' + name }", name)
        for selector in has:
            page.wait_for_selector(selector, state="attached")
        assert page.locator("#failure").count() == 0, f"{name}: {page.inner_text('#failure')}"
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{name} is {wide} pixels wide on a screen of {width}"


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_a_run_is_seen_as_it_goes_on(run: Started, browser: Browser, width: int) -> None:
    url, _ = address(run.output())
    with opened(browser, url, width) as page:
        assert "token" not in page.url
        page.wait_for_selector("#state:has-text('running')")
        step = int(page.inner_text(".figure b").replace(",", ""))
        page.wait_for_function(
            "step => Number(document.querySelector('.figure b').textContent.replace(',', '')) > step", arg=step
        )
        look_at_every_panel(page, width)


def test_a_killed_dashboard_comes_back_and_the_run_goes_on(run: Started) -> None:
    url, _ = address(run.output())
    processes_of(run.folder)["dashboard"].kill()
    before = steps_of_run(run)
    wait_until(lambda: answers(url), "the dashboard to come back", 120)
    wait_until(lambda: steps_of_run(run) > before, "another step", 120)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=60.0).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_every_panel_of_a_run_that_has_ended(
    ended: tuple[str, str, list[str]], browser: Browser, width: int, theme: str
) -> None:
    with opened(browser, ended[0], width, theme) as page:
        page.wait_for_selector("#state:has-text('stopped')")
        look_at_every_panel(page, width)
        page.wait_for_selector("details:has-text('no socks today')")


def test_a_forked_session_opens(ended: tuple[str, str, list[str]], browser: Browser) -> None:
    with opened(browser, ended[0]) as page:
        page.keyboard.press("2")
        page.get_by_role("button", name="forks").click()
        page.keyboard.press("j")
        page.locator("tr.open").first.press("Enter")
        page.wait_for_selector("h2:has-text('Token tree: 2 paths')")
        page.wait_for_selector("article.assistant")
        assert page.locator(".tree .node").count() >= 4
        assert page.locator(".tokens .masked").count() > 0
        before = page.inner_text(".tokens")
        # The other path, by its piece in the tree: it is asked for its own tokens and conversation.
        page.locator(".tree .node:not(.chosen)").last.click()
        page.wait_for_function("text => document.querySelector('.tokens').innerText !== text", arg=before)
        page.get_by_label("colour by").select_option("version")
        page.wait_for_function(
            "() => [...document.querySelectorAll('.tokens span')].some(one => one.style.backgroundColor)"
        )
        page.get_by_role("button", name="All trajectories").click()
        page.wait_for_selector("tr.open")


def test_two_runs_side_by_side(ended: tuple[str, str, list[str]], browser: Browser) -> None:
    url, base, names = ended
    with opened(browser, url) as page:
        page.goto(f"{base}/#/{names[0]}/compare?other=other")
        page.wait_for_selector("[data-chart=reward] .legend:has-text('A agent')")
        page.wait_for_selector("[data-chart=reward] .legend:has-text('B agent')")
        page.wait_for_selector("tr:has(code:has-text('seed')) ins:has-text('99')")


def test_keys(ended: tuple[str, str, list[str]], browser: Browser) -> None:
    with opened(browser, ended[0]) as page:
        page.wait_for_selector("[data-chart=loss] svg")
        page.focus("[data-chart=loss] svg")
        page.keyboard.press("ArrowLeft")
        page.wait_for_selector("[data-chart=loss] .tip:has-text('step')")
        page.keyboard.press("t")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        page.keyboard.press("t")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.keyboard.press("?")
        page.wait_for_selector("dialog[open]")
        page.keyboard.press("Escape")
        page.keyboard.press("3")
        page.wait_for_selector("h1:has-text('Timeline')")
        page.keyboard.press("]")
        page.wait_for_function("() => document.getElementById('run').value === 'other'")


def test_without_a_token_nothing_is_shown(ended: tuple[str, str, list[str]], browser: Browser) -> None:
    page = browser.new_page()
    reply = page.goto(ended[1])
    assert reply is not None
    assert reply.status == 401
    assert "rillflow token RUN reader" in page.inner_text("body")
    page.close()
