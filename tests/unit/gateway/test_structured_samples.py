"""Answers under a grammar, from an agent's call to a training row: which tokens train, with which log-probs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI

from rillflow.agents.roles import PolicyRole
from rillflow.config import SamplingConfig
from rillflow.engine.embedded import EmbeddedEngine
from rillflow.gateway import Gateway, Policy, session_url
from rillflow.gateway.sessions.events import make, piece_of
from rillflow.gateway.trees.tree import TokenTree
from rillflow.trainer.batches import TRAINED_COLUMNS, make_rows
from rillflow.types import BatchSample, Row
from rillflow.weights.models import load_policy_model, load_tokenizer, pick_device
from tiny_policy import tiny_renderer

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["color", "count"],
}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
USER: Any = {"role": "user", "content": "How many?"}


def tiny() -> Any:
    return load_policy_model("tiny", "fp32", pick_device("cpu"))


@asynccontextmanager
async def playing() -> AsyncIterator[tuple[PolicyRole, Gateway]]:
    engine = EmbeddedEngine(tiny(), tokenizer=partial(load_tokenizer, "tiny"), context=512, slots=8)
    await engine.start()
    gateway = Gateway("token", {"agent": Policy(engine, tiny_renderer())}, {"agent": SamplingConfig()})
    url = await gateway.start()
    key = gateway.sessions.open("s1", seed=3, group="g", deadline_seconds=120)
    client = AsyncOpenAI(base_url=session_url(url, "s1"), api_key=key, max_retries=0, timeout=60)
    try:
        yield PolicyRole("planner", "agent", lambda: client), gateway
    finally:
        await client.close()
        await gateway.stop()
        await engine.close()


@torch.no_grad()
def plain(tokens: Any) -> np.ndarray[Any, Any]:
    """The log-prob of every token by a plain forward, as a trainer has it; of the first none."""
    ids = torch.tensor([tokens.tolist()])
    all_TV = tiny()(ids).logits[0].float().log_softmax(-1)
    return np.array([0.0, *(float(all_TV[at, token]) for at, token in enumerate(tokens[1:].tolist()))])


def batch_sample(sample: Any) -> BatchSample:
    return BatchSample(
        id="x", group="g", policy="agent", row=Row(unit="u", segment=0, offset=0, length=1), tokens=sample.tokens,
        trained=sample.trained, reward=1.0, group_mean=0.0, group_std=1.0, group_size=2, staleness=0,
        truncated=False, replayed=False, member=0, alike=0,
    )  # fmt: skip


async def test_what_is_trained_has_the_log_probs_that_a_trainer_computes() -> None:
    async with playing() as (role, gateway):
        answers = await role.ask_many([USER], 4, schema=SCHEMA, temperature=1.0, max_tokens=60)
        for said in answers:
            assert set(json.loads(said.text)) == {"color", "count"}
        for said in answers:
            gateway.sessions.get("s1").rewards.give(2.0, call=said.call)
        samples = gateway.sessions.close("s1").samples("agent")
    assert len(samples) == 4
    rows = make_rows([batch_sample(one) for one in samples], [one.columns for one in samples], "agent", 0)
    for one, start in zip(samples, rows.start_R, strict=True):
        here = slice(int(start), int(start) + one.tokens)
        trained = rows.mask_N[here]
        ours = plain(one.columns["tokens"])[trained]
        assert np.abs(ours - rows.old_N[here][trained]).max() < 1e-4, "engine and trainer agree"
        assert (rows.temperature_N[here] == 1.0).all()
        assert np.abs(ours - one.columns["logprobs"][trained]).max() > 1.0, "what was drawn from is something else"
        sampled = one.columns["versions"] >= 0
        forced = sampled & (one.columns["logprobs"] == 0.0)
        assert forced.sum() >= 3, "the braces and names were never in question"
        assert not (trained & forced).any()
        assert (trained == (sampled & ~forced)).all()
        rewarded = np.flatnonzero(~np.isnan(one.columns["rewards"]))
        assert rewarded.tolist() == [np.flatnonzero(trained)[-1]], "an answer's reward is at a token that trains"
    assert set(TRAINED_COLUMNS) <= set(samples[0].columns)


async def test_a_forced_call_is_a_call_of_the_tools_schema_and_history_goes_on() -> None:
    async with playing() as (role, gateway):
        said = await role.ask([USER], tools=[TOOL], tool_choice="required", max_tokens=80)
        (use,) = said.uses
        assert use.name == "look"
        arguments = json.loads(use.arguments)
        assert arguments["color"] in ("red", "blue")
        result = {"role": "tool", "tool_call_id": use.id, "content": "7"}
        await role.ask([USER, said.message, result], tools=[TOOL], max_tokens=5)
        (sample,) = gateway.sessions.close("s1").samples("agent")
    assert sample.fork == "", "the second call goes on from the very tokens of the first"


async def test_whole_answers_without_a_choice_and_greedy_ones_train_as_a_whole() -> None:
    async with playing() as (role, gateway):
        await role.ask([USER], extra_body={"guided_choice": ["yes"]}, max_tokens=20)
        await role.ask([USER], schema=SCHEMA, temperature=0.0, max_tokens=60)
        samples = gateway.sessions.close("s1").samples("agent")
    for one in samples:
        assert one.trained == int((one.columns["versions"] >= 0).sum())
        assert (one.columns["temperatures"] == 0).all()


async def test_a_restarted_gateway_knows_which_answers_were_under_a_grammar() -> None:
    async with playing() as (role, gateway):
        await role.ask([USER], schema=SCHEMA, max_tokens=60)
        tree = gateway.sessions.close("s1").trees["agent"]
    nodes = sorted([*tree.roots().values(), *tree.nodes()], key=lambda node: node.id)
    again, made = TokenTree(), {}
    for node in nodes:
        copy = make(piece_of(node, tree), again, made)
        assert copy is not None
        made[node.id] = copy
    assert [node.constrained for node in made.values()] == [node.constrained for node in nodes]
    assert any(node.constrained for node in nodes)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stream_says_the_same(stream: bool) -> None:
    async with playing() as (role, _):
        shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        asked: Any = {"model": "agent", "messages": [USER], "response_format": shape, "max_tokens": 60}
        if stream:
            events = await role.client.chat.completions.create(**asked, stream=True)
            text = "".join([event.choices[0].delta.content or "" async for event in events if event.choices])
        else:
            text = (await role.client.chat.completions.create(**asked)).choices[0].message.content or ""
        assert set(json.loads(text)) == {"color", "count"}
