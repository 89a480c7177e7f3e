"""`mini-swe-agent`, the coding agent, by its own command: real bash in the folder where it is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from stockroom import MODEL, report, turn

HERE = Path(__file__).resolve().parent
SETTINGS = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}


def told(message: dict[str, Any]) -> dict[str, Any]:
    calls = [(call["id"], call["function"]) for call in message["tool_calls"] or ()]
    return turn(message["content"], [(id, called["name"], called["arguments"]) for id, called in calls])


task = json.load(sys.stdin)["task"]
trajectory = Path("trajectory.json")
subprocess.run(
    [
        Path(sys.executable).with_name("mini"),
        "--yolo",
        "--exit-immediately",
        *("--task", task),
        *("--model", f"openai/{MODEL}"),
        *("--config", HERE / "mini_swe_agent.yaml"),
        *("--output", trajectory),
    ],
    env=os.environ | SETTINGS,
    stdin=subprocess.DEVNULL,
    check=True,
    timeout=60,
)
left = json.loads(trajectory.read_text())
assert left["info"]["exit_status"] == "Submitted", left["info"]
report([[told(message) for message in left["messages"] if message["role"] == "assistant"]])
