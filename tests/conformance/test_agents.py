"""The packages that people write agents with play the stockroom through the gateway, unmodified and token-exact."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_play import SCRIPTS, play, python_of

from rillflow.examples.stockroom import prompts, reward
from rillflow.weights.models import load_policy_model, pick_device

pytestmark = pytest.mark.agents

# package, its script under agents/, and what the script can play.
SPOKEN = {
    ("openai", "openai_sdk.py"): (
        "chat", "chat-stream", "responses", "responses-linked", "responses-stream", "completions", "completions-stream",
    ),
    ("anthropic", "anthropic_sdk.py"): ("messages", "messages-stream"),
    ("openai-agents", "openai_agents_sdk.py"): ("responses", "responses-stream", "chat", "chat-stream"),
    ("langchain-openai", "langchain_agent.py"): ("chat", "chat-stream", "responses", "responses-stream"),
    ("litellm", "litellm_agent.py"): ("openai", "openai-stream", "anthropic", "anthropic-stream"),
}  # fmt: skip
CASES = [
    pytest.param(package, script, way, id=f"{package}-{way}")
    for (package, script), ways in SPOKEN.items()
    for way in ways
]
QUESTIONS = 4
# LiteLLM gives a streamed answer without text a placeholder for one when it replays it to Anthropic's interface.
EDITING = {("litellm", "anthropic-stream")}


@pytest.mark.parametrize(("package", "script", "way"), CASES)
async def test_agent_plays_the_stockroom(package: str, script: str, way: str, tmp_path: Path) -> None:
    payloads = [row["payload"] for row in prompts("train", QUESTIONS, 3)]
    model = load_policy_model("tiny", "fp32", pick_device("cpu"))
    played = await play([python_of(package), SCRIPTS / script, way], {"questions": payloads}, model, tmp_path)
    played.check()
    assert max(len(episode) for episode in played.told) >= 2, "no episode used the tool"
    if (package, way) in EDITING:
        # An answer that comes back changed is another history: it forks, and says so.
        assert len(played.samples) == len(played.engine.log)
        assert {sample.fork for sample in played.samples} <= {"", "history"}
        return
    # A history that comes back as it was is found again, whatever form it took: one path for each question.
    assert len(played.samples) == QUESTIONS
    rewards = [reward(payload, told[-1]["text"]) for payload, told in zip(payloads, played.told, strict=True)]
    assert any(rewards), "no tool's answer reached the model"
