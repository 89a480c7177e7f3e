"""Labels of a judge, over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rillflow.agents.agentflow.actions import Decision
from rillflow.agents.agentflow.collect import Played
from rillflow.agents.agentflow.judge import label_by_judge
from rillflow.agents.agentflow.options import Endpoint

EPISODES = [
    Played(f"t{number}", "p", "How many?", (Decision("a", "search", "pens"), Decision("b", "answer", "12")), 1.0)
    for number in range(4)
]


class Judge(BaseHTTPRequestHandler):
    """Says 0.7, over connections that stay open; none is given up while it is at work."""

    protocol_version = "HTTP/1.1"
    asked = 0

    def do_POST(self) -> None:
        Judge.asked += 1
        self.rfile.read(int(self.headers["content-length"]))
        message = {"role": "assistant", "content": '{"score": 0.7}'}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    Judge.asked = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Endpoint(url=f"http://127.0.0.1:{server.server_port}/v1", model="m")
    server.shutdown()
    server.server_close()


def test_each_call_may_have_an_event_loop_of_its_own(endpoint: Endpoint) -> None:
    """As `rillflow label --by judge --heldout` does it: one for each file."""
    for _ in range(2):
        rows, missing = asyncio.run(label_by_judge(EPISODES, endpoint))
        assert missing == 0
        assert [[step["label"] for step in row["steps"]] for row in rows] == [[0.7, 0.7]] * 4
    assert Judge.asked == 16, "every step once, none of them paid for again"
