"""The stockroom with the OpenAI Agents SDK. Run by `openai_agents.yaml`, once for each episode."""

import json
import os
import sys
from pathlib import Path

from agents import Agent, ModelSettings, Runner, function_tool

payload = json.load(sys.stdin)


@function_tool
def count(box: str, item: str) -> str:
    """Count the pieces of one item in one box."""
    return str(payload["stock"].get(box, {}).get(item, "error: not there"))


agent = Agent(
    name="clerk", model=os.environ["OPENAI_MODEL"], tools=[count], model_settings=ModelSettings(max_tokens=32)
)
result = Runner.run_sync(agent, payload["question"], max_turns=3)
Path(os.environ["RILLFLOW_ANSWER"]).write_text(str(result.final_output))
