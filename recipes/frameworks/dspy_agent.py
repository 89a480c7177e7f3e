"""The stockroom with DSPy. Run by `dspy.yaml`, once for each episode."""

import json
import os
import sys
from pathlib import Path

import dspy

payload = json.load(sys.stdin)
# Without `cache=False` DSPy answers a call that it has seen before from its disk, and nothing is sampled.
model = dspy.LM(
    f"openai/{os.environ['OPENAI_MODEL']}",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    max_tokens=32,
    cache=False,
)
dspy.configure(lm=model)
shelf = json.dumps(payload["stock"][payload["box"]])
answer = dspy.Predict("question -> answer")(question=f"{payload['question']} {shelf}").answer
Path(os.environ["RILLFLOW_ANSWER"]).write_text(str(answer))
