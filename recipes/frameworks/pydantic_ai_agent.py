"""The stockroom with Pydantic AI. Run by `pydantic_ai.yaml`, once for each episode."""

import json
import os
import sys
from pathlib import Path

from pydantic_ai import Agent, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel

payload = json.load(sys.stdin)
agent = Agent(OpenAIChatModel(os.environ["OPENAI_MODEL"]), model_settings={"max_tokens": 32})


@agent.tool_plain
def count(box: str, item: str) -> str:
    """Count the pieces of one item in one box."""
    return str(payload["stock"].get(box, {}).get(item, "error: not there"))


# An exception when the model misbehaves ends the program with code 1: `ends` in the recipe gives its reward.
result = agent.run_sync(payload["question"], usage_limits=UsageLimits(request_limit=3))
Path(os.environ["RILLFLOW_ANSWER"]).write_text(str(result.output))
