"""The stockroom with AutoGen. Run by `autogen.yaml`, once for each episode."""

import asyncio
import json
import os
import sys
from pathlib import Path

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

payload = json.load(sys.stdin)


async def count(box: str, item: str) -> str:
    """Count the pieces of one item in one box."""
    return str(payload["stock"].get(box, {}).get(item, "error: not there"))


# AutoGen knows OpenAI's models by name, and needs a description of any other one.
able = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": "unknown",
}
model = OpenAIChatCompletionClient(model=os.environ["OPENAI_MODEL"], model_info=able, max_tokens=32)
agent = AssistantAgent("clerk", model, tools=[count], system_message="Count.", reflect_on_tool_use=True)
result = asyncio.run(agent.run(task=payload["question"]))
Path(os.environ["RILLFLOW_ANSWER"]).write_text(str(result.messages[-1].content))
