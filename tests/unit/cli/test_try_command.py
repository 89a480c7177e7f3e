"""`rillflow try` with a real engine, a real gateway and real agents: its output for people and for programs."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from rillflow.cli.main import app
from rillflow.config import load_recipe
from rillflow.evaluate.playing import open_engines
from rillflow.gateway import anthropic_url
from rillflow.rollout.cast import build_gateway
from rillflow.runtime.folder import RunFolder
from rillflow.weights import FolderStore
from rillflow.weights.models import load_policy_model, pick_device

FAILING = """
import json

async def play(episode):
    answer = await episode.client.chat.completions.create(
        model=episode.model, messages=[{"role": "user", "content": "In the red box, how many keys?"}], max_tokens=4
    )
    return json.loads(answer.choices[0].message.content + "no JSON")
"""
# Every dialect, whole and streamed; the answer is what the agent got of each.
DIALECTS = """
import json
import aiohttp

ASKED = {
    "chat/completions": {"messages": [{"role": "user", "content": "In the red box, how many keys?"}]},
    "completions": {"prompt": "In the red box"},
    "responses": {"input": "In the blue box, how many keys?"},
    "messages": {"messages": [{"role": "user", "content": "In the green box, how many keys?"}]},
}
TOKENS = {"responses": "max_output_tokens"}

async def play(episode):
    got = []
    headers = {"authorization": f"Bearer {episode.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as client:
        for path, body in ASKED.items():
            for stream in (False, True):
                asked = body | {"model": episode.model, "stream": stream, TOKENS.get(path, "max_tokens"): 6}
                async with client.post(f"{episode.base_url}/{path}", json=asked) as answer:
                    got.append([path, stream, answer.status, (await answer.read()).decode()])
    episode.metric("calls", len(got))
    episode.reward(0.5)
    return {"got": got}

def reward(payload, answer, messages):
    return float(len(messages))
"""
NOTHING_HELD_OUT = ("data.heldout=null", "evaluation.target=null")


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["try", *arguments])
    assert result.exit_code == code, result.output
    return result.stdout or result.stderr


def as_json(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["try", *arguments, "--json"])
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_an_episode_is_printed_with_its_messages_calls_reward_and_tokens() -> None:
    printed = call("quickstart", "--tokens")
    speakers = [line.partition(" ")[0] for line in printed.splitlines()]
    assert [who for who in speakers if who in {"user", "assistant", "tool", "answer", "reward"}] == [
        "user", "assistant", "tool", "assistant", "answer", "reward",
    ]  # fmt: skip
    assert "  In the red box, how many keys?" in printed
    assert 'assistant  count(box="red", item=' in printed
    assert "tokens behind 28]" in printed
    assert "<|im_end|> -0." in printed
    assert ", 1 sample\n" in printed


def test_the_json_has_every_token_and_the_same_seed_gives_the_same_episode() -> None:
    first, again = as_json("quickstart", "--prompt", "3"), as_json("quickstart", "--prompt", "3")
    other = as_json("quickstart", "--lane", "evaluation", "--seed", "8")
    assert (first["samples"], first["rewards"]) == (again["samples"], again["rewards"])
    assert first["samples"] != other["samples"]
    assert (first["prompt"]["id"], first["seed"]) == ("stockroom-train-1-3", 7)
    assert (other["prompt"]["id"], other["seed"], other["lane"]) == ("stockroom-heldout-2-0", 8, "evaluation")
    (sample,) = first["samples"]
    assert len(sample["tokens"]) == len(sample["mask"]) == len(sample["logprobs"]) == len(sample["versions"])
    assert sum(sample["mask"]) > 0
    assert first["rewards"] == {"agent": first["rewards"]["agent"]}
    assert first["paths"][0]["messages"][0]["content"] == first["prompt"]["payload"]["question"]


@pytest.mark.parametrize("recipe", ["command_agent", "mcp_stdio", "two_policies"])
def test_commands_tools_and_several_policies_are_tried_as_they_are(recipe: str) -> None:
    found = as_json(recipe)
    asked = load_recipe(recipe)
    assert found["rewards"].keys() == asked.policies.keys()
    assert {path["policy"] for path in found["paths"]} == asked.policies.keys()
    assert any(message["role"] == "tool" for path in found["paths"] for message in path["messages"])
    assert found["cause"] == ""


def test_a_run_is_tried_with_the_weights_that_it_has_trained(tmp_path: Path) -> None:
    folder = RunFolder.create(load_recipe("quickstart"), tmp_path)
    store = FolderStore(folder.weights("agent"))
    tensors = load_policy_model("tiny", "fp32", pick_device("cpu")).state_dict()
    store.publish(tensors, 0, store.head())
    store.publish({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, 3, store.head())
    said = call(str(folder.root), "--tokens")
    assert said.startswith("version 3 of agent (the latest)\n")
    logprobs = re.findall(r" (-\d+\.\d+)  ", said)
    assert len(set(logprobs)) == 1  # weights of nothing but 0 make all tokens equally likely


def test_a_fork_is_told_with_its_cause() -> None:
    assert "a fork, one more sample: the user's message differs: content of messages[0]" in call("two_agents")


def test_a_failing_workflow_ends_with_its_traceback_and_what_was_said_before(tmp_path: Path) -> None:
    (tmp_path / "play.py").write_text(FAILING)
    overrides = ("quickstart", f"workflow={tmp_path / 'play.py'}:play")
    printed = call(*overrides, code=1)
    assert "user       In the red box, how many keys?" in printed
    assert "failed: workflow_error  JSONDecodeError" in printed
    assert "Traceback (most recent call last)" in printed
    assert 'json.loads(answer.choices[0].message.content + "no JSON")' in printed
    found = as_json(*overrides, code=1)
    assert (found["cause"], found["rewards"]) == ("workflow_error", {})
    assert len(found["paths"][0]["messages"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("quickstart", "--prompt", "1024"), "prompt 1024 does not exist: the recipe has 1024"),
        (("quickstart", "--endpoint", "http://127.0.0.1:1/v1"), "give --endpoint and --model together"),
        (
            ("quickstart", "--lane", "evaluation", "data.heldout=null", "evaluation.target=null"),
            "the recipe holds no prompts out",
        ),
        (("outside_agent",), "the recipe's agents come from outside"),
        (("quickstart", "workflow=nowhere:play"), "nowhere"),
    ],
)
def test_what_cannot_be_tried_is_said_before_anything_is_played(arguments: tuple[str, ...], said: str) -> None:
    assert said in call(*arguments, code=2)


# ---------------------------------------------------------------- against an endpoint


class Served(NamedTuple):
    url: str
    key: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The quickstart's policy behind a real gateway, in a thread: an endpoint that speaks every dialect."""
    ready: list[Served] = []
    started, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        recipe = load_recipe("quickstart", ["policies.agent.engine.slots=4"])
        async with open_engines(recipe, tmp_path_factory.mktemp("logs")) as engines:
            gateway = build_gateway(recipe, "token", engines)
            url = await gateway.start()
            key = gateway.sessions.open("all", seed=1, group="all", deadline_seconds=600)
            ready.append(Served(f"{anthropic_url(url, 'all')}/v1", key))
            started.set()
            await stop.wait()
            await gateway.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(120)
    yield ready[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)
    loop.close()


def test_an_endpoint_answers_in_place_of_the_policy(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", served.key)
    at = ("quickstart", "--endpoint", served.url, "--model", "agent")
    printed = call(*at)
    assert "user       In the red box, how many keys?\nassistant  " in printed
    assert "an endpoint's tokens are not known here: nothing to train on" in printed
    found = as_json(*at)
    roles = [message["role"] for message in found["paths"][0]["messages"]]
    assert roles[:2] == ["user", "assistant"]
    assert (found["samples"], found["calls"], len(found["paths"])) == ([], roles.count("assistant"), 1)
    assert found["rewards"].keys() == {"agent"}


def test_every_dialect_and_every_stream_is_told_as_the_agent_got_it(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", served.key)
    (tmp_path / "play.py").write_text(DIALECTS)
    code = (f"workflow={tmp_path / 'play.py'}:play", f"reward={tmp_path / 'play.py'}:reward")
    found = as_json("quickstart", *code, "--endpoint", served.url, "--model", "agent", code=0)
    got = found["answer"]["got"]
    assert [status for _, _, status, _ in got] == [200] * 8
    assert found["calls"] == 8
    answers = [path["messages"][-1]["content"] for path in found["paths"]]
    assert len(answers) == 8
    for answer, (path, stream, _, body) in zip(answers, got, strict=True):
        assert answer, (path, stream)
        if not stream:
            assert json.dumps(answer, ensure_ascii=False)[1:-1] in body, (path, answer)
    assert found["rewards"] == {"agent": 12.0}  # both answers of a dialect are to the same question
    assert found["forks"] == ["messages[0] differs"] * 3


def test_an_endpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    printed = call("quickstart", "--endpoint", "http://127.0.0.1:9/v1", "--model", "any", code=1)
    assert "the endpoint http://127.0.0.1:9/v1/chat/completions does not answer" in printed
