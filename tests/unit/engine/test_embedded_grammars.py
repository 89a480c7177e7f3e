"""Sampling under a grammar: only what it accepts, from the right distribution, across every cut."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rillflow.engine.embedded import sampling
from rillflow.engine.embedded.forward import Reading, logprob
from rillflow.engine.requests import Progress
from rillflow.errors import BadRequest, EngineError, EngineLost
from rillflow.gateway.grammars import of_choices, of_lark, of_regex, of_schema
from rillflow.types import Chunk, Grammar
from rillflow.weights.models import load_policy_model, load_tokenizer, pick_device
from tiny_policy import tiny_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "thought": {"type": "string", "maxLength": 20},
        "tool": {"enum": ["search", "python"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["thought", "tool", "count"],
}
JSON = of_schema(SCHEMA, "schema")
END = 2  # <|im_end|> of the tiny model
PLAIN = {"max_tokens": 80, "stop_tokens": (END,)}


def tiny() -> Any:
    return load_policy_model("tiny", "fp32", pick_device("cpu"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> list[int]:
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    return list(tokenizer.encode(text, add_special_tokens=False))


def constrained(kit: Any, **settings: Any) -> Any:
    return kit.running(tiny(), tokenizer=partial(load_tokenizer, "tiny"), context=256, **settings)


def text_of(tokenizer: Any, answer: Any) -> str:
    assert answer.finish == "stop"
    assert answer.tokens[-1] == END
    return str(tokenizer.decode(answer.tokens[:-1]))


def fits(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["thought", "tool", "count"]
    assert len(value["thought"]) <= 20
    assert value["tool"] in ("search", "python")
    assert 0 <= value["count"] <= 99
    assert text == json.dumps(value, ensure_ascii=False), "spaced as Python writes it"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 1.7, "top_p": 0.9, "top_k": 50}])
async def test_every_answer_is_of_the_schema(kit: Any, tokenizer: Any, prompt: list[int], sampling: Any) -> None:
    async with constrained(kit) as engine:
        asked = [kit.ask(engine, prompt, seed=seed, grammar=JSON, **PLAIN, **sampling) for seed in range(12)]
        answers = await asyncio.gather(*asked)
    for answer in answers:
        fits(text_of(tokenizer, answer))
    if not sampling:
        assert len({tuple(answer.tokens) for answer in answers}) > 6


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (of_regex("[0-9]{3}-[ab]{1,5}", "r"), "[0-9]{3}-[ab]{1,5}"),
        (of_choices(["yes", "no", "a (b|c)*"], "c"), r"yes|no|a \(b\|c\)\*"),
        (of_lark('start: "(" inner ")"\ninner: "x" | start', "g"), r"\(+x\)+"),
        (of_lark('root ::= "left" | "right"', "g"), "left|right"),
    ],
)
async def test_patterns_choices_and_grammars(
    kit: Any, tokenizer: Any, prompt: list[int], grammar: Grammar, pattern: str
) -> None:
    async with constrained(kit) as engine:
        asked = [kit.ask(engine, prompt, seed=seed, grammar=grammar, **PLAIN) for seed in range(6)]
        for answer in await asyncio.gather(*asked):
            if answer.finish == "stop":  # a nest may be deeper than there is room
                assert re.fullmatch(pattern, text_of(tokenizer, answer))


async def test_an_answer_ends_only_where_it_is_whole_and_is_cut_at_its_length(kit: Any, prompt: list[int]) -> None:
    async with constrained(kit) as engine:
        answer = await kit.ask(engine, prompt, seed=1, grammar=JSON, max_tokens=7, stop_tokens=(END,))
        assert (answer.finish, len(answer.tokens)) == ("length", 7)
        assert END not in answer.tokens
        unstopped = await kit.ask(engine, prompt, seed=1, grammar=of_choices(["yes", "no"], "c"), max_tokens=80)
        assert (unstopped.finish, len(unstopped.tokens)) == ("stop", 1), "nothing can follow, and nothing is to stop it"


async def test_log_probs_are_of_what_was_drawn_from_and_the_raw_ones_of_the_model(
    kit: Any, tokenizer: Any, prompt: list[int]
) -> None:
    async with constrained(kit) as engine:
        answer = await kit.ask(engine, prompt, seed=3, grammar=JSON, **PLAIN)
        (digit, end) = (await kit.ask(engine, prompt, seed=3, grammar=of_regex("[0-9]", "r"), **PLAIN)).logprobs
        drawn = await kit.ask(engine, prompt, seed=3, grammar=of_regex("[0-9]", "r"), **PLAIN)
    assert answer.raw_logprobs == pytest.approx(kit.plain(tiny(), answer), abs=1e-4)
    assert all(own >= raw - 1e-6 for own, raw in zip(answer.logprobs, answer.raw_logprobs, strict=True))
    forced = [own == 0.0 for own in answer.logprobs]
    assert forced[-1], "the end was all that was left"
    assert any(forced)
    assert not all(forced)
    digits = [tokenizer.convert_tokens_to_ids(str(number)) for number in range(10)]
    with torch.no_grad():
        logits = tiny()(torch.tensor([prompt])).logits[0, -1]
    among = logits[digits].log_softmax(-1)[digits.index(drawn.tokens[0])]
    assert (digit, end) == (pytest.approx(float(among), abs=1e-4), 0.0)


async def test_neighbours_do_not_notice(kit: Any, prompt: list[int]) -> None:
    async with constrained(kit, slots=4) as engine:
        alone = [await kit.ask(engine, prompt, seed=seed, max_tokens=30) for seed in range(2)]
        alone += [await kit.ask(engine, prompt, seed=seed, grammar=JSON, **PLAIN) for seed in range(4)]
    async with constrained(kit, slots=4) as engine:  # fewer slots than requests: sequences move
        asked = [kit.ask(engine, prompt, seed=seed, max_tokens=30) for seed in range(2)]
        asked += [kit.ask(engine, prompt, seed=seed, grammar=JSON, **PLAIN) for seed in range(4)]
        together = await asyncio.gather(*asked)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("on_update", ["refill", "keep"])
async def test_new_weights_in_the_middle(kit: Any, tokenizer: Any, prompt: list[int], on_update: str) -> None:
    async with constrained(kit, on_update=on_update) as engine:
        tasks = [asyncio.create_task(kit.ask(engine, prompt, seed=s, grammar=JSON, **PLAIN)) for s in range(4)]
        await kit.until(lambda: engine.stats().generated_tokens >= 20)
        await engine.pause()
        weights = {name: tensor * 1.01 for name, tensor in tiny().state_dict().items()}
        await engine.load(weights, 5)
        await engine.resume()
        answers = await asyncio.gather(*tasks)
    for answer in answers:
        fits(text_of(tokenizer, answer))
    assert {version for answer in answers for version in answer.versions} == {0, 5}


async def test_a_cut_answer_goes_on_elsewhere_as_the_same_draw(kit: Any, prompt: list[int]) -> None:
    request = kit.request(prompt, seed=11, grammar=JSON, **PLAIN)
    async with constrained(kit) as engine:
        whole = await kit.ask(engine, prompt, seed=11, grammar=JSON, **PLAIN)
    for cut in (1, 5, len(whole.tokens) - 1):
        progress = Progress(request, 256)
        progress.take(
            Chunk(
                tokens=whole.tokens[:cut], logprobs=whole.logprobs[:cut], raw_logprobs=whole.logprobs[:cut], version=0
            )
        )
        rest = progress.rest()
        assert rest.begun == cut
        async with constrained(kit) as engine:
            tokens = [token async for chunk in engine.generate(rest) for token in chunk.tokens]
        assert whole.tokens[:cut] + tokens == whole.tokens


async def test_grammars_are_kept_compiled_up_to_a_bound(
    kit: Any, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_COMPILED", 2)
    async with constrained(kit) as engine:
        for letter in "abcab":
            answer = await kit.ask(engine, prompt, grammar=of_choices([letter], "c"), **PLAIN)
            assert answer.finish == "stop"
        assert len(engine._grammars._kept) == 2


async def test_what_cannot_be_used_is_refused_and_nobody_else_is_hit(kit: Any, prompt: list[int]) -> None:
    async with constrained(kit) as engine:
        other = asyncio.create_task(kit.ask(engine, prompt, seed=1, max_tokens=40))
        with pytest.raises(BadRequest, match="cannot be used"):
            await kit.ask(engine, prompt, grammar=Grammar(kind="lark", text="start: nothing"), **PLAIN)
        left = msgspec.structs.replace(kit.request(prompt, grammar=JSON, **PLAIN), begun=2)
        with pytest.raises(BadRequest, match="left its grammar"):
            async for _ in engine.generate(left):
                pass
        assert len((await other).tokens) == 40
    async with kit.running(tiny()) as engine:
        with pytest.raises(EngineError, match="tokenizer"):
            await kit.ask(engine, prompt, grammar=JSON, **PLAIN)


async def test_requests_whose_grammar_is_still_compiled_can_be_given_up(kit: Any, prompt: list[int]) -> None:
    async with constrained(kit, queue=1) as engine:
        stream = engine.generate(kit.request(prompt, grammar=JSON, **PLAIN))
        assert engine._preparing
        await stream.aclose()
        assert not engine._preparing
        assert (await kit.ask(engine, prompt, seed=1, grammar=JSON, **PLAIN)).finish == "stop"
        other = of_schema(SCHEMA | {"title": "another"}, "schema")
        lost = engine.generate(kit.request(prompt, grammar=other, **PLAIN))
        assert engine._preparing
        await engine.close()
        with pytest.raises(EngineLost):
            await anext(lost)


async def test_in_exact_mode_the_raw_log_probs_are_the_trainers_to_the_bit(kit: Any, prompt: list[int]) -> None:
    model = tiny()
    async with constrained(kit, exact=True) as engine:
        answer = await kit.ask(engine, prompt, seed=2, grammar=JSON, **PLAIN)
    reading = Reading(model)
    tokens = torch.tensor([*prompt, *answer.tokens])
    with torch.inference_mode():
        for place, token in enumerate(answer.tokens):
            logits_1V = reading(tokens[: len(prompt) + place])
            assert np.float32(answer.raw_logprobs[place]) == logprob(logits_1V[0], token, 1.0).numpy()
