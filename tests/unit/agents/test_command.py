"""A command agent: its environment, its results, and that no process or file stays."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from commands import wait_until
from rillflow.agents.command import AgentFailed, CommandAgent, words_of
from rillflow.config.rollout import CommandConfig
from rillflow.engine.reaper import Reaper
from rillflow.errors import ConfigError
from rillflow.types import Prompt

SECRETS = {"RILLFLOW_TOKEN": "run-token", "HF_TOKEN": "hub", "OPENAI_API_KEY": "the-user's", "RILLFLOW_PARENT": "1"}
HOLDS = "import subprocess, sys, time, pathlib\n"


def episode(payload: dict[str, Any] | None = None) -> Any:
    payload = payload or {"question": "how many?"}
    return SimpleNamespace(
        prompt=Prompt(id="p1", payload=payload),
        payload=payload,
        model="agent",
        policies=["agent", "critic"],
        base_url="http://127.0.0.1:9/s/t1-1/v1",
        anthropic_url="http://127.0.0.1:9/s/t1-1",
        api_key="session-key",
        seed=7,
        seconds_left=lambda: 12.5,
    )


class World:
    """Runs pieces of Python as agents."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: list[CommandAgent] = []

    def agent(self, code: str, **options: Any) -> CommandAgent:
        script = self.folder / f"agent-{len(self.agents)}.py"
        script.write_text(code)
        config = CommandConfig(run=shlex.join([sys.executable, str(script)]), **options)
        base = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere", **SECRETS}
        self.agents.append(CommandAgent(config, self.folder / "own", base))
        return self.agents[-1]

    @property
    def left_over(self) -> list[Path]:
        return list((self.folder / "own").iterdir())


@pytest.fixture
def world(tmp_path: Path) -> Any:
    world = World(tmp_path)
    yield world
    for agent in world.agents:
        agent.close()


async def test_what_the_program_gets(world: World) -> None:
    agent = world.agent(
        "import json, os, pathlib, sys\n"
        "task = json.loads(pathlib.Path(os.environ['RILLFLOW_TASK']).read_text())\n"
        "seen = {'env': dict(os.environ), 'task': task, 'stdin': json.load(sys.stdin), 'cwd': os.listdir('.')}\n"
        "pathlib.Path(os.environ['RILLFLOW_ANSWER']).write_text(json.dumps(seen))\n"
        "print('said'); print('complained', file=sys.stderr)\n",
        environment={"MY_FLAG": "on"},
    )
    left = await agent(episode({"n": 3}))
    assert (left["returncode"], left["stdout"], left["stderr"]) == (0, "said\n", "complained\n")
    seen = json.loads(left["answer"])
    assert seen["stdin"] == {"n": 3}
    assert seen["cwd"] == []
    assert seen["task"] == {
        "prompt": {"id": "p1", "payload": {"n": 3}}, "policies": ["agent", "critic"], "model": "agent", "seed": 7,
        "seconds": 12.5,
    }  # fmt: skip
    environment = seen["env"]
    expected = {
        "OPENAI_BASE_URL": "http://127.0.0.1:9/s/t1-1/v1",
        "OPENAI_API_KEY": "session-key",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9/s/t1-1",
        "ANTHROPIC_API_KEY": "session-key",
        "RILLFLOW_MODEL": "agent",
        "RILLFLOW_SEED": "7",
        "RILLFLOW_SESSION": "t1-1",
        "RILLFLOW_REWARD_URL": "http://127.0.0.1:9/s/t1-1/reward",
        "MY_FLAG": "on",
    }
    assert environment["HOME"] != "/nowhere"
    assert {name: environment.get(name) for name in expected} == expected
    assert not world.left_over


async def test_each_episode_has_a_home_of_its_own(world: World) -> None:
    """DSPy's cache under a shared home answered the later episodes of a group with the first one's text."""
    code = (
        "import os, pathlib; cache = pathlib.Path.home() / '.cache' / 'client'; print(cache.exists());"
        "cache.mkdir(parents=True)"
    )
    agent = world.agent(code)
    assert [(await agent(episode()))["stdout"] for _ in range(2)] == ["False\n", "False\n"]
    assert not world.left_over
    kept = world.agent("import os; print(os.environ['HOME'])", environment={"HOME": "/mine"})
    assert (await kept(episode()))["stdout"] == "/mine\n"


async def test_nothing_secret_of_ours_reaches_the_program(world: World) -> None:
    left = await world.agent("import os; print(dict(os.environ))")(episode())
    for secret in SECRETS.values():
        assert f"'{secret}'" not in left["stdout"]


async def test_a_program_that_fails_says_why(world: World) -> None:
    agent = world.agent("import sys; print('no such tool', file=sys.stderr); sys.exit(4)")
    with pytest.raises(AgentFailed, match=r"code 4: no such tool"):
        await agent(episode())
    assert not world.left_over


async def test_without_an_answer_file_there_is_no_answer(world: World) -> None:
    assert (await world.agent("print('only this')")(episode()))["answer"] is None


async def test_output_is_bounded_and_its_end_is_kept(world: World) -> None:
    code = "import os, sys\nfor n in range(3000): sys.stdout.write('x' * 1000)\nprint('the end')\n"
    code += "open(os.environ['RILLFLOW_ANSWER'], 'w').write('y' * 5000)\n"
    left = await world.agent(code, output=1000)(episode())
    assert len(left["stdout"]) == 1000
    assert left["stdout"].endswith("xxx" + "the end\n")
    assert len(left["answer"]) == 1000


async def test_what_is_not_text_is_still_shown(world: World) -> None:
    left = await world.agent("import sys; sys.stdout.buffer.write(b'\\xff\\xfe ok')")(episode())
    assert left["stdout"].endswith(" ok")


SPAWNS = (
    HOLDS + "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "pathlib.Path({note!r}).write_text(str(child.pid))\n"
)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def written(path: Path) -> int:
    await asyncio.to_thread(wait_until, lambda: path.is_file() and path.read_text(), "the child", 60)
    return int(path.read_text())


async def test_a_cancelled_episode_takes_its_whole_group_along(world: World, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    agent = world.agent(SPAWNS.format(note=str(note)) + "time.sleep(600)\n")
    playing = asyncio.create_task(agent(episode()))
    child = await written(note)
    parent = psutil.Process(child).ppid()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await asyncio.to_thread(wait_until, lambda: not alive(child) and not alive(parent), "the group's end", 60)
    assert not world.left_over


async def test_children_that_outlive_the_program_are_killed(world: World, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    await asyncio.wait_for(world.agent(SPAWNS.format(note=str(note)))(episode()), 60)
    await asyncio.to_thread(wait_until, lambda: not alive(int(note.read_text())), "the child's end", 60)


async def test_a_child_that_left_the_group_holds_nobody_up(world: World, tmp_path: Path) -> None:
    """It is not ours to kill, as the documentation says, but the pipe that it holds is not waited for."""
    note = tmp_path / "pid"
    code = SPAWNS.format(note=str(note)).replace("600)'])", "600)'], start_new_session=True)")
    await asyncio.wait_for(world.agent(code)(episode()), 60)
    psutil.Process(int(note.read_text())).kill()


def test_the_program_dies_with_the_node(world: World, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = (
        "import asyncio, pathlib, sys; from rillflow.agents.command import CommandAgent\n"
        "from rillflow.config.rollout import CommandConfig; sys.path.insert(0, sys.argv[1])\n"
        "from test_command import episode\n"
        "agent = CommandAgent(CommandConfig(run=sys.argv[2]), pathlib.Path(sys.argv[3]))\n"
        "asyncio.run(agent(episode()))\n"
    )
    script = tmp_path / "holds.py"
    script.write_text(SPAWNS.format(note=str(note)) + "time.sleep(600)\n")
    command = shlex.join([sys.executable, str(script)])
    here = str(Path(__file__).parent)
    tests = str(Path(__file__).parents[2])
    node = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n{code}", here, command, str(tmp_path / "n")]
    )
    try:
        wait_until(lambda: note.is_file() and note.read_text(), "the child", 60)
        child = int(note.read_text())
        assert alive(child)
    finally:
        node.kill()
        node.wait(60)
    wait_until(lambda: not alive(child), "the child's end", 60)


def test_a_reaper_that_was_killed_is_replaced() -> None:
    reaper = Reaper()
    held = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    reaper.watch(held.pid)
    assert reaper._process is not None
    reaper._process.kill()
    reaper._process.wait(60)
    reaper.watch(held.pid)
    assert reaper._process.poll() is None
    reaper.close()
    assert held.wait(60) != 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run": "no-such-program --x"}, "no program 'no-such-program'"),
        ({"run": "sh -c 'unclosed"}, "No closing quotation"),
        ({"run": "   "}, "no program ''"),
        ({"run": "sh", "folder": "/no/such/folder"}, "is not a folder"),
    ],
)
def test_commands_that_cannot_be_started_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        words_of(CommandConfig(**options))


async def test_a_program_that_vanished_is_the_agents_failure(world: World, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    agent = CommandAgent(CommandConfig(run=str(program)), tmp_path / "own")
    program.unlink()
    with pytest.raises(AgentFailed, match="could not be started"):
        await agent(episode())
    agent.close()


def test_what_a_dead_node_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "own" / "old").mkdir(parents=True)
    CommandAgent(CommandConfig(run="sh"), tmp_path / "own")
    assert list((tmp_path / "own").iterdir()) == []


@pytest.mark.parametrize("made", ["os.mkfifo(answer)", "os.mkdir(answer)", "os.symlink('/dev/zero', answer)"])
async def test_an_answer_that_is_no_file_is_none(world: World, made: str) -> None:
    """A pipe without a writer would block the whole node."""
    agent = world.agent(f"import os\nanswer = os.environ['RILLFLOW_ANSWER']\n{made}\n")
    helped: list[Path] = []

    def help_out() -> None:
        helped.extend(path / "answer" for path in world.left_over)
        for pipe in helped:
            os.close(os.open(pipe, os.O_RDWR))

    help_later = threading.Timer(60.0, help_out)  # a node that hangs fails this test, and holds no other up
    help_later.start()
    left = await agent(episode())
    help_later.cancel()
    assert left["answer"] is None
    assert not helped


async def test_of_a_long_answer_the_end_is_kept(world: World) -> None:
    agent = world.agent(
        "import os, pathlib\npathlib.Path(os.environ['RILLFLOW_ANSWER']).write_text('x' * 5000 + 'the end')\n",
        output=1024,
    )
    answer = (await agent(episode()))["answer"]
    assert (len(answer), answer[-7:]) == (1024, "the end")


async def test_a_pipe_that_could_not_be_made_leaves_none_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, made, pipe = world.agent("print('said')"), [], os.pipe

    def one_only() -> tuple[int, int]:
        if made:
            raise OSError(24, "Too many open files")
        made.append(pipe())
        return made[0]

    monkeypatch.setattr(os, "pipe", one_only)
    with pytest.raises(AgentFailed, match="Too many open files"):
        await agent(episode())
    await asyncio.sleep(0)
    for descriptor in made[0]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_folder_that_cannot_be_emptied_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may leave files that belong to another user."""
    (tmp_path / "own" / "foreign").mkdir(parents=True)
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors: None)
    CommandAgent(CommandConfig(run="python -V"), tmp_path / "own").close()


async def test_a_program_that_cannot_be_watched_over_is_killed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, started = world.agent("import time\ntime.sleep(600)\n"), []

    def fails(reaper: Reaper, group: int) -> None:
        started.append(group)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Reaper, "watch", fails)
    with pytest.raises(OSError, match="Too many"):
        await agent(episode())
    await asyncio.to_thread(wait_until, lambda: not psutil.pid_exists(started[0]), "its end", 60)


def test_folders_that_episodes_have_left_go_with_the_agent(tmp_path: Path) -> None:
    agent = CommandAgent(CommandConfig(run="true"), tmp_path / "agents")
    (tmp_path / "agents" / "left" / "work").mkdir(parents=True)
    agent.close()
    assert list((tmp_path / "agents").iterdir()) == []
