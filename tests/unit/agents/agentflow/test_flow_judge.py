"""Labels of a judge, over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from rillflow.agents.agentflow.labels import Played, Visited, by_judge
from rillflow.agents.agentflow.models import Decision
from rillflow.agents.agentflow.options import Endpoint

LOOK, ANSWER = Decision("a", "search", "pens"), Decision("b", "answer", "12")
EPISODES = [
    Played(
        f"t{number}",
        f"p{number}",
        "How many?",
        [Visited("How many?", [(LOOK, None)]), Visited("How many?\nsearch pens: 12", [(ANSWER, None)])],
        1.0,
    )
    for number in range(4)
]


class Judge(BaseHTTPRequestHandler):
    """Says 0.7, over connections that stay open; none is given up while it is at work."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Judge.asked.append(body["messages"][0]["content"])
        message = {"role": "assistant", "content": '{"score": 0.7}'}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        written = json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(written)))
        self.end_headers()
        self.wfile.write(written.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    Judge.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Endpoint(url=f"http://127.0.0.1:{server.server_port}/v1", model="m")
    server.shutdown()
    server.server_close()


def test_each_call_may_have_an_event_loop_of_its_own_and_the_judge_sees_the_result(endpoint: Endpoint) -> None:
    for _ in range(2):
        labels, missing = asyncio.run(by_judge(EPISODES, endpoint))
        assert missing == 0
        assert set(labels.values()) == {0.7}
        assert len(labels) == 8
    assert len(Judge.asked) == 16, "every decision once, none of them paid for again"
    of_look = [asked for asked in Judge.asked if LOOK.written() in asked]
    assert all(asked.endswith("search pens: 12") for asked in of_look)
