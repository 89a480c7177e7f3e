"""The stockroom with CrewAI. Run by `crewai.yaml`, once for each episode."""

import json
import os
import sys
from pathlib import Path

from crewai import LLM, Agent, Crew, Task


def answer(payload: dict, base_url: str, api_key: str, model: str) -> str:
    """Return what a crew of one says to the question."""
    # With `openai/` and a base URL CrewAI takes any name of a model.
    llm = LLM(model=f"openai/{model}", base_url=base_url, api_key=api_key, max_tokens=32)
    clerk = Agent(role="clerk", goal="count", backstory="You count.", llm=llm, max_iter=2)
    shelf = json.dumps(payload["stock"][payload["box"]])
    task = Task(description=f"{payload['question']} {shelf}", expected_output="a number", agent=clerk)
    return str(Crew(agents=[clerk], tasks=[task]).kickoff())


if __name__ == "__main__":
    where = (os.environ[name] for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"))
    Path(os.environ["RILLFLOW_ANSWER"]).write_text(answer(json.load(sys.stdin), *where))
