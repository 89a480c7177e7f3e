"""The Python snippets of the documentation are executed as they stand there. `test_docs_examples` checks the rest."""

from __future__ import annotations

import asyncio
import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rillflow.agents.roles import answer_uses
from rillflow.agents.tools.functions import tool_of
from rillflow.agents.tools.toolbox import OpenToolbox
from rillflow.rollout.episode import Surroundings
from rillflow.types import EpisodeFacts
from scripted_play import PlayedEpisode, play_scripted

DOCS = Path(__file__).parents[2] / "docs"
# The snippets of these pages by their numbers, and the tests that execute them.
ELSEWHERE = {
    "data_algorithms": {0: "unit/dataflow/hooks/test_data_algorithms_page.py", 1: "the same"},
    "graphs": {0: "integration/test_graph_example.py", 1: "the same"},
    "prompts": {0: "unit/dataflow/sources/test_source_docs.py", 1: "the same"},
    "trajectories": {0: "integration/test_run.py"},
    "tutorial": {0: "integration/test_tutorial.py"},
    "workflows": {number: "unit/agents/test_workflow_docs.py" for number in (0, 1, 2, 4)},
}
# These are only compiled, and what they import is imported.
LEFT_OUT = {
    "agents": {2: "needs a node that waits for agents outside; tests/unit/rollout/test_outside.py has one"},
    "supervised": {0: "needs two fitted models; tests/unit/trainer/supervised makes them"},
}
HERE = {
    "agents": (0, 1), "algorithms": (0,), "environments": (0,), "multi_policy": (0,), "rewards": (0, 1, 2),
    "sandbox": (0,), "stages": (0,), "structured": (0,), "tools": (0, 1), "weights": (0, 1), "workflows": (3,),
}  # fmt: skip
PAYLOAD = {"question": "What is 2 + 2?", "answer": "4"}


def snippets(page: str) -> list[str]:
    return re.findall(r"^```python[^\n]*\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)


def defined(page: str, number: int, **given: Any) -> dict[str, Any]:
    """Execute a snippet; return the names that it defines."""
    assert number in HERE[page]
    names = dict(given)
    exec(snippets(page)[number], names)
    return names


async def played(page: str, number: int, texts: list[str], tools: OpenToolbox | None = None) -> PlayedEpisode:
    """Play the workflow `play` of a snippet, with the answers of a scripted engine."""
    return await play_scripted(
        defined(page, number)["play"], PAYLOAD, texts, Surroundings(tools=tools or OpenToolbox())
    )


async def inside(
    page: str, number: int, texts: list[str], tools: OpenToolbox | None = None, **given: Any
) -> Mapping[str, Any]:
    """Execute a snippet that is a part of a workflow; return its local names. Roles are named as their variables."""
    assert number in HERE[page]
    code = f"async def play(episode, {', '.join(given)}):\n{textwrap.indent(snippets(page)[number], '    ')}"
    names: dict[str, Any] = {"asyncio": asyncio, "json": json, "answer_uses": answer_uses}
    exec(code + "    return locals()\n", names)

    async def play(episode: Any) -> Any:
        roles = {name: episode.role(name) for name, value in given.items() if value is None}
        return await names["play"](episode, **{**given, **roles})

    done = await play_scripted(play, PAYLOAD, texts, Surroundings(tools=tools or OpenToolbox()))
    return dict(done.answer)


def test_every_snippet_is_executed_or_left_out_for_a_reason() -> None:
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")} - {"api"}
    found = {(page, number) for page in pages for number in range(len(snippets(page)))}
    accounted = {(page, number) for table in (ELSEWHERE, LEFT_OUT, HERE) for page in table for number in table[page]}
    assert accounted == found


async def test_agents() -> None:
    assert (await played("agents", 0, ["4"])).answer == "4"
    question = [{"role": "user", "content": "Is it right?"}]
    names = await inside("agents", 1, ["yes"], messages=question)
    assert names["response"].choices[0].message.content == "yes"


def test_algorithms() -> None:
    tokens = SimpleNamespace(new_T=torch.tensor([0.0, 2.0]), old_T=torch.zeros(2), advantage_T=torch.tensor([1.0, 1.0]))
    assert defined("algorithms", 0)["loss"](tokens).tolist() == [-1.0, -2.0]


async def test_environments() -> None:
    guess = defined("environments", 0)["Guess"](highest=3)
    assert (await guess.reset({}, 4)).text == "Guess my number."
    wrong, right = await guess.step("2"), await guess.step(" 1 ")
    assert (wrong.reward, wrong.done, right.reward, right.done) == (0.0, False, 1.0, True)
    await guess.close()


async def test_multi_policy() -> None:
    done = await played("multi_policy", 0, ["5", "It is too large.", "4"])
    assert done.answer == 1.0
    assert sorted(float(sample.columns["rewards"][-1]) for sample in done.samples) == [0.0, 1.0, 1.0]


def test_rewards() -> None:
    assert defined("rewards", 0)["reward"](PAYLOAD, "It is 4") == 1.0
    messages = [{"role": "tool", "content": "4"}]
    training = EpisodeFacts("t", "p", ["agent"], seed=1, evaluating=False, seconds=2.0)
    assert defined("rewards", 1)["reward"](PAYLOAD, "4", messages, training) == pytest.approx(0.99)
    group = [SimpleNamespace(answer=text, reward=given) for text, given in (("4", 1.0), ("it is 4", 1.0), ("5", 0.0))]
    assert defined("rewards", 2)["reward"](group) == [pytest.approx(1 / 3), 0.0, 0.0]


@pytest.mark.needs("bubblewrap")
def test_sandbox(capsys: pytest.CaptureFixture[str]) -> None:
    defined("sandbox", 0)
    assert capsys.readouterr().out.split() == ["45", "1024", "ok", "1", "1"]


def test_stages() -> None:
    stage = defined("stages", 0)["Novelty"](None, "agent", scale=2.0)
    assert stage.columns({"length_R": torch.tensor([3.0])})["novelty_R"].tolist() == [6.0]


async def test_structured() -> None:
    said = {"thought": "It is simple.", "tool": "answer", "input": "4"}
    names = await inside("structured", 0, [json.dumps(said)])
    assert names["action"] == said


async def test_tools() -> None:
    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
    question = [{"role": "user", "content": "What is 2 + 2?"}]
    names = await inside("tools", 0, [call], OpenToolbox([tool_of(add)]), agent=None, messages=question)
    assert [message["role"] for message in names["messages"]] == ["user", "assistant", "tool"]
    assert names["messages"][-1]["content"] == "4"
    look_up = tool_of(defined("tools", 1)["look_up"])
    assert (look_up.name, look_up.description) == ("look_up", "Look a word up in the dictionary.")
    limit = look_up.parameters["properties"]["limit"]
    assert (limit["minimum"], limit["maximum"]) == (1, 9)


def test_deltas() -> None:
    base = torch.ones(100, dtype=torch.bfloat16)
    new = base.clone()
    new[::7] = 1.5
    names = defined("weights", 0, base=base, new=new)
    assert names["made"].changed == 15
    assert torch.equal(base, new)


@pytest.mark.needs("cuda")
def test_deltas_on_a_gpu() -> None:
    old = {"w": torch.ones(100, dtype=torch.bfloat16, device="cuda")}
    new = {"w": torch.full_like(old["w"], 1.5)}
    from rillflow.weights.fingerprint import fingerprint

    names = defined("weights", 1, old=old, new=new, names=["w"], fingerprints={"w": fingerprint(old["w"])})
    assert names["made"][0].changed == 100


async def test_workflows() -> None:
    question = [{"role": "user", "content": "What is 2 + 2?"}]
    texts = ["1", "2", "3", "4", "5", "6"]
    names = await inside("workflows", 3, texts, solver=None, messages=question, questions=[question, question])
    assert sorted(said.text for said in (*names["drafts"], *names["parts"])) == texts
