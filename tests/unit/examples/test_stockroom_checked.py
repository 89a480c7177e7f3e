"""The stockroom with a checker: who sees what, and who is rewarded for what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rillflow.examples import stockroom
from rillflow.examples.stockroom import judged, play_checked
from tiny_policy import tiny_tokenizer


class Client:
    """Each policy gives scripted answers."""

    def __init__(self, **says: str | None) -> None:
        self._says = says
        self.asked: list[tuple[str, Any]] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    async def create(self, model: str, messages: list[Any], **_: Any) -> Any:
        self.asked.append((model, messages[-1]["content"]))
        message = SimpleNamespace(content=self._says[model], tool_calls=None)
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


@pytest.fixture
def payload() -> dict[str, Any]:
    (prompt,) = stockroom.prompts("train", 1, 1)
    found: dict[str, Any] = prompt["payload"]
    return found


async def run(payload: dict[str, Any], client: Client) -> dict[str, float]:
    episode: Any = SimpleNamespace(client=client, model="solver", policies=("solver", "checker"), payload=payload)
    return await play_checked(episode)


@pytest.mark.parametrize(("right", "verdict"), [(True, "yes"), (True, "no"), (False, "yes"), (False, "no")])
async def test_rewards(payload: dict[str, Any], right: bool, verdict: str) -> None:
    count = payload["stock"][payload["box"]][payload["item"]]
    answer = str(count if right else count + 1)
    client = Client(solver=answer, checker=verdict)
    rewards = await run(payload, client)
    assert rewards == {"solver": float(right), "checker": float(right == (verdict == "yes"))}
    assert client.asked == [
        ("solver", payload["question"]),
        ("checker", f"{payload['question']} {answer}. Is it right?"),
    ]


async def test_a_solver_without_an_answer_is_judged_too(payload: dict[str, Any]) -> None:
    client = Client(solver=None, checker="no")
    assert await run(payload, client) == {"solver": 0.0, "checker": 1.0}
    assert client.asked[1][1].endswith("no answer. Is it right?")


@pytest.mark.parametrize("verdict", [None, "", "maybe", "yes no", "1"])
def test_what_is_no_verdict_is_never_right(verdict: str | None) -> None:
    assert judged(verdict, right=True) == judged(verdict, right=False) == 0.0


def test_verdicts_are_one_token_each_and_the_question_is_short() -> None:
    tokenizer: Any = tiny_tokenizer()
    assert [len(tokenizer.encode(word)) for word in ("yes", "no")] == [1, 1]
    for prompt in stockroom.prompts("train", 64, 1):
        question = f"{prompt['payload']['question']} {'9' * 32}. Is it right?"
        assert len(tokenizer.encode(question)) < 80
