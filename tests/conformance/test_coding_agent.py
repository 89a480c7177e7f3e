"""mini-swe-agent repairs a program through the gateway: real bash, real observations, its own rule for the end.

The model is real too, but small: a copy of the tiny policy that has learnt this one repair by heart (`teaching`).
mini-swe-agent runs the commands that it samples, and it reads the answers of bash.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_play import SCRIPTS, play, python_of
from teaching import Lesson, calls, taught

from engine_log import trained_turns
from rillflow.config import SamplingConfig

pytestmark = pytest.mark.agents

TASK = "The test of calc.py fails. Please repair calc.py."
BROKEN = "def add(a, b):\n    return a - b\n"
TEST = "from calc import add\n\nassert add(2, 3) == 5\nprint('passed')\n"
BASH = [{"type": "function", "function": {"name": "bash", "parameters": {"properties": {"command": {}}}}}]
COMMANDS = (
    "cat calc.py",
    "sed -i 's/a - b/a + b/' calc.py",
    "python3 test_calc.py",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat calc.py",
)


def observed(output: str) -> dict[str, str]:
    return {"role": "tool", "content": f"<returncode>0</returncode>\n<output>\n{output}</output>"}


LESSON = Lesson(
    BASH,
    [
        {"role": "system", "content": "You can use bash."},
        {"role": "user", "content": TASK},
        calls("bash", command=COMMANDS[0]),
        observed(BROKEN),
        calls("bash", command=COMMANDS[1]),
        observed(""),
        calls("bash", command=COMMANDS[2]),
        observed("passed\n"),
        calls("bash", command=COMMANDS[3]),
    ],
)


async def test_mini_swe_agent_repairs_a_program(tmp_path: Path) -> None:
    command = [python_of("mini-swe-agent"), SCRIPTS / "mini_swe_agent.py"]
    work = tmp_path / "work"
    work.mkdir()
    (work / "calc.py").write_text(BROKEN)
    (work / "test_calc.py").write_text(TEST)
    played = await play(
        command,
        {"task": TASK},
        taught([LESSON]),
        tmp_path,
        sampling=SamplingConfig(temperature=0),
        context=512,
    )
    played.check()
    (episode,) = played.told
    assert [call[2]["command"] for turn in episode for call in turn["calls"]] == list(COMMANDS)
    (sample,) = played.samples
    assert len(trained_turns(sample)) == len(COMMANDS)
    (entry,) = played.record.transcript()
    assert [message["content"] for message in entry["messages"] if message["role"] == "tool"] == [
        message["content"] for message in LESSON.messages if message["role"] == "tool"
    ]
    assert (work / "calc.py").read_text() == BROKEN.replace("-", "+")
