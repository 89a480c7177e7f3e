"""Many episodes in one process: CrewAI is imported once, then tasks come from the gateway until the run ends.

python crewai_outside.py URL RUN/run.json      (`rillflow run` prints where agents connect)
"""

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from crewai_agent import answer

_ENDED = 410


def post(url: str, body: dict[str, Any], key: str) -> Any:
    """Return the gateway's answer; None where it has no task now."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        return json.load(reply) if reply.status == 200 else None


def main(url: str, run: str) -> None:
    token = json.loads(Path(run).read_text())["token"]
    while True:
        try:
            task = post(f"{url}/sessions", {"wait": 30}, token)
        except urllib.error.HTTPError as error:
            if error.code == _ENDED:
                return
            raise
        if task is None:
            continue
        try:
            said = answer(task["prompt"]["payload"], task["base_url"], task["api_key"], task["model"])
        except Exception as error:  # whatever CrewAI makes of an answer that it cannot use
            end = {"error": f"{type(error).__name__}: {error}"}
        else:
            end = {"answer": said}
        print(task["session"], post(f"{task['anthropic_url']}/end", end, token), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
