"""The workers of a run: made from a recipe, kept in a file that people may edit and several processes change."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rillflow.config import load_recipe
from rillflow.errors import CorruptData, RunError
from rillflow.resources.workers import Worker, WorkersFile, find, initial_workers
from rillflow.storage.files import locked


def named(workers: list[Worker]) -> dict[str, str]:
    return {worker.name: ",".join(sorted(worker.tags)) for worker in workers}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.ranks=2", "rollout.nodes=2"], {
            "trainer-agent-rank0": "train", "trainer-agent-rank1": "train", "rollout-0": "rollout",
            "rollout-1": "rollout",
        }),
        (["runtime.mode=colocated"], {"trainer-agent": "rollout,train"}),
        (["runtime.mode=multiplexed"], {"trainer-agent": "rollout,train", "rollout-0": "rollout"}),
        (["resources.workers=[{tags: [rollout]}, {tags: [train], count: 2}, {tags: [rollout, train]}]"], {
            "rollout-0": "rollout", "trainer-agent-rank0": "train", "trainer-agent-rank1": "train",
            "trainer-agent-rank2": "rollout,train",
        }),
    ],
)  # fmt: skip
def test_workers_by_one_word_or_by_their_tags(overrides: list[str], expected: dict[str, str]) -> None:
    assert named(initial_workers(load_recipe("quickstart", overrides))) == expected


def test_every_policy_has_its_own() -> None:
    recipe = load_recipe("quickstart")
    two = recipe.model_copy(update={"policies": {name: recipe.policies["agent"] for name in ("solver", "checker")}})
    workers = initial_workers(two)
    assert named(workers) == {"trainer-solver": "train", "trainer-checker": "train", "rollout-0": "rollout"}
    assert [worker.policy for worker in workers] == ["solver", "checker", "solver"]


@pytest.fixture
def file(tmp_path: Path) -> WorkersFile:
    file = WorkersFile(tmp_path)
    file.prepare(load_recipe("quickstart"))
    return file


def test_what_was_changed_stays_over_a_resume_and_the_lost_are_tried_again(file: WorkersFile) -> None:
    both = frozenset({"rollout", "train"})
    file.change(lambda workers: [msgspec.structs.replace(worker, tags=both, lost=True) for worker in workers])
    again = file.prepare(load_recipe("quickstart"))
    assert [(worker.tags, worker.lost) for worker in again] == [(both, False)] * 2
    assert file.read() == again


def test_a_recipe_that_was_changed_wins_over_what_was_left(file: WorkersFile) -> None:
    file.change(lambda workers: [msgspec.structs.replace(worker, lost=True) for worker in workers])
    more = load_recipe("quickstart", ["rollout.nodes=3"])
    assert file.prepare(more) == file.read() == initial_workers(more)


def test_a_change_that_fails_changes_nothing(file: WorkersFile) -> None:
    before, stamp = file.read(), file.stamp()

    def fails(workers: list[Worker]) -> list[Worker]:
        raise RunError("no")

    with pytest.raises(RunError, match="no"):
        file.change(fails)
    assert file.change(lambda workers: workers) == before
    assert file.stamp() == stamp, "nor does one that changes nothing"


def test_no_change_is_lost_when_many_change_at_once(file: WorkersFile) -> None:
    def add(number: int) -> None:
        extra = Worker(name=f"extra-{number}", tags=frozenset({"rollout"}), policy="agent")
        file.change(lambda workers: [*workers, extra])

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(file.read()) == 2 + 8


def test_a_lock_that_is_not_let_go_of_is_an_error(file: WorkersFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rillflow.resources.workers._LOCK_WAIT", 0.1)
    with locked(file.path.parent / ".lock-workers"), pytest.raises(RunError, match="another process has held"):
        file.change(lambda workers: workers)


def edited(file: WorkersFile, **changes: Any) -> None:
    """The first worker, as a person may have left it."""
    content = json.loads(file.path.read_text())
    content["workers"][0] |= changes
    file.path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tags": ["rolout"]}, "rolout"),
        ({"tags": "train"}, "Expected `array`"),
        ({"name": "rollout-0"}, "names rollout-0 twice"),
        ({"name": "../up"}, "is not a name"),
        ({"tflops": -1.0}, "TFLOP/s"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_file_with_a_mistake_says_where(file: WorkersFile, changes: dict[str, Any], match: str) -> None:
    edited(file, **changes)
    with pytest.raises(RunError, match=match) as caught:
        file.read()
    assert caught.value.hint


def test_a_file_that_is_torn_newer_or_not_there_is_told_apart(file: WorkersFile) -> None:
    file.path.write_text(json.dumps({"format": 9, "workers": [], "recipe": []}))
    with pytest.raises(RunError, match="format 9"):
        file.read()
    file.path.write_text("{")
    with pytest.raises(CorruptData):
        file.read()
    file.path.unlink()
    with pytest.raises(RunError, match="not there"):
        file.read()
    assert file.stamp() is None


def test_a_worker_that_is_not_there_is_named_with_those_that_are(file: WorkersFile) -> None:
    with pytest.raises(RunError, match="unknown worker 'rollout-9'") as caught:
        find(file.read(), "rollout-9")
    assert "rollout-0" in caught.value.hint
