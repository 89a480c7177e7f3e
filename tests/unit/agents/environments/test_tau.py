"""When a customer of `tau` is served, and when not."""

from __future__ import annotations

import json

import pytest

from rillflow.agents.environments.tau import WISHES, Tau, prompts


async def _play(actions_of: object, wish: str, world: int = 4) -> tuple[Tau, float]:
    environment = Tau()
    await environment.reset({"world": world, "wish": wish}, 0)
    actions = await environment.plan() if actions_of is None else actions_of(environment)  # type: ignore[operator]
    earned = 0.0
    for action in actions:
        earned += (await environment.step(action)).reward
    return environment, earned


@pytest.mark.parametrize("wish", WISHES)
async def test_every_wish_can_be_served(wish: str) -> None:
    for world in range(10):
        _, earned = await _play(None, wish, world)
        assert earned == 1.0


async def test_doing_nothing_earns_nothing() -> None:
    for wish in WISHES:
        for words in (["Bye."], ["Hm."] * 6):
            environment, earned = await _play(lambda _, words=words: words, wish)
            assert earned == 0.0
            assert (await environment.step("more")).done


async def test_a_change_that_nobody_wanted_earns_nothing() -> None:
    environment = Tau()
    await environment.reset({"world": 4, "wish": "total"}, 0)
    order = next(number for number, order in environment.data["orders"].items() if order["status"] == "pending")
    plan = await environment.plan()
    call = json.dumps({"name": "cancel_order", "arguments": {"order": order, "reason": "no longer needed"}})
    for action in [call, *plan, "Bye."]:
        seen = await environment.step(action)
    assert seen.done
    assert seen.reward == 0.0


async def test_a_list_of_guesses_tells_nothing() -> None:
    environment = Tau()
    await environment.reset({"world": 4, "wish": "total"}, 0)
    (fact,) = environment.wish.told
    seen = await environment.step(" ".join(str(number) for number in range(200)) + f" {fact}")
    assert not seen.done
    seen = await environment.step(f"It was {fact} dollars.")
    assert seen.reward == 1.0


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ('{"name": "fly", "arguments": {}}', "no tool"),
        ('{"name": ["get_order"], "arguments": {}}', "no tool"),
        ('{"name": "get_order", "arguments": {"number": "W1"}}', "takes order"),
        ('{"name": "get_order", "arguments": {"order": 1}}', "text"),
        ('{"name": "get_order", "arguments": {"order": "W1"}}', "no such order"),
        ("{not json", "tool call"),
    ],
)
async def test_what_is_wrong_with_a_call_is_told(action: str, said: str) -> None:
    environment = Tau()
    await environment.reset({"world": 4}, 0)
    assert said in (await environment.step(action)).text


async def test_a_customer_who_is_played_by_somebody_else() -> None:
    environment = Tau(user="role")
    seen = await environment.reset({"world": 4, "wish": "cancel"}, 0)
    assert environment.wish.says in seen.info["customer"]
    assert (await environment.step("Hello")).info["awaits_customer"]
    name, arguments = environment.wish.changes[0]
    await environment.step(json.dumps({"name": name, "arguments": arguments}))
    seen = await environment.leave()
    assert seen.done
    assert seen.reward == 1.0


def test_unknown_wishes_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown wishes"):
        list(prompts("train", 1, 1, wishes=["fly"]))
