"""Sources become databuffers; what cannot be used is refused by its row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lessons import Listed, examples_of, fit_recipe, writer

from rillflow.errors import DataError
from rillflow.examples import stockroom
from rillflow.trainer.supervised.examples import read_examples

USER = {"role": "user", "content": "How many?"}
SAID = {"role": "assistant", "content": "17"}


def test_arguments_of_tool_calls_may_be_objects_or_text() -> None:
    def row(arguments: Any) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": "count", "arguments": arguments}}
        return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": []}

    both = examples_of([row({"box": "red"}), row('{"box": "red"}')], "sft")
    assert both.groups[0].rows[0].tokens == both.groups[1].rows[0].tokens


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("sft", {}, "row 1: it has neither messages nor prompt"),
        ("sft", {"prompt": "a"}, "row 1: it has neither messages nor prompt"),
        ("sft", {"messages": [USER, SAID], "prompt": "a"}, "row 1: it has messages and a prompt"),
        ("sft", {"messages": "text"}, r"row 1: Expected `array \| null`, got `str` - at `\$.messages`"),
        ("sft", {"messages": [{"role": "cook", "content": "a"}]}, r"row 1: Invalid enum value 'cook'"),
        ("sft", {"messages": [USER, {"role": "assistant", "content": [{"type": "image"}]}]}, "row 1: only text parts"),
        ("reward", {"prompt": "a", "chosen": "b"}, "row 1: Object missing required field `rejected`"),
        ("reward", {"prompt": "a", "chosen": "b", "rejected": "b"}, "row 1: chosen and rejected are the same"),
        ("reward", {"prompt": "a", "messages": [USER], "chosen": "b", "rejected": "c"}, "row 1: it has both"),
        ("process_reward", {"prompt": "a", "steps": []}, "row 1: it has no steps"),
        ("process_reward", {"prompt": "a", "steps": [{"text": "b", "label": 2}]}, "row 1: Expected `float` <= 1.0"),
        ("process_reward", {"prompt": "a", "steps": [{"text": "b"}]}, "missing required field `label`"),
        ("process_reward", {"prompt": "a", "steps": [{"label": 1}]}, "step 0: 0 of text, messages are given"),
        ("process_reward", {"steps": [{"text": "b", "label": 1}]}, "0 of prompt, text, messages are given"),
    ],
)
def test_rows_of_another_shape_are_refused_by_their_place(task: str, row: dict[str, Any], message: str) -> None:
    good = {
        "sft": {"messages": [USER, SAID], "origin": "ignored"},
        "reward": {"prompt": "a", "chosen": "b", "rejected": "c"},
        "process_reward": {"prompt": "a", "steps": [{"text": "b", "label": 0.5}]},
    }[task]
    with pytest.raises(DataError, match=message) as caught:
        examples_of([good, row], task)
    assert caught.value.message.startswith("rows.jsonl: row 1")
    assert caught.value.hint


def test_rows_that_are_too_long_are_left_out_whole() -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": word} for word in ("c", "c " * 40, "d")]
    examples = examples_of(rows, "reward", longest=20)
    assert (len(examples), examples.left_out) == (2, 1)
    with pytest.raises(DataError, match="more than 1 tokens"):
        examples_of(rows, "reward", longest=1)


def test_databuffers_have_the_rows_of_their_groups() -> None:
    rows = [
        {"prompt": "a", "steps": [{"text": "b", "label": 0.25}, {"text": "cd", "label": 1.0}]},
        {"prompt": "e", "steps": [{"text": "f", "label": 0.5}]},
    ]
    data = examples_of(rows, "process_reward").take([1, 0])
    assert data["member_R"].tolist() == [1, 0]
    assert data["label_N"][data["mask_N"]].tolist() == [0.5, 0.25, 1.0]
    assert len(data["label_N"]) == len(data["tokens_N"]) == data["length_R"].sum()
    first = writer().steps("e", ["f"], None, "\n", "").tokens
    assert data["tokens_N"][: len(first)].tolist() == first


def test_a_share_without_rows_has_the_same_columns() -> None:
    examples = examples_of([{"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5}], "reward")
    some, none = examples.take([0]), examples.take([])
    assert some.names == none.names
    assert len(none) == 0
    assert all(none[name].dtype == some[name].dtype for name in some.names)
    assert some["margin_R"].tolist() == [0.5, 0.5]
    assert some["chosen_R"].tolist() == [True, False]


def test_train_on_last_trains_less() -> None:
    rows = [next(iter(stockroom.demonstrations("train", 1, 0)))["payload"]]
    everything, last = (examples_of(rows, "sft", train_on=how).take([0]) for how in ("all", "last"))
    assert np.array_equal(everything["tokens_N"], last["tokens_N"])
    assert last["mask_N"].sum() < everything["mask_N"].sum()


def test_lessons_say_what_the_stockroom_says() -> None:
    graded = list(stockroom.graded_steps("train", 60, 3))
    assert graded == list(stockroom.graded_steps("train", 60, 3))
    prompts = [prompt["payload"] for prompt in stockroom.prompts("train", 60, 3)]
    for prompt, row in zip(prompts, graded, strict=True):
        answer = row["payload"]["steps"][-1]
        assert answer["label"] == stockroom.reward(prompt, answer["messages"][0]["content"])
    counts = {len(row["payload"]["steps"]) for row in graded}
    assert counts == {1, 2}
    assert (
        len(read_examples(Listed([row["payload"] for row in graded]), "", fit_recipe("process_reward"), writer(), 512))
        == 60
    )


def test_rejected_plays_are_wrong() -> None:
    prompts = stockroom.prompts("heldout", 40, 5)
    for prompt, row in zip(prompts, stockroom.comparisons("heldout", 40, 5), strict=True):
        chosen, rejected = (row["payload"][name][-1]["content"] for name in ("chosen", "rejected"))
        assert stockroom.reward(prompt["payload"], chosen) == 1.0
        assert stockroom.reward(prompt["payload"], rejected) == 0.0
