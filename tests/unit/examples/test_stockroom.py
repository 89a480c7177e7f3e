"""The stockroom task and the tiny policy that the quickstart trains on it."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage
from safetensors import safe_open

from rillflow.examples import stockroom
from rillflow.examples.stockroom import play
from tiny_policy import tiny_tokenizer

TINY = Path(stockroom.__file__).parents[1] / "assets" / "tiny"


@pytest.fixture(scope="module")
def payload() -> dict[str, Any]:
    return next(stockroom.prompts("train", 1, seed=3))["payload"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def render(tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None, generate: bool = False) -> str:
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=generate)


def conversation(question: str = "How many pens are in the blue box?") -> list[dict[str, Any]]:
    arguments = json.dumps({"box": "blue", "item": "pens"})
    call = {"id": "a", "type": "function", "function": {"name": "count", "arguments": arguments}}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "42"},
        {"role": "assistant", "content": "There are 42."},
        {"role": "user", "content": "  Sure?\n"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "a", "content": "42"},
        {"role": "tool", "tool_call_id": "a", "content": ""},
    ]


# The prompts


def test_prompts_repeat_with_their_seed_and_survive_json() -> None:
    first = list(stockroom.prompts("train", 20, seed=1))
    assert first == list(stockroom.prompts("train", 20, seed=1))
    assert first != list(stockroom.prompts("train", 20, seed=2))
    assert json.loads(json.dumps(first)) == first
    assert len({prompt["id"] for prompt in first}) == 20


def test_the_question_names_box_and_item_but_not_the_count() -> None:
    for prompt in stockroom.prompts("train", 50, seed=1):
        payload = prompt["payload"]
        assert payload["box"] in payload["question"]
        assert payload["item"] in payload["question"]
        assert not any(character.isdigit() for character in payload["question"])


def test_splits_are_disjoint_but_share_their_words() -> None:
    train, heldout = set(stockroom.pairs("train")), set(stockroom.pairs("heldout"))
    assert not train & heldout
    assert len(train | heldout) == len(stockroom.BOXES) * len(stockroom.ITEMS)
    for split in (train, heldout):
        assert {box for box, _ in split} == set(stockroom.BOXES)
        assert {item for _, item in split} == set(stockroom.ITEMS)


def test_prompts_stay_within_their_split() -> None:
    for split in ("train", "heldout"):
        asked = {(p["payload"]["box"], p["payload"]["item"]) for p in stockroom.prompts(split, 200, seed=0)}
        assert asked <= set(stockroom.pairs(split))


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown split 'test'"):
        next(stockroom.prompts("test", 1, seed=0))


def test_only_one_count_of_a_stock_is_right(payload: dict[str, Any]) -> None:
    counts = [number for shelf in payload["stock"].values() for number in shelf.values()]
    assert len(counts) == len(set(counts))


# The tool


def test_count_reads_text_and_mappings(payload: dict[str, Any]) -> None:
    expected = str(payload["stock"]["blue"]["pens"])
    assert stockroom.count(payload, {"box": "blue", "item": "pens"}) == expected
    assert stockroom.count(payload, '{"box": "blue", "item": "pens"}') == expected


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("", "not JSON"),
        ('{"box": "blue"', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("7" * 10_000, "not JSON"),
        ("[1]", "not an object"),
        ("null", "not an object"),
        ("{}", "must be strings"),
        ('{"box": ["blue"], "item": "pens"}', "must be strings"),
        ('{"box": "blue", "item": 7}', "must be strings"),
        ('{"box": "violet", "item": "pens"}', "no violet box"),
        ('{"box": "blue", "item": "cats"}', "no cats in the blue box"),
    ],
)
def test_bad_arguments_are_answered_not_raised(payload: dict[str, Any], arguments: str, complaint: str) -> None:
    answer = stockroom.count(payload, arguments)
    assert answer.startswith("error: ")
    assert complaint in answer


# The reward


def test_reward_is_for_the_last_number(payload: dict[str, Any]) -> None:
    right = payload["stock"][payload["box"]][payload["item"]]
    wrong = right + 1
    for answer in (f"{right}", f"There are {right}.", f"{wrong}? No: {right}"):
        assert stockroom.reward(payload, answer) == 1.0
    for answer in (None, "", "many", f"{wrong}", f"{right} or {wrong}", f"1{right}", f"-{right}", "9" * 9999):
        assert stockroom.reward(payload, answer) == 0.0


# The workflow


class ScriptedClient:
    """Has the parts of the OpenAI client that the workflow uses, with scripted answers."""

    def __init__(self, turns: list[dict[str, Any]]) -> None:
        self.turns = iter(turns)
        self.seen: list[list[dict[str, Any]]] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    async def create(self, messages: list[dict[str, Any]], **_: Any) -> Any:
        self.seen.append(list(messages))
        message = ChatCompletionMessage.model_validate({"role": "assistant", **next(self.turns)})
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


def tool_turn(name: str) -> dict[str, Any]:
    arguments = json.dumps({"box": "blue", "item": "pens"})
    call = {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"content": None, "tool_calls": [call]}


async def run_workflow(payload: dict[str, Any], turns: list[dict[str, Any]]) -> tuple[str | None, ScriptedClient]:
    client = ScriptedClient(turns)
    episode: Any = SimpleNamespace(client=client, model="tiny", payload=payload)
    return await play(episode), client


async def test_the_workflow_hands_the_tools_answer_to_the_model(payload: dict[str, Any]) -> None:
    answer, client = await run_workflow(payload, [tool_turn("count"), {"content": "42"}])
    assert answer == "42"
    first, second = client.seen
    assert first == [{"role": "user", "content": payload["question"]}]
    assert second[1] == {"role": "assistant", "tool_calls": tool_turn("count")["tool_calls"]}
    assert second[2] == {"role": "tool", "tool_call_id": "a", "content": str(payload["stock"]["blue"]["pens"])}


async def test_the_workflow_gives_up_after_three_turns(payload: dict[str, Any]) -> None:
    answer, client = await run_workflow(payload, [tool_turn("count")] * 3)
    assert answer is None
    assert len(client.seen) == 3


async def test_the_workflow_reports_an_unknown_tool_to_the_model(payload: dict[str, Any]) -> None:
    _, client = await run_workflow(payload, [tool_turn("sum"), {"content": "42"}])
    assert client.seen[1][-1]["content"] == "error: no such tool"


# The tiny policy's tokenizer and chat template


def test_rendering_is_append_only(tokenizer: Any) -> None:
    messages = conversation()
    for tools in (None, stockroom.TOOLS):
        texts = [render(tokenizer, messages[:length], tools) for length in range(1, len(messages) + 1)]
        for shorter, longer in pairwise(texts):
            assert longer.startswith(shorter)
        tokens = [tokenizer.encode(text) for text in texts]
        for before, after in pairwise(tokens):
            assert after[: len(before)] == before


def test_an_assistant_turn_continues_its_generation_prompt(tokenizer: Any) -> None:
    messages = conversation()
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = render(tokenizer, messages[:index], stockroom.TOOLS, generate=True)
            assert render(tokenizer, messages[: index + 1], stockroom.TOOLS).startswith(prompt)


def test_tool_calls_render_as_the_model_writes_them(tokenizer: Any) -> None:
    written = '<tool_call>{"name": "count", "arguments": {"box": "blue", "item": "pens"}}</tool_call><|im_end|>'
    messages = conversation()[:3]
    assert render(tokenizer, messages, stockroom.TOOLS).endswith(f"<|im_start|>assistant\n{written}\n")
    function = messages[-1]["tool_calls"][0]["function"]
    parsed = {**function, "arguments": json.loads(function["arguments"])}
    messages[-1] = {**messages[-1], "tool_calls": [{"type": "function", "function": parsed}]}
    assert render(tokenizer, messages, stockroom.TOOLS).endswith(f"<|im_start|>assistant\n{written}\n")


def test_plain_chat_renders_without_tools(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "Say a "}, {"type": "text", "text": "colour."}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert render(tokenizer, messages, generate=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay a colour.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_episodes_are_short(tokenizer: Any) -> None:
    for box, item in stockroom.pairs("train") + stockroom.pairs("heldout"):
        for question in stockroom.QUESTIONS:
            user = {"role": "user", "content": question.format(box=box, item=item)}
            prompt = render(tokenizer, [user], stockroom.TOOLS, generate=True)
            assert len(tokenizer.encode(prompt)) <= 30
        arguments = json.dumps({"box": box, "item": item})
        turn = f'<tool_call>{{"name": "count", "arguments": {arguments}}}</tool_call><|im_end|>'
        assert len(tokenizer.encode(turn)) <= 14


def test_any_text_round_trips(tokenizer: Any) -> None:
    generator = random.Random(0)
    texts = [
        "",
        " ",
        "\n\n",
        'x": "',
        "naïve café 日本語 🙂 \u0000\u200b\ufeff",
        "a\r\n\tb  c",
        "<tool_call>{}</tool_call>",
    ]
    for _ in range(200):
        points = (generator.choice((0x7F, 0x7FF, 0xD7FF, 0x10FFFF)) for _ in range(generator.randrange(1, 40)))
        characters = (chr(generator.randrange(limit + 1)) for limit in points)
        texts.append("".join(c for c in characters if not "\ud800" <= c <= "\udfff"))
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_tool_markup_survives_decoding_without_control_tokens(tokenizer: Any) -> None:
    tokens = tokenizer.encode("<tool_call>{}</tool_call><|im_end|>")
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "<tool_call>{}</tool_call>"
    assert tokens[-1] == tokenizer.eos_token_id


# The tiny policy's weights


def test_the_policy_is_tiny() -> None:
    weights = TINY / "model.safetensors"
    assert weights.stat().st_size <= 4 * 2**20
    with safe_open(weights, framework="numpy") as tensors:
        names = list(tensors.keys())
        parameters = sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    assert parameters <= 2_000_000
