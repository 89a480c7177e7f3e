"""Agents that were not written for us, trained for real: as a command, and from outside while their node is killed."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from commands import Cli, Started, processes_of, steps_of, wait_until

SHORT = ["trainer.steps=3", "trainer.batch_groups=2", "data.heldout=null"]


def audited(cli: Cli, folder: Path) -> dict[str, Any]:
    report = json.loads(cli.run("audit", str(folder), "--json").output())
    assert report["balanced"], report
    return dict(report)


@pytest.mark.slow
def test_a_command_is_trained(cli: Cli) -> None:
    run = cli.run("run", "command_agent", *SHORT, "trainer.steps=2", "dataflow.group_size=2", "dataflow.filters=[]")
    assert json.loads((run.folder / "summary.json").read_text())["steps"] == 2
    assert not audited(cli, run.folder)["counts"].get("failed")
    assert list((run.folder / "gateway" / "rollout-0" / "agents").iterdir()) == []


class Door:
    """The gateway for agents from outside, used without any client of ours."""

    def __init__(self, run: Started) -> None:
        wait_until(lambda: "agents connect at" in run.output(), "the gateway", 600)
        self.url = json.loads((run.folder / "endpoints" / "rollout-0.json").read_text())["url"]
        self._token = json.loads((run.folder / "run.json").read_text())["token"]

    def post(self, path: str, body: Any) -> Any:
        headers = {"authorization": f"Bearer {self._token}", "content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers, method="POST")
        with urllib.request.urlopen(request, timeout=120) as response:
            assert response.status == 200
            return json.loads(response.read())


@contextmanager
def fleet(run: Started, url: str) -> Iterator[Path]:
    """The shipped agent, in its own process; it must end without a signal."""
    log = run.runs.parent / "agent.log"
    script = "rillflow.examples.stockroom_outside"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", script, url, str(run.folder / "run.json"), "--capacity", "4"],
            stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ),
        )  # fmt: skip
    try:
        yield log
        assert process.wait(120) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait(120)


@pytest.mark.slow
def test_a_session_goes_on_when_its_node_is_killed(cli: Cli) -> None:
    """The agent sees slower answers, no error; its calls before and after the kill are one trained sample."""
    # On-policy: the first batch needs the group of this session, so the run cannot end before its agent comes back.
    run = cli.start("run", "outside_agent", *SHORT, "dataflow.filters=[]", "dataflow.staleness=0")
    door = Door(run)
    task = door.post("/sessions", {"wait": 60})
    client = OpenAI(base_url=task["base_url"], api_key=task["api_key"], max_retries=40)
    messages: list[Any] = [{"role": "user", "content": task["prompt"]["payload"]["question"]}]
    with client, fleet(run, door.url) as log:
        first = client.chat.completions.create(model=task["model"], messages=messages, max_tokens=8)
        wait_until(lambda: log.read_text().count("taken") >= 2, "the other agents", 600)
        processes_of(run.folder)["rollout"].kill()
        # A tool call goes back as text; the sampled ids stay the same.
        said = first.choices[0].message.model_dump(exclude_none=True)
        more = (
            [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in said.get("tool_calls", [])]
            or [{"role": "user", "content": "Are you sure?"}]
        )  # fmt: skip
        second = client.chat.completions.create(model=task["model"], messages=[*messages, said, *more], max_tokens=8)
        ended = door.post(f"/s/{task['session']}/end", {"answer": second.choices[0].message.content or ""})
        assert ended == {"session": task["session"], "accepted": True, "reason": ""}
        assert steps_of(run.folder) < 3, "killed too late to show anything"
        assert run.wait(600) == 0, run.output()[-4000:]
    audited(cli, run.folder)
    assert "goes on" in (run.folder / "logs" / "rollout-0.log").read_text()
    tokens = sum(answer.usage.completion_tokens for answer in (first, second) if answer.usage)
    with sqlite3.connect(run.folder / "ledger.sqlite") as ledger:
        query = (
            "SELECT a.state, s.state, (SELECT sum(trained) FROM samples x WHERE x.grp = t.grp AND x.place = t.place) "
            "FROM attempts a JOIN tasks t ON t.grp = a.grp AND t.place = a.place JOIN shares s ON s.grp = t.grp "
            "WHERE a.id = ?"
        )
        assert ledger.execute(query, (task["session"],)).fetchall() == [("done", "trained", tokens)]
        failed = ledger.execute("SELECT id, cause FROM attempts WHERE state = 'failed'").fetchall()
    ledger.close()
    # A task that was handed out at the moment of the kill may have reached no agent: it times out and is played again.
    told = log.read_text()
    assert all(cause == "timeout" and f"{attempt}:" not in told for attempt, cause in failed), (failed, told[-3000:])
