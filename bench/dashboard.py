"""What the dashboard costs: how long its views take on a large run, and how much of a run's throughput it takes.

    python -m bench.dashboard [--quick] [--json FILE]

Views: a run folder with 10,000 trajectories, 100,000 metric points (2,500 steps of 40 numbers), 100,000 spans of work
and a full ledger is served over HTTP by the dashboard itself. Each view is asked for as the first of all, when the
dashboard has read nothing of the folder, and then again and again. The limit is 200 ms: of processor time at first, of
waiting then.

Cost: one run of the quickstart, whose policy stays as it is (its learning rate is next to nothing), with the dashboard
open and closed in turns. Open means that it is asked for what the page asks for, as often (static/app.js): the overview
and the advisories, with the tags of the answers before, and now and then the list of runs. The cost is the processor
time of the dashboard's process and what its questions cost the dataflow service; the goal is 2 % of two cores, 40 ms a
second. The second goal, at least 0.98 of the episodes a second, is noisy where other work goes on.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil

from bench.common import Report, parser
from rillflow.clients.dataflow import DataflowClient
from rillflow.config import load_recipe
from rillflow.contracts import SystemClock
from rillflow.dashboard.server import Dashboard
from rillflow.dashboard.watched import watch
from rillflow.dataflow.balance_ledger import Balances
from rillflow.dataflow.ledger.database import Base, Database
from rillflow.dataflow.ledger.schema import FORMAT
from rillflow.dataflow.rules import Rules
from rillflow.runtime.folder import RunFolder
from rillflow.storage.spans import Span
from rillflow.storage.trajectories import Bounds, TrajectoryStore
from rillflow.storage.trajectory_format import FILE, KINDS, TokenPath, Trajectory, described
from rillflow.wire import Client

LIMIT = 200.0  # milliseconds
SHARE = 0.98  # of the throughput without a dashboard
TRAJECTORIES, STEPS, NUMBERS, SPANS = 10_000, 2_500, 40, 100_000
COST = 40.0  # milliseconds of processor time a second: 2 % of two cores
POLL, SLOWEST, PAUSE = 2.0, 16.0, 40.0  # as in static/app.js: seconds between updates, and pauses for each second
SESSION = 10.0
ASKS = 200  # questions by which their cost to the dataflow service is measured
_DEADLINE = 600.0
VIEWS = {
    "overview": {"width": 400},
    "advisories": {},
    "metrics": {"names": ",".join(f"number_{n}" for n in range(24)), "width": 400},
    "timeline": {"width": 1000},
    "flow": {},
    "nodes": {},
    "weights": {},
    "balance": {},
    "algorithms": {"width": 400},
    "logs": {},
    "trajectories": {"order": "-reward", "offset": 5000, "kept": "sample"},
    "trajectory": {"id": "t005000.0"},
    "tokens": {"id": "t005000.0", "sample": 1},
}


# ---------------------------------------------------------------- a large run


def make_run(parent: Path) -> RunFolder:
    folder = RunFolder.create(load_recipe("quickstart"), parent)
    now = time.time()
    with open(folder.metrics, "wb") as file:
        for step in range(1, STEPS + 1):
            numbers = {f"number_{n}": step / (n + 1) for n in range(NUMBERS - 4)}
            line = {"policy": "agent", "step": step, "version": step, "time": now + step, "reward": 0.5, "loss": 0.1}
            file.write(msgspec.json.encode({**line, "entropy": 1.0, "wait_fraction": 0.2, **numbers}) + b"\n")
    (folder.root / "timeline").mkdir()
    for worker in ("rollout-0", "rollout-1", "trainer-agent", "engine-0"):
        with open(folder.root / "timeline" / f"{worker}.jsonl", "wb") as file:
            for n in range(SPANS // 4):
                state = "rollout" if n % 2 else "idle"
                file.write(msgspec.json.encode(Span(state, now + n, now + n + 1)) + b"\n")
    fill_ledger(folder)
    fill_trajectories(folder)
    folder.set_state("finished", "done")
    return folder


def fill_ledger(folder: RunFolder) -> None:
    """The tables that views read, as large as a run of 2,500 steps of 16 groups of 8 leaves them."""
    recipe, db = folder.recipe, Database(folder.ledger)
    balances = Balances(Base(db, Rules.of(recipe), SystemClock()), recipe.policy, recipe.dataflow.balance_every)
    with db.change():
        db.set_meta("format", FORMAT)
        balances.open()
        db.count("cursor", STEPS * 16)
        db.count("admitted.train", STEPS * 16)
        db.run("INSERT INTO tally VALUES ('train', 'trained', '', ?)", (STEPS * 16,))
        db.many(
            "INSERT INTO groups (id, lane, round, ord, prompt, planned, state, admitted_at) "
            "VALUES (?, 'train', 0, ?, ?, 8, 'trained', 1.0)",
            [(f"t{n:06d}", n, f"p{n}") for n in range(STEPS * 16)],
        )
        db.many(
            "INSERT INTO tasks (grp, place, seed, state) VALUES (?, ?, 1, 'done')",
            [(f"t{n:06d}", k) for n in range(STEPS * 16) for k in range(8)],
        )
        db.many(
            "INSERT INTO nodes (name, incarnation, state, seen, completed) VALUES (?, 'i', 'healthy', 1.0, 10)",
            [(f"rollout-{n}",) for n in range(64)],
        )
    db.commit()
    db.close()


def fill_trajectories(folder: RunFolder) -> None:
    store = TrajectoryStore(folder.root / FILE, Bounds(1 << 31, dict.fromkeys(KINDS, TRAJECTORIES)))
    random = np.random.default_rng(0)
    for n in range(TRAJECTORIES):
        store.add(a_trajectory(n, random))
    store.close()


def a_trajectory(number: int, random: np.random.Generator) -> Trajectory:
    """Two paths of 600 tokens that share the first 300."""
    shared = random.integers(10, 600, 300)
    samples = [
        TokenPath(
            policy="agent", role="", reward=float(number % 10), fork="history" if path else "", truncated=False,
            path=path, tokens=np.concatenate((shared, random.integers(10, 600, 300))).astype(np.int32),
            mask=np.repeat(np.array([0, 1, 0, 1], np.uint8), 150), logprobs=np.full(600, -0.5, np.float32),
            versions=np.full(600, number // 4, np.int32), advantages=np.full(600, 0.1, np.float32),
            trainer_logprobs=np.full(600, -0.51, np.float32),
        )
        for path in range(2)
    ]  # fmt: skip
    said = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "word " * 300}]
    first = {"policy": "agent", "follows": None, "shared": 0, "fork": "", "finish": "stop", "messages": said}
    paths = [first, {**first, "follows": 0, "shared": 1, "fork": "history", "messages": said[1:]}]
    known: dict[str, Any] = {
        "id": f"t{number:06d}.0", "time": float(number), "lane": "train", "status": "done", "kept": "sample",
        "step": number // 4, "reward": float(number % 10), "prompt": f"p{number}", "group": f"t{number:06d}",
        "calls": 3, "seconds": 1.5, "node": "rollout-0",
    }  # fmt: skip
    return Trajectory(described(samples, **known), payload={"question": "?"}, paths=paths, samples=samples)


async def time_views(report: Report, folder: RunFolder, repeats: int) -> None:
    """Each view from a dashboard that has read nothing yet, then from one that has."""
    headers = {"authorization": f"Bearer {folder.token_of('reader')}"}
    for name, query in VIEWS.items():
        dashboard = Dashboard(watch([folder.root]))
        base = await dashboard.start()
        path = f"/api/runs/{folder.root.name}/{name}"
        taken, first = [], 0.0
        async with httpx.AsyncClient(base_url=base, headers=headers, timeout=60.0) as client:
            used = time.process_time()  # opening the client, which reads certificates, is not the dashboard's
            for _ in range(repeats + 1):
                begun = time.perf_counter()
                reply = await client.get(path, params=query)
                taken.append((time.perf_counter() - begun) * 1000)
                assert reply.status_code == 200, f"{name}: {reply.text}"
                first = (time.process_time() - used) * 1000 if len(taken) == 1 else first
        await dashboard.stop()
        report.add(f"{name}, as the first of all, processor time", first, None, unit="ms", limit=LIMIT)
        report.add(f"{name}, then", statistics.median(taken[1:]), None, unit="ms", limit=LIMIT)


# ---------------------------------------------------------------- throughput


@contextmanager
def running(parent: Path) -> Iterator[tuple[RunFolder, str]]:
    """A run of the quickstart that goes on for as long as it is looked at, and its dashboard's address."""
    command = [sys.executable, "-m", "rillflow", "run", "quickstart", "--runs", str(parent)]
    changes = ["trainer.steps=100000", "trainer.lr=1e-12", "evaluation.every=0", "evaluation.target=null"]
    with open(parent / "run.log", "wb") as output:
        process = subprocess.Popen([*command, *changes], stdout=output, stderr=output, cwd=parent)
    try:
        yield started(parent, process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def started(parent: Path, process: subprocess.Popen[bytes]) -> tuple[RunFolder, str]:
    """The run's folder, once it has made its first step."""
    deadline = time.monotonic() + _DEADLINE
    while time.monotonic() < deadline and process.poll() is None:
        for path in parent.glob("quickstart-*/metrics.jsonl"):
            folder = RunFolder.open(path.parent)
            base = json.loads((folder.root / "endpoints" / "dashboard.json").read_text())["url"]
            return folder, base
        time.sleep(0.5)
    raise SystemExit(f"the run did not start: see {parent / 'run.log'}\n{(parent / 'run.log').read_text()[-2000:]}")


async def completed(folder: RunFolder) -> int:
    """Episodes that have ended well so far."""
    client = DataflowClient(Client(str(folder.endpoint("dataflow")), folder.token_of("reader"), peer="dataflow"))
    try:
        return sum(node.completed for node in (await client.nodes()).nodes)
    finally:
        await client.close()


class Page:
    """Asks for what an open page asks for."""

    def __init__(self, folder: RunFolder, base: str) -> None:
        headers = {"authorization": f"Bearer {folder.token_of('reader')}"}
        self._client = httpx.AsyncClient(base_url=base, headers=headers, timeout=60.0)
        self._views = [
            f"/api/runs/{folder.root.name}/{view}" for view in ("overview?axis=step&width=400", "advisories?")
        ]
        self._tags: dict[str, str] = {}
        self.updates = 0

    async def look(self) -> None:
        """Update the page until cancelled."""
        quiet, session = 0, -SESSION
        async with self._client:
            while True:
                begun = time.monotonic()
                if begun - session >= SESSION:
                    session = begun
                    (await self._client.get("/api/session")).raise_for_status()
                changed = [await self._changed(path) for path in self._views]
                quiet = 0 if any(changed) else quiet + 1
                self.updates += 1
                await asyncio.sleep(min(max(POLL * 2**quiet, PAUSE * (time.monotonic() - begun)), SLOWEST))

    async def _changed(self, path: str) -> bool:
        known = {"if-none-match": self._tags[path]} if path in self._tags else {}
        reply = await self._client.get(path, headers=known)
        if reply.status_code != 304:
            reply.raise_for_status()
            self._tags[path] = reply.headers["etag"]
        return reply.status_code != 304


class Turn(msgspec.Struct):
    """The measurements of one turn: episodes a second, and the updates and processor time of an open dashboard."""

    episodes: float
    updates: float = 0.0  # a second
    processor: float = 0.0  # milliseconds a second, of the dashboard's process


async def turn(folder: RunFolder, base: str, seconds: float, *, opened: bool) -> Turn:
    page = Page(folder, base)
    looking = asyncio.create_task(page.look()) if opened else None
    await asyncio.sleep(5.0)  # its process starts and reads what there is, or comes to rest
    dashboard = process_of(folder, "dashboard") if opened else None
    before, begun, used, updates = await completed(folder), time.monotonic(), processor(dashboard), page.updates
    await asyncio.sleep(seconds)
    taken = time.monotonic() - begun
    made = Turn(
        episodes=(await completed(folder) - before) / taken,
        updates=(page.updates - updates) / taken,
        processor=(processor(dashboard) - used) / taken,
    )
    if looking is not None:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    return made


def process_of(folder: RunFolder, role: str) -> psutil.Process:
    """The process that plays this role for the run, by its command line: … ROLE FOLDER …"""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(folder.root) in words and words[words.index(str(folder.root)) - 1] == role:
            return process
    raise SystemExit(f"no process of {folder.root} is its {role}")


def processor(process: psutil.Process | None) -> float:
    """Milliseconds of processor time so far."""
    return 1000 * sum(process.cpu_times()[:2]) if process is not None else 0.0


async def time_asking(folder: RunFolder, seconds: float) -> float:
    """Milliseconds of the dataflow service's processor time for what one update of the page asks of it."""
    service = process_of(folder, "dataflow")
    client = DataflowClient(Client(str(folder.endpoint("dataflow")), folder.token_of("reader"), peer="dataflow"))
    used: list[float] = []
    try:
        for asks in (0, ASKS):
            before, begun = processor(service), time.monotonic()
            for _ in range(asks):
                await client.status()
                await client.nodes()
                await client.balance()
                await asyncio.sleep(seconds / ASKS / 2)
            await asyncio.sleep(max(begun + seconds - time.monotonic(), 0.0))
            used.append((processor(service) - before) / (time.monotonic() - begun) * seconds)
    finally:
        await client.close()
    return max(used[1] - used[0], 0.0) / ASKS


async def time_run(report: Report, folder: RunFolder, base: str, *, repeats: int, seconds: float) -> None:
    """Both ways in turns, each pair in the other order than the one before."""
    turns: dict[bool, list[Turn]] = {True: [], False: []}
    await turn(folder, base, 5.0, opened=True)
    for repeat in range(repeats):
        for opened in (True, False) if repeat % 2 else (False, True):
            turns[opened].append(await turn(folder, base, seconds, opened=opened))
    own = statistics.median(one.processor for one in turns[True])
    updates = statistics.median(one.updates for one in turns[True])
    asking = await time_asking(folder, 2 * seconds) * updates
    report.add("updates of an open page", updates, None, unit="1/s")
    report.add("processor time of the dashboard's process", own, None, unit="ms/s")
    report.add("processor time of the dataflow service for it", asking, None, unit="ms/s")
    report.add("processor time of an open page", own + asking, None, unit="ms/s", limit=COST)
    ours, without = (statistics.median(one.episodes for one in turns[opened]) for opened in (True, False))
    report.add("episodes a second with the dashboard open, to closed", ours, without, unit="1/s", goal=SHARE)


def main() -> None:
    given = parser(__doc__ or "").parse_args()
    report = Report("dashboard")
    with tempfile.TemporaryDirectory(prefix="dashboard-") as name:
        made, runs = Path(name) / "made", Path(name) / "runs"
        runs.mkdir()
        asyncio.run(time_views(report, make_run(made), repeats=5 if given.quick else 20))
        with running(runs) as (folder, base):
            seconds, repeats = (10.0, 4) if given.quick else (30.0, 10)
            asyncio.run(time_run(report, folder, base, repeats=repeats, seconds=seconds))
    report.finish(given.json)


if __name__ == "__main__":
    main()
