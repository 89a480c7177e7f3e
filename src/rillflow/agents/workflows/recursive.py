"""An agent that may delegate parts of its task to agents like itself, with which it shares a notebook.

An agent delegates by a tag (`<ask>…</ask>`) or by the tool `delegate`, as the recipe chooses. All tasks of one answer
are worked on concurrently, and the results come back in the order of the tasks. Notes (`<note>…</note>`, or the tool
`note`) are shown to every agent of the episode with its next message.

Invariants: an episode has at most `agents` agents, none deeper than `depth`, each with at most `turns` answers. An
agent that exceeds a bound reads an error; nothing is raised. All answers of an episode get the reward of the first
agent; with `credit: answers` each also gets its own (`trainer.step_rewards`).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from rillflow.agents.options import Fill, filler, read_options
from rillflow.agents.workflows.multi_policy import Check, Options, checker, problem_of
from rillflow.config.base import NonNegative

if TYPE_CHECKING:
    from rillflow.contracts import Episode
    from rillflow.types import Said

ROLE = "agent"
PROMPTS = {
    "tag": (
        "Do the task below. You may hand parts of it to helpers: write <ask>a task of its own</ask> for each, and wait"
        " for the results. A helper sees only its task and the notes. <note>text</note> keeps something for everybody."
        " When you are done, write <answer>your result</answer>.\n\nTask:\n{question}{notes}"
    ),
    "tool": (
        "Do the task below. You may hand parts of it to helpers with `delegate`; a helper sees only its task and the"
        " notes, which anybody adds to with `note`. When you are done, write your result and nothing else.\n\n"
        "Task:\n{question}{notes}"
    ),
    "results": "{results}{notes}",
    "result": "<result>{result}</result>",
    "note": "\n<note>{note}</note>",
}
NOBODY = "error: no helper is free for this; do it yourself"
_NO_ANSWER = "error: it gave no answer"
_ASK = re.compile(r"<ask>(.*?)</ask>", re.DOTALL)
_NOTE = re.compile(r"<note>(.*?)</note>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LONGEST_NOTE = 2000


def _tool(name: str, about: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


TOOLS = [
    _tool("delegate", "Hand a task of its own to a helper and get its result.", "task"),
    _tool("note", "Keep a note that all helpers read.", "text"),
]


class RecursiveOptions(Options):
    """The options of the workflow `recursive`."""

    by: Literal["tag", "tool"] = Field("tag", description="how an agent asks for help")
    depth: NonNegative = Field(2, description="how deep helpers of helpers go; 0: nobody has any")
    agents: Annotated[int, Field(ge=1, le=64)] = Field(8, description="most agents of an episode, the first included")
    turns: Annotated[int, Field(ge=1, le=64)] = Field(4, description="most answers of one agent")
    notes: NonNegative = Field(16, description="most notes of an episode")
    credit: Literal["outcome", "answers"] = Field(
        "outcome",
        description="outcome: every sample gets the episode's reward; answers: besides, every answer gets it by "
        "itself, or 0 where it neither asked nor answered; needs trainer.step_rewards",
    )


@dataclass
class Team:
    """The shared state of the agents of one episode."""

    episode: Episode
    options: RecursiveOptions
    fill: Fill
    check: Check
    notebook: list[str] = field(default_factory=list)
    said: list[tuple[Said, bool]] = field(default_factory=list)  # every answer, and whether it had a tag or a call
    agents: int = 0

    def hire(self, depth: int) -> bool:
        """Count one more agent at this depth and return True, or return False if a bound is reached."""
        if depth > self.options.depth or self.agents >= self.options.agents:
            return False
        self.agents += 1
        return True

    def note(self, text: str) -> str:
        """Add a note and return the reply for the agent."""
        if len(self.notebook) >= self.options.notes:
            return "error: the notebook is full"
        self.notebook.append(text.strip()[:_LONGEST_NOTE])
        return "noted"


async def play(episode: Episode) -> float:
    """Play one episode; its role is agent. The payload has `question` (or `problem`) and what `check` compares with."""
    options = read_options("options", episode.options, RecursiveOptions)
    team = Team(episode, options, filler(PROMPTS, options.prompts), checker(episode, options.check))
    team.hire(0)
    answer = await Agent(team, 0).work(problem_of(episode))
    worth = await team.check(answer or "")
    episode.metric("agents", team.agents)
    episode.metric("notes", len(team.notebook))
    if options.credit == "answers":
        for said, useful in team.said:
            episode.reward(worth if useful else 0.0, call=said.call)
    return worth


class Agent:
    """One agent of the team, with its own conversation."""

    def __init__(self, team: Team, depth: int) -> None:
        self._team = team
        self._depth = depth
        self._read = 0  # notes
        self._messages: list[dict[str, Any]] = []

    async def work(self, task: str) -> str | None:
        """Work on a task and return the result, or None if the turns end without one."""
        team, by_tool = self._team, self._team.options.by == "tool"
        self._say(team.fill(team.options.by, question=task, notes=self._news()))
        settings = team.options.settings.get(ROLE, {}) | (
            {"tools": [*TOOLS, *team.episode.tools.schemas]} if by_tool else {}
        )
        for _ in range(team.options.turns):
            said = await team.episode.role(ROLE).ask(self._messages, **settings)
            answer = _answer_of(said, by_tool)
            for note in [] if by_tool else _NOTE.findall(said.text):
                team.note(note)
            wants = bool(said.uses) if by_tool else bool(_ASK.search(said.text) or _NOTE.search(said.text))
            team.said.append((said, answer is not None or wants))
            if answer is not None or not wants:
                return answer
            self._messages.append(said.message)
            await (self._serve_tools(said) if by_tool else self._serve_tags(said.text))
        return None

    async def _serve_tags(self, text: str) -> None:
        results = await together(self._delegate(task) for task in _ASK.findall(text))
        parts = [self._team.fill("result", result=result) for result in results]
        self._say(self._team.fill("results", results="".join(parts), notes=self._news()))

    async def _serve_tools(self, said: Said) -> None:
        results = await together(self._use(use.name, use.arguments) for use in said.uses)
        news = self._news()  # added to the last result: no message may stand between a call and its result
        for place, (use, result) in enumerate(zip(said.uses, results, strict=True), 1):
            content = result + (news if place == len(said.uses) else "")
            self._messages.append({"role": "tool", "tool_call_id": use.id, "content": content})

    async def _use(self, name: str, arguments: str) -> str:
        """Call a tool of the team or of the recipe; a wrong call returns an error text."""
        if name not in ("delegate", "note"):
            return await self._team.episode.tools.call(name, arguments, self._team.episode)
        key = "task" if name == "delegate" else "text"
        try:
            value = json.loads(arguments)[key]
        except (ValueError, TypeError, KeyError, RecursionError):
            value = None
        if not isinstance(value, str):
            return f"error: {name} takes {{{key!r}: text}}"
        return await self._delegate(value) if name == "delegate" else self._team.note(value)

    async def _delegate(self, task: str) -> str:
        if not task.strip() or not self._team.hire(self._depth + 1):
            return NOBODY
        return await Agent(self._team, self._depth + 1).work(task.strip()) or _NO_ANSWER

    def _say(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def _news(self) -> str:
        """Return the notes that this agent has not read."""
        fresh = self._team.notebook[self._read :]
        self._read += len(fresh)
        return "".join(self._team.fill("note", note=note) for note in fresh)


def _answer_of(said: Said, by_tool: bool) -> str | None:
    if by_tool:
        return None if said.uses else said.text.strip() or None
    found = _ANSWER.findall(said.text)
    return found[-1].strip() if found else None


async def together(works: Iterable[Awaitable[str]]) -> list[str]:
    """Return all results in order. The first failure is raised, after the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
