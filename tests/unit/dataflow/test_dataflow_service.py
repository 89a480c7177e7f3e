"""The service over real HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import time

import aiohttp
import msgspec
import pytest
from dataflow_server import TOKEN, served

from dataflow_world import POLICY, UNIT, FakeClock, prompts
from rillflow.clients.dataflow import DataflowClient
from rillflow.config import load_recipe
from rillflow.dataflow.audit import audit
from rillflow.dataflow.main import serve
from rillflow.errors import BadRequest, DiskFull, LeaseLost
from rillflow.types import (
    CommitStage,
    CompleteTask,
    CompleteTasks,
    EngineInfo,
    FailTask,
    Heartbeat,
    LeaseStage,
    LookEngines,
    LoseRows,
    RenewBatch,
)
from rillflow.wire import Client


@pytest.fixture
def quick_housekeeping(monkeypatch):
    monkeypatch.setattr("rillflow.dataflow.service.HOUSEKEEPING", 0.01)


async def call(url, method, path, body=b"", token=TOKEN):
    headers = {"authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession() as session, session.request(method, url + path, data=body, headers=headers) as r:
        return r.status, await r.read()


async def test_bad_bodies_are_refused(tmp_path):
    async with served(tmp_path, body_limit=10_000) as run:
        for route in run.service.routes():
            if route.has_body:
                method, path = route.method, route.path
                for body in (b"", b"\xc1", b"{}", msgspec.msgpack.encode({"nonsense": 1})):
                    if path == "/stop" and body == b"{}":
                        continue
                    assert (await call(run.url, method, path, body))[0] == 400, (path, body)
                assert (await call(run.url, method, path, b"x" * 10_001))[0] == 413, path
        assert run.ledger.phase == "training"


async def test_completions_of_calls_that_come_together_share_a_transition(tmp_path, monkeypatch):
    """Each call gets the answers to its own, the refused ones too."""
    async with served(tmp_path) as run:
        leases = (await run.lease(3)).leases
        news = [
            CompleteTask(
                task=lease.task.id, attempt=lease.attempt, node="n0", reward=1.0, samples=[], calls=1, seconds=seconds
            )
            for lease, seconds in zip(leases, (1.0, float("nan"), 1.0), strict=True)
        ]
        sizes, complete = [], run.ledger.complete_many
        monkeypatch.setattr(run.ledger, "complete_many", lambda some: (sizes.append(len(some)), complete(some))[1])
        calls = (run.service._complete(CompleteTasks(tasks=part)) for part in (news[:1], news[1:]))
        first, second = await asyncio.gather(*calls)
        assert sizes == [3]
        assert [one.ack is not None for one in (*first.taken, *second.taken)] == [True, False, True]


async def test_a_whole_run(tmp_path):
    async with served(tmp_path, heldout=prompts(2, "h"), total_steps=2, staleness=1) as run:
        await run.join()
        for step in (1, 2):
            await run.play_all()
            reply = await run.ask(f"a{step}", wait=5)
            assert reply.batch is not None
            assert len(reply.batch.samples) == 4
            assert await run.commit(reply.batch, step)
            assert await run.commit(reply.batch, step)
        assert (await run.client.status()).phase == "finishing"
        await run.play_all()
        status = await run.client.status()
        assert (status.phase, status.reason, status.steps, status.versions) == ("ended", "done", 2, {POLICY: 2})
        assert (status.reward, status.wait_fraction) == (0.5, 0.5)
        assert status.samples_per_second == 2.0
        assert status.counts["trained"] == 4
        assert [evaluation.version for evaluation in status.evaluations] == [0, 2]
        assert (await run.lease()).phase == "ended"
        told = await run.client.engine_beat(EngineInfo("far", "http://127.0.0.1:1", {}, 64, 1))
        known = await run.client.engines(LookEngines())
        assert (told.ended, known.engines) == (True, []), "nobody waits for who has been told"
        assert (status.policies[POLICY].steps, status.policies[POLICY].total_steps, status.units) == (2, 2, 1)
        current = (await run.client.balance()).ledgers[0].current
        assert (current.production.consumed, [node.id for node in current.nodes]) == (8, ["n0"])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("event", "step") for line in lines] == ["evaluation", "step", "step", "evaluation"]
    assert lines[2]["loss"] == 0.25
    assert (lines[2]["step"], lines[2]["version"], lines[2]["samples"], lines[2]["tokens"]) == (2, 2, 4, 16)
    assert lines[2]["counters"]["trained"] == 4
    assert audit(tmp_path / "ledger.sqlite").balanced


async def test_an_answer_goes_out_after_the_change_is_on_disk(tmp_path):
    async with served(tmp_path) as run:
        leases = (await run.lease()).leases
        await asyncio.gather(*(run.done(lease) for lease in leases))
        other = sqlite3.connect(tmp_path / "ledger.sqlite")
        assert other.execute("SELECT count(*) FROM tasks WHERE state = 'done'").fetchone() == (4,)
        other.close()


async def test_a_lease_of_tasks_is_a_long_poll(tmp_path):
    async with served(tmp_path) as run:
        await run.join()
        await run.play_all()
        started = time.monotonic()
        assert (await run.lease(wait=0.3)).leases == []
        assert time.monotonic() - started >= 0.3
        waiting = asyncio.create_task(run.lease(version=1, wait=20))
        await run.waits_for(lambda waits: any("node n0 waits for" in wait for wait in waits))
        batch = (await run.ask("a")).batch
        await run.commit(batch, 1)
        assert len((await asyncio.wait_for(waiting, 60)).leases) == 4


async def test_what_is_wrong_with_the_weights_of_an_engine_is_the_first_thing_that_the_status_says(tmp_path):
    async with served(tmp_path) as run:
        await run.lease()
        beat = Heartbeat(
            node="n0", incarnation="a", attempts=[], versions={POLICY: -1}, capacity=1, trouble="stale weights"
        )
        await run.client.heartbeat(beat, 5.0)
        engine = EngineInfo("far", "http://127.0.0.1:1", {POLICY: -1}, 64, 1, trouble="wrong weights")
        await run.client.engine_beat(engine)
        assert (await run.client.status()).waits[:2] == ["node n0: stale weights", "engine far: wrong weights"]
        await run.client.heartbeat(msgspec.structs.replace(beat, trouble=""), 5.0)
        await run.client.engine_beat(msgspec.structs.replace(engine, trouble=""))
        assert not any("weights" in wait for wait in (await run.client.status()).waits)


async def test_a_node_that_does_not_know_of_newer_weights_is_told_at_once(tmp_path):
    """It may ask right after a step: were it to wait for news, it would wait for the next step."""
    async with served(tmp_path) as run:
        await run.join()
        await run.play_all()
        await run.commit((await run.ask("a")).batch, 1)
        await run.play_all()
        started = time.monotonic()
        reply = await run.lease(version=0, wait=20)
        assert (reply.leases, reply.heads) == ([], run.ledger.heads)
        assert time.monotonic() - started < 10


async def test_a_look_at_the_engines_waits_for_news(tmp_path):
    """Nodes learn of new weights at once, not at their next poll; a change of an engine's load wakes no poll."""
    one = EngineInfo("e", "http://127.0.0.1:1", {POLICY: 1}, 64, 1)
    async with served(tmp_path) as run:
        await run.client.engine_beat(one)
        known = await run.client.engines(LookEngines())
        waiting = asyncio.create_task(run.client.engines(LookEngines(news=known.news, wait=20)))
        await run.client.engine_beat(msgspec.structs.replace(one, running=3))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await run.client.engine_beat(msgspec.structs.replace(one, versions={POLICY: 2}))
        news = await asyncio.wait_for(waiting, 60)
        assert [engine.versions for engine in news.engines] == [{POLICY: 2}]
        same = await run.client.engines(LookEngines(news=news.news, wait=0.01))
        assert same == news


async def test_a_lease_of_a_batch_is_a_long_poll_that_says_what_it_waits_for(tmp_path):
    async with served(tmp_path) as run:
        await run.join()
        (wait,) = (await run.client.status()).waits
        assert re.fullmatch(r"waiting for the first rollout node to start \(\d+ s\)", wait)
        assert (await run.ask("a", wait=0.1)).waiting_for == "0 of 2 groups ready, 0 tasks running, 0 nodes"
        waiting = asyncio.create_task(run.ask("a", wait=20))
        expected = f"the trainer of {POLICY} waits for a batch: 0 of 2 groups ready, 0 tasks running, 0 nodes"
        await run.waits_for(lambda waits: waits[:1] == [expected])
        await run.play_all()
        batch = (await asyncio.wait_for(waiting, 60)).batch
        assert batch is not None
        assert (await run.ask("a")).batch.id == batch.id


async def test_a_stop_ends_all_waits(tmp_path):
    async with served(tmp_path) as run:
        await run.join()
        leases = (await run.lease()).leases
        polls = [asyncio.create_task(run.lease(wait=20)), asyncio.create_task(run.ask("a", wait=20))]
        await asyncio.sleep(0.05)
        assert (await run.client.stop("enough")).accepted
        replies = await asyncio.wait_for(asyncio.gather(*polls), 60)
        assert [reply.phase for reply in replies] == ["ended", "ended"]
        assert not await run.done(leases[0])
        assert (await run.client.status()).reason == "enough"


async def test_errors_of_the_ledger_keep_their_kind(tmp_path):
    async with served(tmp_path) as run:
        with pytest.raises(LeaseLost):
            await run.ask("a")
        await run.join()
        with pytest.raises(BadRequest):
            await run.join(5, "j")


async def test_failures_and_heartbeats(tmp_path):
    async with served(tmp_path) as run:
        lease, other, *_ = (await run.lease()).leases
        news = FailTask(task=lease.task.id, attempt=lease.attempt, node="n0", cause="crash", error="boom")
        assert (await run.client.fail(news)).accepted
        attempts = [lease.attempt, other.attempt]
        beat = Heartbeat(node="n0", incarnation="a", attempts=attempts, versions={POLICY: 0}, capacity=4)
        reply = await run.client.heartbeat(beat)
        assert (reply.lost, reply.heads, reply.phase) == ([lease.attempt], {POLICY: 0}, "training")


@pytest.mark.usefixtures("quick_housekeeping")
async def test_housekeeping_returns_what_was_lost(tmp_path):
    clock = FakeClock()
    async with served(tmp_path, clock=clock, task_lease=3.0, node_timeout=5.0) as run:
        first = (await run.lease()).leases
        waiting = asyncio.create_task(run.lease(wait=20))
        await run.waits_for(lambda waits: any("node n0 waits for" in wait for wait in waits))
        await run.pass_time(clock, 4)
        again = (await asyncio.wait_for(waiting, 60)).leases
        assert {lease.task.id for lease in again} == {lease.task.id for lease in first}
        await run.pass_time(clock, 6)
        assert [node.state for node in (await run.client.balance()).ledgers[0].current.nodes] == ["gone"]


async def test_a_full_disk_under_the_ledger_acknowledges_nothing(tmp_path):
    async with served(tmp_path, staleness=5) as run:
        leases = (await run.lease()).leases
        pages = run.ledger.db.value("PRAGMA page_count")
        run.ledger.db.run(f"PRAGMA max_page_count = {pages}")
        news = [
            FailTask(task=lease.task.id, attempt=lease.attempt, node="n0", cause="crash", error="x" * 4000)
            for lease in leases
        ]
        results = await asyncio.gather(*(run.client.fail(item) for item in news), return_exceptions=True)
        assert any(isinstance(result, DiskFull) for result in results)
        for lease, result in zip(leases, results, strict=True):
            failures = run.ledger.db.value("SELECT failures FROM tasks WHERE id = ?", (lease.task.id,))
            assert failures == (0 if isinstance(result, DiskFull) else 1)
        run.ledger.db.run("PRAGMA max_page_count = 1000000")
        assert all([(await run.client.fail(item)).accepted for item in news])


async def test_units_are_told_and_rows_are_lost_and_batches_renewed_over_the_wire(tmp_path):
    async with served(tmp_path) as run:
        await run.join()
        assert [info.unit for info in (await run.client.units()).units] == [UNIT]
        await run.play_all()
        batch = (await run.ask("a")).batch
        assert (await run.client.renew_batch(RenewBatch(batch=batch.id, attempt="a"))).accepted
        assert (await run.client.lose_rows(LoseRows(rows=[batch.samples[0].row], reason="checksum"))).accepted
        with pytest.raises(LeaseLost):
            await run.client.renew_batch(RenewBatch(batch=batch.id, attempt="a"))
        with pytest.raises(LeaseLost):
            await run.commit(batch, 1)
        assert (await run.client.status()).counts["rerun.damaged"] == 1
        assert "no storage unit is there" not in (await run.client.status()).waits


async def test_stages_are_served_over_the_wire(tmp_path):
    async with served(tmp_path, stages=("score",)) as run:
        await run.join()
        ask = LeaseStage(policy=POLICY, stage="score", attempt="w", groups=9, wait=5)
        waiting = asyncio.create_task(run.client.lease_stage(ask))
        await run.play_all()
        batch = (await waiting).batch
        assert batch.samples
        while batch is not None:
            news = CommitStage(policy=POLICY, stage="score", batch=batch.id, attempt=batch.attempt, columns=[])
            assert (await run.client.commit_stage(news)).accepted
            ask = msgspec.structs.replace(ask, attempt=ask.attempt + "w", wait=0)
            batch = (await run.client.lease_stage(ask)).batch
        assert (await run.ask("a")).batch.complete


async def test_metrics_for_prometheus(tmp_path):
    async with served(tmp_path, clock=FakeClock()) as run:
        leases = (await run.lease()).leases
        stats = {"engines": 2.0, f"{POLICY}.probes_failed": 1.0}
        attempts = [lease.attempt for lease in leases]
        await run.client.heartbeat(
            Heartbeat(node="n0", incarnation="a", attempts=attempts, versions={POLICY: 0}, capacity=1, stats=stats), 5.0
        )
        text = (await call(run.url, "GET", "/metrics"))[1].decode()
        assert 'rillflow_count{name="playing"} 2.0' in text
        assert "rillflow_nodes 1.0" in text
        assert f'rillflow_version{{policy="{POLICY}"}} 0.0' in text
        assert "rillflow_reward{" not in text, "there was no step yet"
        assert "rillflow_task_lease_age 0.0" in text
        assert f'rillflow_node_held{{node="n0"}} {len(leases)}.0' in text
        assert f'rillflow_node_probes_failed{{node="n0",policy="{POLICY}"}} 1.0' in text
        assert 'rillflow_node_engines{node="n0",policy=""} 2.0' in text
        await run.join()
        for lease in leases:
            await run.done(lease)
        await run.commit((await run.ask("a")).batch, 1)
        text = (await call(run.url, "GET", "/metrics"))[1].decode()
        assert f'rillflow_steps{{policy="{POLICY}"}} 1.0' in text
        assert f'rillflow_reward{{policy="{POLICY}"}}' in text
        assert f'rillflow_last_samples{{policy="{POLICY}"}}' in text


async def test_rollbacks_are_told_and_lines_come_once_after_a_restart(tmp_path):
    async with served(tmp_path) as run:
        await run.join()
        await run.play_all()
        await run.commit((await run.ask("a")).batch, 1)
        await run.join(0, "j")
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    assert [json.loads(line).get("event", "step") for line in lines] == ["step", "rollback"]
    path.write_text(lines[0] + "\n" + lines[1][:10])  # torn by a crash
    async with served(tmp_path):
        assert path.read_text().splitlines() == lines


async def test_serve_builds_a_run_folder_and_resumes_it(tmp_path):
    recipe = load_recipe("quickstart", ["data.heldout.arguments.count=2", "data.prompts.arguments.count=5"])
    for _ in range(2):
        ready = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(serve(recipe, tmp_path / "run", TOKEN, on_ready=ready.set_result))
        client = DataflowClient(Client(await asyncio.wait_for(ready, 60), TOKEN))
        status = await client.status()
        assert status.phase == "training"
        assert status.counts["eval.playing"] == 2
        await client.close()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert "ledger.sqlite" in {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.usefixtures("quick_housekeeping")
async def test_a_service_that_stood_still_takes_no_lease_away(tmp_path):
    clock = FakeClock()
    async with served(tmp_path, clock=clock, task_lease=3.0, node_timeout=5.0) as run:
        leases = (await run.lease()).leases
        clock.time += 10.0  # between two rounds of housekeeping, as when the process is paused
        await run.housekeeping()
        await run.housekeeping()
        assert await run.done(leases[0])
        await run.pass_time(clock, 4)
        assert not await run.done(leases[1])
