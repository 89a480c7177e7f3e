"""Kept episodes of a run can be found and read, and never take more than their bound."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rillflow
from kept_trajectories import token_path, trajectory
from rillflow.errors import CorruptData, DataError, DiskFull
from rillflow.storage.trajectories import LEAST_BYTES, Bounds, TrajectoryStore, to_remove
from rillflow.storage.trajectory_format import FILE, KINDS, Trajectory, decode_body, described, encode_body
from small_disk import mount, small_disk

WIDE = Bounds(bytes=64 << 20, most=dict.fromkeys(KINDS, 20_000))


def keep(folder: Path, *trajectories: Trajectory, bounds: Bounds = WIDE) -> rillflow.storage.trajectories.Trajectories:
    store = TrajectoryStore(folder / FILE, bounds)
    for one in trajectories:
        assert store.add(one)
    store.close()
    return rillflow.trajectories(folder)


def names(found: rillflow.storage.trajectories.Trajectories) -> list[str]:
    return [one.info.id for one in found]


# ------------------------------------------------------------ one trajectory


def test_a_trajectory_comes_back_as_it_was(tmp_path: Path) -> None:
    advantages = np.array([np.nan, np.nan, 1, 1, -1, 1], np.float32)
    path = token_path(
        advantages=advantages, trainer_logprobs=np.full(6, -0.5, np.float32), role="solver", fork="history"
    )
    made = replace(trajectory(samples=[path]), error="Traceback …")
    found = keep(tmp_path, made).get("g0.0")
    assert found.info == made.info
    assert (found.payload, found.paths, found.rewards, found.error) == (
        made.payload,
        made.paths,
        made.rewards,
        made.error,
    )
    (got,) = found.samples
    assert (got.policy, got.role, got.reward, got.fork, got.path) == ("policy", "solver", 1.0, "history", 0)
    for name in ("tokens", "mask", "logprobs", "versions", "advantages", "trainer_logprobs"):
        np.testing.assert_array_equal(getattr(got, name), getattr(path, name))


def test_the_info_says_what_the_samples_hold() -> None:
    first = token_path(10, prompt=4, policy="solver", role="a", advantages=np.full(10, 2.0, np.float32))
    first = replace(first, trainer_logprobs=first.logprobs - np.float32(0.25))
    second = token_path(5, prompt=4, policy="critic", role="b", fork="history", versions=np.full(5, 7, np.int32))
    info = described([first, second], id="x", time=0.0, lane="train", status="done", kept="best")
    assert (info.policy, info.policies, info.roles) == ("solver", ["solver", "critic"], ["a", "b"])
    assert (info.tokens, info.trained, info.samples, info.forks) == (15, 7, 2, 1)
    assert (info.oldest, info.newest, info.advantage) == (3, 7, 2.0)
    assert info.gap == pytest.approx(0.25)
    empty = described([], id="x", time=0.0, lane="train", status="failed", kept="failure")
    assert (empty.policy, empty.oldest, empty.advantage, empty.gap) == ("", None, None, None)


def test_the_conversation_of_a_fork_begins_with_what_it_shares() -> None:
    def path(messages: list[str], follows: int | None = None, shared: int = 0, policy: str = "a") -> dict[str, object]:
        return {
            "policy": policy,
            "follows": follows,
            "shared": shared,
            "messages": [{"role": "user", "content": text} for text in messages],
        }

    paths = [path(["1", "2", "3"]), path(["x"], policy="b"), path(["3b"], 0, 2), path(["4"], 1, 3)]
    made = replace(trajectory(), paths=paths)
    assert [message["content"] for message in made.messages()] == ["1", "2", "3b", "4"]
    assert [message["content"] for message in made.messages(1)] == ["x"]
    assert replace(made, paths=[]).messages() == []


@given(st.binary(max_size=64), st.integers(0, 400))
def test_a_damaged_body_is_refused(noise: bytes, at: int) -> None:
    made = trajectory()
    body = encode_body(made)
    damaged = body[: at % len(body)] + noise
    with contextlib.suppress(CorruptData):  # an error of another kind does not count
        decode_body(made.info, damaged)


# ------------------------------------------------------------ finding


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten thousand trajectories of a hundred steps."""
    folder = tmp_path_factory.mktemp("run")
    bounds = Bounds(bytes=256 << 20, most=dict.fromkeys(KINDS, 20_000))
    store = TrajectoryStore(folder / FILE, bounds)
    made = trajectory(samples=[token_path(policy="solver", role="writer")])
    body = encode_body(made)
    store._connection.execute("BEGIN")
    for n in range(10_000):
        info = msgspec.structs.replace(
            made.info,
            id=f"g{n // 8}.{n % 8}",
            time=float(n),
            step=n // 100,
            reward=None if n % 10 == 9 else (n % 10) / 10,
            status="failed" if n % 10 == 9 else "done",
            kept=KINDS[n % 5],
            policies=["solver", "critic"] if n % 2 else ["solver"],
            roles=["writer"] if n % 4 else ["writer", "editor"],
            oldest=n // 200,
            newest=n // 100,
            prompt=f"p{n // 8}",
        )
        store._insert(info, body)
    store._connection.execute("COMMIT")
    store.close()
    return folder


def test_each_filter(many: Path) -> None:
    def count(**filters: object) -> int:
        return len(rillflow.trajectories(many, **filters))  # type: ignore[arg-type]

    assert count() == 10_000
    assert count(step=7) == 100
    assert count(step=(7, 8)) == 200
    assert count(step=(98, None)) == 200
    assert count(reward=(0.75, 1.0)) == 1000
    assert count(reward=(None, 0.05)) == 1000
    assert count(version=10) == len([n for n in range(10_000) if n // 200 <= 10 <= n // 100])
    assert count(status="failed") == 1000
    assert count(kept=["best", "worst"]) == 4000
    assert count(policy="critic") == 5000
    assert count(policy=["critic", "solver"]) == 10_000
    assert count(role="editor") == 2500
    assert count(prompt="p3", status="done") == 7
    assert count(lane="evaluation") == 0


def test_pages_in_any_order(many: Path) -> None:
    found = rillflow.trajectories(many, step=(10, 20))
    assert [info.time for info in found.infos(limit=3)] == [2099.0, 2098.0, 2097.0]
    assert [info.time for info in found.infos("time", offset=5, limit=2)] == [1005.0, 1006.0]
    assert [info.reward for info in found.infos("-reward", limit=2)] == [0.8, 0.8]
    assert found.infos("reward", offset=1099, limit=1)[0].reward is None
    assert len(found.infos("group", limit=10_000)) == 1100
    with pytest.raises(DataError, match="not ordered by"):
        found.infos("size")
    with pytest.raises(DataError, match="not ordered by"):
        found.infos("-; DROP TABLE trajectories")


@pytest.mark.parametrize("order", ["-time", "time", "step", "-reward"])
def test_a_page_of_ten_thousand_is_read_by_an_index(many: Path, order: str) -> None:
    name, way = order.removeprefix("-"), "DESC" if order.startswith("-") else "ASC"
    with sqlite3.connect(many / FILE) as database:
        plan = database.execute(
            f"EXPLAIN QUERY PLAN SELECT * FROM trajectories ORDER BY {name} {way} NULLS LAST, n {way} LIMIT 100"
        ).fetchall()
    described_plan = " ".join(row[3] for row in plan)
    assert f"USING INDEX trajectories_{name}" in described_plan or name == "step", described_plan


def test_iterating_reads_one_body_at_a_time(many: Path) -> None:
    found = iter(rillflow.trajectories(many, step=3, kept="best"))
    assert next(found).info.step == 3
    assert len(list(found)) == 19


def test_a_run_that_has_kept_nothing_yet(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run folder"):
        rillflow.trajectories(tmp_path)
    (tmp_path / "recipe.yaml").touch()
    found = rillflow.trajectories(tmp_path)
    assert (len(found), list(found), found.infos()) == (0, [], [])
    (tmp_path / FILE).touch()
    assert (len(found), list(found), found.infos()) == (0, [], [])
    (tmp_path / FILE).unlink()
    keep(tmp_path, trajectory())
    assert names(found) == ["g0.0"]
    with pytest.raises(DataError, match=r"no trajectory 'g1\.0'"):
        found.get("g1.0")


def test_the_same_id_again_replaces(tmp_path: Path) -> None:
    found = keep(tmp_path, trajectory(), trajectory(kept="best", time=2.0))
    assert [(info.kept, info.time) for info in found.infos()] == [("best", 2.0)]


# ------------------------------------------------------------ bounds


@settings(max_examples=12, deadline=None)
@given(
    most=st.dictionaries(st.sampled_from(KINDS), st.integers(0, 20), max_size=5),
    added=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 12_000), st.integers(0, 3)), max_size=40),
)
def test_no_bound_is_ever_passed(most, added, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("bounds")
    (folder / "recipe.yaml").touch()
    store = TrajectoryStore(folder / FILE, Bounds(bytes=LEAST_BYTES, most=most))
    time = 0.0
    for n, (kind, tokens, pause) in enumerate(added):
        time += pause
        kept = store.add(trajectory(f"g{n}.0", kept=kind, time=time, samples=[token_path(tokens, seed=n)]))
        infos = rillflow.trajectories(folder).infos(limit=1000)
        assert kept == (f"g{n}.0" in [info.id for info in infos])
        assert kept <= (most.get(kind, 0) > 0)
        counted = Counter(info.kept for info in infos)
        assert all(count <= most.get(each, 0) for each, count in counted.items())
        assert (folder / FILE).stat().st_size <= LEAST_BYTES
    store.close()
    assert (folder / FILE).stat().st_size <= LEAST_BYTES
    assert sum(1 for _ in rillflow.trajectories(folder)) == len(rillflow.trajectories(folder))


def test_what_stays_is_spread_over_the_run(tmp_path: Path) -> None:
    bounds = Bounds(bytes=64 << 20, most={"sample": 40, "best": 1})
    made = [trajectory(f"g{n}.0", time=float(n), step=n) for n in range(1000)]
    found = keep(tmp_path, *made, bounds=bounds)
    steps = [info.step for info in found.infos("time")]
    assert len(steps) == 40
    assert steps[-10:] == list(range(990, 1000))
    assert steps[0] == 0
    gaps = np.diff(np.array(steps[:31]))
    assert gaps.max() <= 4 * gaps.mean()


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.data())
def test_to_remove_takes_as_many_as_asked_for(times: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(times)))
    removed = to_remove(np.array(sorted(times)), count)
    assert len(set(removed)) == count
    newest = (len(times) - count) // 4
    assert all(0 <= place < len(times) - newest for place in removed)


def test_narrower_bounds_hold_from_the_next_start(tmp_path: Path) -> None:
    made = [trajectory(f"g{n}.0", time=float(n), samples=[token_path(40_000, seed=n)]) for n in range(40)]
    keep(tmp_path, *made)
    assert (tmp_path / FILE).stat().st_size > 4 << 20
    found = keep(tmp_path, bounds=Bounds(bytes=2 << 20, most={"sample": 30}))
    assert 0 < len(found) <= 30
    assert (tmp_path / FILE).stat().st_size <= 2 << 20
    assert len(keep(tmp_path, bounds=Bounds(bytes=2 << 20, most={}))) == 0


def test_one_that_would_fill_the_file_is_not_kept(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / FILE, Bounds(bytes=LEAST_BYTES, most={"sample": 10}))
    assert store.add(trajectory("small"))
    assert not store.add(trajectory("large", samples=[token_path(200_000)]))
    assert names(rillflow.trajectories(tmp_path)) == ["small"]
    store.close()


# ------------------------------------------------------------ faults

WRITER = """
import sys
from pathlib import Path
from kept_trajectories import token_path, trajectory
from rillflow.storage.trajectories import FILE, Bounds, TrajectoryStore
store = TrajectoryStore(Path(sys.argv[1]) / FILE, Bounds(bytes=2 << 20, most={"sample": 100}))
for n in range(10**9):
    store.add(trajectory(f"g{n}.0", time=float(n), samples=[token_path(5000, seed=n)]))
    print(n, flush=True)
"""


@pytest.mark.parametrize("lines", [3, 200])
def test_kill_9_in_the_middle_of_writing(tmp_path: Path, lines: int) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        told = [int(process.stdout.readline()) for _ in range(lines)]
        process.send_signal(signal.SIGKILL)
        told += [int(line) for line in process.stdout.read().splitlines()]
    found = names(rillflow.trajectories(tmp_path))
    assert f"g{told[-1]}.0" in found
    assert len(found) <= 100
    for one in rillflow.trajectories(tmp_path):
        assert len(one.samples[0].tokens) == 5000
    assert "after" in names(keep(tmp_path, trajectory("after", time=1e9)))


@pytest.mark.needs("mounts")
def test_a_full_disk_loses_one_trajectory_and_no_other(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        store = TrajectoryStore(disk / FILE, WIDE)
        assert store.add(trajectory("first", samples=[token_path(20_000)]))
        (disk / "ballast").write_bytes(bytes(1_200_000))
        with pytest.raises(DiskFull):
            deque((store.add(trajectory(f"g{n}.0", samples=[token_path(20_000, seed=n)])) for n in range(100)), 0)
        before = names(rillflow.trajectories(disk))
        assert "first" in before
        (disk / "ballast").unlink()
        assert store.add(trajectory("last"))
        assert names(rillflow.trajectories(disk)) == [*before, "last"]
        store.close()


@pytest.mark.needs("mounts")
def test_a_disk_that_nobody_can_write_is_read(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        keep(disk, trajectory())
        mount("-o", "remount,ro", str(disk))
        assert names(rillflow.trajectories(disk)) == ["g0.0"]


def test_a_file_of_another_kind_or_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    with pytest.raises(CorruptData, match="is damaged"):
        TrajectoryStore(tmp_path / FILE, WIDE)
    with pytest.raises(CorruptData, match="is damaged"):
        len(rillflow.trajectories(tmp_path))
    (tmp_path / FILE).unlink()
    with sqlite3.connect(tmp_path / FILE) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(CorruptData, match="format 99"):
        TrajectoryStore(tmp_path / FILE, WIDE)
