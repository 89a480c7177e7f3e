"""The dashboard's server: access by tokens, the rights of a browser, and that it does no harm to a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from dashboard_run import make_run, step_line, write_lines, write_spans

from rillflow.dashboard.panels import PANELS
from rillflow.dashboard.server import STATIC, Dashboard
from rillflow.dashboard.watched import watch
from rillflow.dataflow.ledger.database import Database
from rillflow.runtime.folder import RunFolder
from rillflow.types import Ack, RetireNode, StopRun
from rillflow.types.routes import Dataflow
from rillflow.wire import Service
from rillflow.wire.tokens import SCOPES

OWN = {"x-rillflow-dashboard": "1"}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path)


@pytest.fixture
async def browser(folder: RunFolder) -> AsyncIterator[httpx.AsyncClient]:
    dashboard = Dashboard(watch([folder.root]))
    base = await dashboard.start()
    async with httpx.AsyncClient(base_url=base, timeout=60.0) as client:
        yield client
    await dashboard.stop()


def bearer(folder: RunFolder, scope: Any = "reader") -> dict[str, str]:
    return {"authorization": f"Bearer {folder.token_of(scope)}"}


async def test_nothing_is_shown_without_a_token(browser: httpx.AsyncClient, folder: RunFolder) -> None:
    paths = ["/", "/static/app.js", "/api/session", f"/api/runs/{folder.root.name}/overview", "/metrics", "/nothing"]
    for path in paths:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"cookie": "rillflow-1=x"}):
            assert (await browser.get(path, headers=headers)).status_code == 401, path
    page = await browser.get("/?token=wrong")
    assert page.status_code == 401
    assert "rillflow token RUN reader" in page.text


async def test_the_token_in_the_url_becomes_a_cookie(browser: httpx.AsyncClient, folder: RunFolder) -> None:
    page = await browser.get(f"/?token={folder.token_of('reader')}")
    assert page.status_code == 200
    cookie = page.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert (await browser.get("/api/session")).json()["runs"][0]["name"] == folder.root.name
    # Only the page's own address takes a token: those of the panels are seen in more places.
    browser.cookies.clear()
    assert (await browser.get(f"/api/session?token={folder.token_of('reader')}")).status_code == 401


@pytest.mark.parametrize("scope", SCOPES)
async def test_tokens_of_readers_and_more_read(browser: httpx.AsyncClient, folder: RunFolder, scope: str) -> None:
    reply = await browser.get("/api/session", headers=bearer(folder, scope))
    if scope in ("stage", "unit"):
        assert reply.status_code == 403
        return
    assert reply.status_code == 200
    assert reply.json()["runs"][0]["operated"] is (scope == "operator")


async def test_only_the_operator_changes_something(browser: httpx.AsyncClient, folder: RunFolder) -> None:
    path = f"/api/runs/{folder.root.name}/stop"
    for scope in ("reader", "node", "trainer"):
        assert (await browser.post(path, headers={**OWN, **bearer(folder, scope)})).status_code == 403
    # A page of another site may send the cookie along, not the header.
    assert (await browser.post(path, headers=bearer(folder, "operator"))).status_code == 400
    reply = await browser.post(path, headers={**OWN, **bearer(folder, "operator")})
    assert reply.status_code == 502
    assert "does not run" in reply.json()["error"]


async def test_the_operator_stops_a_run_and_retires_a_node(browser: httpx.AsyncClient, folder: RunFolder) -> None:
    told: list[object] = []
    service = Service("dataflow", folder.token)

    async def hear(news: object) -> Ack:
        told.append(news)
        return Ack(accepted=True)

    service.on(Dataflow.stop, hear)
    service.on(Dataflow.retire, hear)
    folder.publish_endpoint("dataflow", await service.start())
    folder.set_state("running")
    headers, run = {**OWN, **bearer(folder, "operator")}, f"/api/runs/{folder.root.name}"
    assert (await browser.post(f"{run}/stop", headers=headers)).json() == {"done": True}
    assert (await browser.post(f"{run}/retire", headers=headers, json={"node": "rollout-1"})).status_code == 200
    assert (await browser.post(f"{run}/retire", headers=headers, json={"knot": 1})).status_code == 400
    await service.stop()
    assert [type(news) for news in told] == [StopRun, RetireNode]
    assert told[1] == RetireNode(node="rollout-1")


async def test_the_page_allows_nothing_but_its_own_files(browser: httpx.AsyncClient, folder: RunFolder) -> None:
    for path in ("/", "/static/app.js", "/api/session"):
        reply = await browser.get(path, headers=bearer(folder))
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["x-content-type-options"] == "nosniff"
    for path in STATIC.iterdir():
        text = path.read_text()
        assert "https://" not in text, f"{path.name} asks for something elsewhere"
        assert "innerHTML" not in text, f"{path.name} makes markup of text"
        assert " style=" not in text, f"{path.name} has a style that the policy refuses"


async def test_files_are_those_of_the_page(browser: httpx.AsyncClient, folder: RunFolder) -> None:
    for name in ("..%2fserver.py", "server.py", "%2e%2e"):
        assert (await browser.get(f"/static/{name}", headers=bearer(folder))).status_code == 404


async def test_wrong_questions_are_answered_with_what_to_do(browser: httpx.AsyncClient, folder: RunFolder) -> None:
    name = folder.root.name
    for path, status in {
        "/api/runs/other/overview": 404,
        f"/api/runs/{name}/nothing": 404,
        f"/api/runs/{name}/overview?width=1": 400,
        f"/api/runs/{name}/overview?axis=sideways": 400,
        f"/api/runs/{name}/log": 400,
        f"/api/runs/{name}/log?name=../run.json": 400,
    }.items():
        reply = await browser.get(path, headers=bearer(folder))
        assert reply.status_code == status, path
        assert reply.json()["hint"], path


async def test_a_damaged_ledger_is_told_in_its_panel(browser: httpx.AsyncClient, folder: RunFolder) -> None:
    folder.ledger.write_bytes(b"no database at all" * 100)
    reply = await browser.get(f"/api/runs/{folder.root.name}/flow", headers=bearer(folder))
    assert reply.status_code == 500
    assert "damaged" in reply.json()["error"]


async def test_a_run_is_read_while_it_is_written(browser: httpx.AsyncClient, folder: RunFolder) -> None:
    (folder.root / "state.json").write_text(json.dumps({"state": "running", "reason": "", "time": 1.0}))

    async def write() -> None:
        for number in range(6, 56):
            write_lines(folder, [step_line(number)])
            await asyncio.sleep(0)

    async def read() -> float:
        seen = 0.0
        while seen < 55:
            reply = await browser.get(f"/api/runs/{folder.root.name}/overview", headers=bearer(folder))
            last = reply.json()["figures"][0]["value"]
            assert last >= seen
            seen = last
        return seen

    async with asyncio.timeout(60):
        _, seen = await asyncio.gather(write(), read())
    assert seen == 55


async def test_a_running_run_that_does_not_answer_is_shown_as_it_was_left(
    browser: httpx.AsyncClient, folder: RunFolder
) -> None:
    (folder.root / "state.json").write_text(json.dumps({"state": "running", "reason": "", "time": 1.0}))
    folder.publish_endpoint("dataflow", "http://127.0.0.1:9")
    name = folder.root.name
    reply = (await browser.get(f"/api/runs/{name}/overview", headers=bearer(folder))).json()
    assert "does not answer" in reply["run"]["reason"]
    assert (await browser.get(f"/api/runs/{name}/nodes", headers=bearer(folder))).json()["live"] is False


async def test_advisories_come_with_what_to_do(browser: httpx.AsyncClient, folder: RunFolder) -> None:
    write_lines(folder, [step_line(number, reward=0.0, reward_std=0.0) for number in range(6, 40)])
    found = (await browser.get(f"/api/runs/{folder.root.name}/advisories", headers=bearer(folder))).json()
    assert found["unread"] == []
    assert found["advisories"]
    assert all(one["title"] and one["what_to_do"] for one in found["advisories"])


@pytest.mark.parametrize("panel", [name for name in PANELS if name not in ("trajectory", "tokens", "compare", "log")])
async def test_a_view_is_made_again_only_after_a_change(
    browser: httpx.AsyncClient, folder: RunFolder, panel: str
) -> None:
    path = f"/api/runs/{folder.root.name}/{panel}"
    first = await browser.get(path, headers=bearer(folder))
    known = {**bearer(folder), "if-none-match": first.headers["etag"]}
    assert (await browser.get(path, headers=known)).status_code == 304
    assert (await browser.get(f"{path}?other=question", headers=known)).status_code == 200
    for source in PANELS[panel].sources:
        change(folder, source)
        reply = await browser.get(path, headers=known)
        assert reply.status_code == 200, source
        known["if-none-match"] = reply.headers["etag"]


def change(folder: RunFolder, source: str) -> None:
    """Let this part of the run folder change, as the processes of a run do it."""
    match source:
        case "state":
            folder.set_state("stopped")
        case "metrics":
            write_lines(folder, [step_line(6)])
        case "timeline":
            write_spans(folder, "rollout-0", [("rollout", 4.0, 5.0)])
        case "ledger":
            db = Database(folder.ledger)
            with db.change():
                db.count("cursor", 1)
            db.commit()
            db.close()
        case "trajectories":
            (folder.root / "trajectories.sqlite-wal").write_bytes(b"more")
        case "logs":
            folder.log("rollout-0").write_text("another line\n")
        case "weights":
            path = folder.weights("agent") / "head.json"
            path.parent.mkdir(parents=True)
            path.write_text("{}")
        case "maintainer":
            (folder.root / "maintainer.jsonl").write_text('{"time": 1.0, "action": "hold"}\n')
        case _:
            raise AssertionError(f"nothing changes {source}")


async def test_advisories_that_are_the_same_are_not_sent_again(browser: httpx.AsyncClient, folder: RunFolder) -> None:
    path = f"/api/runs/{folder.root.name}/advisories"
    first = await browser.get(path, headers=bearer(folder))
    again = await browser.get(path, headers={**bearer(folder), "if-none-match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
