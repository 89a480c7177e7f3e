"""A judge of the tally for `bench.agentflow`, behind an OpenAI-compatible server on this machine.

It stands for a model that is stronger than the planner. It reads what `rillflow label --by judge` sends to any judge
(the state, the decision, the state afterwards) and knows nothing else of the task: neither the payload nor the answer.
It rates by the rubric of that prompt.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rillflow.agents.agentflow.models import ANSWER, Decision, parse

RIGHT, USELESS, WRONG = 1.0, 0.2, 0.0
MODEL = "tally-judge"
_PROMPT = re.compile(
    r"The agent was asked:\n(.*)\n\nIt decided:\n(.*)\n\n(The decision ended|Afterwards)(.*)", re.DOTALL
)
_QUESTION = re.compile(r"How many (\w+) are in (.*)\?")
_BOX = re.compile(r"the (\w+) box")
_STEP = re.compile(r"(\w+) ([^:]*): (.*)")
_LEFT = re.compile(r"(\d+) more")


def rate(prompt: str) -> float | None:
    """Return the score of the decision in a judge's prompt; None if the prompt cannot be read."""
    read = _PROMPT.search(prompt)
    asked, decision = (_QUESTION.match(read[1]), parse(read[2])) if read else (None, None)
    if read is None or asked is None or decision is None:
        return None
    needed = [f"{box} {asked[1]}" for box in _BOX.findall(asked[2])]
    done = {f"{step[1]} {step[2]}": step[3] for line in read[1].splitlines() if (step := _STEP.fullmatch(line))}
    left = _LEFT.fullmatch(read[1].splitlines()[-1])
    if left and left[1] == "1" and decision.action != ANSWER:
        return WRONG  # too late
    if f"{decision.action} {decision.action_input}: error" in read[4]:
        return WRONG
    found = {query: done[f"search {query}"] for query in needed if f"search {query}" in done}
    return _rate(decision, needed, found, done)


def _rate(decision: Decision, needed: list[str], found: Mapping[str, str], done: Mapping[str, str]) -> float:
    whole = len(found) == len(needed)
    if decision.action == "search":
        return RIGHT if decision.action_input in needed and decision.action_input not in found else USELESS
    if decision.action == "code":
        if f"code {decision.action_input}" in done or not whole:
            return USELESS
        return RIGHT if sorted(decision.action_input.split("+")) == sorted(found.values()) else WRONG
    if decision.action == ANSWER:
        cited, _, total = decision.action_input.partition("=")
        right = whole and sorted(cited.split("+")) == sorted(found.values())
        return RIGHT if right and total == str(sum(map(int, found.values()))) else WRONG
    return USELESS


class _Judge(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        score = rate(body["messages"][0]["content"])
        content = "I cannot read this." if score is None else json.dumps({"score": score})
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        whole = {"id": "1", "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice]}
        written = json.dumps(whole).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)

    def log_message(self, format: str, *arguments: object) -> None:
        """Keep the bench's own output readable."""


@contextmanager
def serving() -> Iterator[str]:
    """Serve the judge on a free port of the loopback interface; yield its URL up to and with /v1."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Judge)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
