"""The memory of one task: what was done and what came of it, as text for the next prompt.

`Memory` is what a workflow sees. Memories of earlier episodes stand behind the same methods (`episodes`), so a
workflow does not know which one it has.
"""

from __future__ import annotations

from typing import Protocol


class Memory(Protocol):
    """Of one episode, whose question `begin` tells. Nothing in it raises for what a model wrote."""

    async def begin(self, question: str) -> None:
        """Look up what is known about a question like this one."""

    def note(self, action: str, action_input: str, result: str) -> None:
        """One step that was taken."""

    def text(self) -> str:
        """The running state; empty before the first step where nothing was known before."""

    def copy(self) -> Memory:
        """Return a memory of the same state, to play on from it in another way."""

    async def end(self, answer: str | None) -> None:
        """The episode is over; `answer` is None where the agent found none by itself."""


class TaskMemory:
    """Only what happened in this episode, the last `steps` of it, each result cut to `longest` characters."""

    def __init__(self, *, steps: int = 16, longest: int = 1000) -> None:
        self._steps = steps
        self._longest = longest
        self._notes: list[str] = []

    async def begin(self, question: str) -> None:
        self._notes.clear()

    def note(self, action: str, action_input: str, result: str) -> None:
        self._notes.append(f"{action} {action_input}: {_cut(result, self._longest)}")

    def text(self) -> str:
        return "\n".join(self._notes[-self._steps :])

    def copy(self) -> TaskMemory:
        made = TaskMemory(steps=self._steps, longest=self._longest)
        made._notes = list(self._notes)
        return made

    async def end(self, answer: str | None) -> None:
        """Nothing outlives the task."""


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]} …"
