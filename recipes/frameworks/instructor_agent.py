"""The stockroom with Instructor. Run by `instructor.yaml`, once for each episode."""

import json
import os
import sys
from pathlib import Path

import instructor
import openai
from pydantic import BaseModel


class Answer(BaseModel):
    """The answer to the question."""

    pieces: int


payload = json.load(sys.stdin)
client = instructor.from_openai(openai.OpenAI())
shelf = json.dumps(payload["stock"][payload["box"]])
question = {"role": "user", "content": f"{payload['question']} {shelf}"}
# A forced call of a tool is sampled under a grammar: Instructor can always read it, unless its length cuts it off.
answer = client.chat.completions.create(
    model=os.environ["OPENAI_MODEL"], messages=[question], response_model=Answer, max_tokens=64, max_retries=1
)
Path(os.environ["RILLFLOW_ANSWER"]).write_text(str(answer.pieces))
