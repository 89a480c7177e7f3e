"""Changes of tags as people write them, and those that are refused."""

from __future__ import annotations

import msgspec
import pytest

from rillflow.config import load_recipe
from rillflow.errors import ConfigError, RunError
from rillflow.resources.placement import parse_tags, retagged
from rillflow.resources.workers import initial_workers


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rollout,train"], {"rollout", "train"}),
        (["train"], {"train"}),
        (["rollout", "train"], {"rollout", "train"}),
        (["none"], set()),
        (["+train"], {"rollout", "train"}),
        (["+train", "-rollout"], {"train"}),
        (["+train,-rollout"], {"train"}),
        (["-rollout"], set()),
    ],
)
def test_tags_are_set_or_changed(words: list[str], expected: set[str]) -> None:
    assert parse_tags(words, {"rollout"}) == expected


@pytest.mark.parametrize("words", [["+train", "rollout"], ["rolout"], ["+"], [""], ["none", "train"], [","]])
def test_what_is_no_tag_is_refused_with_what_to_say(words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tags(words, {"rollout"})
    assert "rollout" in caught.value.hint


def test_the_last_worker_of_a_tag_keeps_it() -> None:
    recipe = load_recipe("quickstart")
    workers = initial_workers(recipe)
    for name, words in (("rollout-0", ["none"]), ("trainer-agent", ["-train", "+rollout"])):
        with pytest.raises(RunError, match=f"{name} cannot have the tags") as caught:
            retagged(recipe, workers, name, words)
        assert caught.value.hint
    changed = retagged(recipe, workers, "trainer-agent", ["+rollout"])
    assert retagged(recipe, changed, "rollout-0", ["none"])[1].tags == frozenset(), "now another one rolls out"


def test_setting_the_tags_of_a_lost_worker_has_it_tried_again() -> None:
    recipe = load_recipe("quickstart", ["rollout.nodes=2"])
    workers = [msgspec.structs.replace(worker, lost=worker.name == "rollout-1") for worker in initial_workers(recipe)]
    again = retagged(recipe, workers, "rollout-1", ["rollout"])
    assert not any(worker.lost for worker in again)
