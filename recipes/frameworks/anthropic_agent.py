"""The stockroom with Anthropic's SDK. Run by `anthropic.yaml`, once for each episode."""

import json
import os
import sys
from pathlib import Path

import anthropic

payload = json.load(sys.stdin)
box, item = {"type": "string"}, {"type": "string"}
schema = {"type": "object", "properties": {"box": box, "item": item}, "required": ["box", "item"]}
tools = [{"name": "count", "description": "Count the pieces of one item in one box.", "input_schema": schema}]
client = anthropic.Anthropic()
messages = [{"role": "user", "content": payload["question"]}]
text = ""
for _ in range(3):
    said = client.messages.create(model=os.environ["ANTHROPIC_MODEL"], messages=messages, tools=tools, max_tokens=32)
    text = "".join(block.text for block in said.content if block.type == "text")
    calls = [block for block in said.content if block.type == "tool_use"]
    if not calls:
        break
    found = [payload["stock"].get(call.input.get("box"), {}).get(call.input.get("item"), "error") for call in calls]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": str(number)}
        for call, number in zip(calls, found, strict=True)
    ]
    messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": results}]
Path(os.environ["RILLFLOW_ANSWER"]).write_text(text)
