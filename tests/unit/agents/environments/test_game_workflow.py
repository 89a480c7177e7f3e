"""The workflows `game` and `tau`, played by roles that say what the test wants."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from rillflow.agents.environments import tau
from rillflow.agents.environments.household import Household, prompts
from rillflow.agents.environments.tau import Tau
from rillflow.agents.options import read_options
from rillflow.agents.workflows import game
from rillflow.errors import ConfigError
from rillflow.types import Observation, Said, ToolUse

(ROW,) = prompts("train", 1, 1, size="small")


class Table:
    """An episode with one environment; `speak` gets the messages of each call and is what roles say."""

    def __init__(self, environment: Any, speak: Callable[[str, list[Any]], Any], **options: Any) -> None:
        self.environment = environment
        self.payload: dict[str, Any] = ROW["payload"]
        self.seed = 0
        self.options: Mapping[str, Any] = options
        self.calls: list[tuple[str, list[Any], Any]] = []
        self.rewards: list[tuple[float, str]] = []
        self._speak = speak

    def role(self, name: str) -> Any:
        async def ask(messages: list[Any], *, tools: Any = None, schema: Any = None) -> Said:
            self.calls.append((name, list(messages), schema))
            said = self._speak(name, messages)
            text, uses = (said, []) if isinstance(said, str) else ("", [ToolUse("c", *said)])
            return Said(text, uses, f"call-{len(self.calls)}", False, {"role": "assistant", "content": text})

        return SimpleNamespace(ask=ask)

    def reward(self, value: float, *, call: str) -> None:
        self.rewards.append((value, call))


async def planned() -> list[str]:
    environment = Household()
    await environment.reset(ROW["payload"], 0)
    return await environment.plan()


def saying(actions: list[str]) -> Callable[[str, list[Any]], str]:
    left = iter(actions)
    return lambda _, __: next(left)


async def test_a_won_game_and_what_each_answer_earned() -> None:
    plan = await planned()
    table = Table(Household(), saying(plan), step_rewards=True)
    assert await game.play(table) == 1.0  # type: ignore[arg-type]
    assert len(table.calls) == len(plan)
    assert [value for value, _ in table.rewards] == [0.0] * (len(plan) - 1) + [1.0]
    assert table.rewards[-1][1] == f"call-{len(plan)}"


async def test_json_actions_have_a_schema() -> None:
    plan = [json.dumps({"action": action}) for action in await planned()]
    table = Table(Household(), saying(plan), action="json")
    assert await game.play(table) == 1.0  # type: ignore[arg-type]
    assert all(schema == game.ACTION_SCHEMA for _, _, schema in table.calls)


async def test_the_budget_of_nonsense_and_the_bound_of_turns() -> None:
    table = Table(Household(), lambda *_: "dance", invalid=2)
    assert await game.play(table) == 0.0  # type: ignore[arg-type]
    assert len(table.calls) == 3
    table = Table(Household(), lambda *_: "look", turns=4)
    await game.play(table)  # type: ignore[arg-type]
    assert len(table.calls) == 4


async def test_a_window_keeps_the_task_and_the_last_turns() -> None:
    table = Table(Household(), lambda *_: "look", turns=5, history=2, instructions="Play.")
    await game.play(table)  # type: ignore[arg-type]
    assert [len(messages) for _, messages, _ in table.calls] == [2, 4, 6, 6, 6]
    assert all(messages[:2] == table.calls[0][1] for _, messages, _ in table.calls)


async def test_possible_actions_are_listed_where_asked_for() -> None:
    table = Table(Household(), lambda *_: "look", turns=1, show_actions=True)
    await game.play(table)  # type: ignore[arg-type]
    assert "Possible: go to" in table.calls[0][1][0]["content"]


async def test_sum_or_final() -> None:
    class Paying:
        async def reset(self, payload: Any, seed: int) -> Observation:
            self.left = 3
            return Observation("go")

        async def step(self, action: str) -> Observation:
            self.left -= 1
            return Observation("on", 0.5, self.left == 0)

    assert await game.play(Table(Paying(), lambda *_: "x")) == 1.5  # type: ignore[arg-type]
    assert await game.play(Table(Paying(), lambda *_: "x", reward="final")) == 0.5  # type: ignore[arg-type]


async def test_a_full_context_ends_the_game_but_not_before_it_began() -> None:
    response = httpx.Response(400, request=httpx.Request("POST", "http://x"))
    full = openai.BadRequestError("full", response=response, body={"code": "context_length_exceeded"})

    def speak(room: int) -> Callable[[str, list[Any]], str]:
        def said(_: str, messages: list[Any]) -> str:
            if len(messages) > room:
                raise full
            return "look"

        return said

    table = Table(Household(), speak(3))
    assert await game.play(table) == 0.0  # type: ignore[arg-type]
    assert len(table.calls) == 3
    with pytest.raises(openai.BadRequestError):
        await game.play(Table(Household(), speak(0)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "action"),
    [("go to x", "go to x"), ("I think.\n\nAction: take y \n", "take y"), ("", ""), ("  \n", "")],
)
def test_an_action_is_the_last_line(text: str, action: str) -> None:
    assert game.action_of(text, game.GameOptions()) == action


@pytest.mark.parametrize("text", ["", "{", "[]", '{"action": 3}', '{"act": "x"}'])
def test_json_that_is_no_action_is_none(text: str) -> None:
    assert game.action_of(text, game.GameOptions(action="json")) == ""


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'turns'"):
        read_options("options", {"turn": 3}, game.GameOptions)
    assert read_options("options", {"turns": 3}, game.GameOptions).turns == 3


def _tool_or_text(action: str) -> Any:
    called = tau.tool_call(action)
    return action if called is None else (called[0], json.dumps(called[1]))


async def test_tau_with_tool_calls_and_a_scripted_customer() -> None:
    environment = Tau(brief=True)
    table = Table(environment, lambda *_: "")
    table.payload = {"world": 4, "wish": "exchange"}
    await environment.reset(table.payload, 0)
    said = iter([_tool_or_text(action) for action in await environment.plan()])
    table._speak = lambda *_: next(said)
    assert await tau.play(table) == 1.0  # type: ignore[arg-type]
    assert {name for name, _, _ in table.calls} == {"agent"}


async def test_tau_with_a_customer_who_is_a_role() -> None:
    environment = Tau(brief=True, user="role")
    table = Table(environment, lambda *_: "")
    table.payload = {"world": 4, "wish": "cancel"}
    await environment.reset(table.payload, 0)
    said = iter([_tool_or_text(action) for action in await environment.plan()])
    answers = iter(["I am somebody.", "Yes.", "END"])
    table._speak = lambda name, _: next(answers) if name == "customer" else next(said)
    assert await tau.play(table) == 1.0  # type: ignore[arg-type]
    assert next(answers, None) is None


async def test_tau_wants_its_own_environment() -> None:
    with pytest.raises(ConfigError, match="environment"):
        await tau.play(Table(Household(), lambda *_: ""))  # type: ignore[arg-type]
