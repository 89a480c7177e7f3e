"""GRESO: prompts whose groups keep coming back without variance are played less often, before anything is generated.

A prompt that had z such rounds in a row is played with the probability max(p ** z, floor) of its kind, easy (all
episodes well) or hard. After the first full pass over the prompts p is steered, version by version, so that the
share of groups without variance comes to a target.
"""

from __future__ import annotations

from statistics import fmean
from typing import Literal

from rillflow.config.base import NonNegative
from rillflow.contracts import Group
from rillflow.dataflow.hooks.keyed import KeyedState, of_prompt
from rillflow.dataflow.hooks.options import Share, options
from rillflow.dataflow.rules import derive_seed
from rillflow.types import Prompt

KindOfPrompt = Literal["easy", "hard"]
KINDS: tuple[KindOfPrompt, ...] = ("easy", "hard")
LOWEST, HIGHEST = 0.01, 0.99
_MARKS = 64  # first prompts of a source that are remembered, to see that its second pass has begun
_PASSED = "passed"


class Greso(KeyedState):
    """Of a prompt it keeps (z, kind, draws), and nothing while it had variance ever since.

    Every complete group is a round of its own, in the order in which groups end, however many of a prompt are in
    flight. A draw depends on the seed, the prompt and how many draws the prompt had before, on nothing else.
    """

    @options
    def __init__(
        self,
        *,
        seed: NonNegative = 0,
        easy_above: float = 0.5,
        start: Share = 0.5,
        step: Share = 0.01,
        target_easy: Share = 0.083,
        target_hard: Share = 0.167,
        floor_easy: Share = 0.05,
        floor_hard: Share = 0.30,
    ) -> None:
        super().__init__()
        self._seed, self._easy_above, self._start, self._step = seed, easy_above, start, step
        self._targets: dict[KindOfPrompt, float] = {"easy": target_easy, "hard": target_hard}
        self._floors: dict[KindOfPrompt, float] = {"easy": floor_easy, "hard": floor_hard}

    def probability(self, kind: KindOfPrompt) -> float:
        """p of this kind now."""
        return float(self.get(f"p_{kind}", self._start))

    def admit(self, prompt: Prompt) -> bool:
        self._mark(prompt)
        z, kind, draws = self.get(of_prompt(prompt.id), (0, "hard", 0))
        if z == 0:
            return True
        self.put(of_prompt(prompt.id), [z, kind, draws + 1])
        draw = derive_seed(self._seed, "greso", prompt.id, draws) / 2**53
        return bool(draw < max(self.probability(kind) ** z, self._floors[kind]))

    def observe(self, group: Group) -> None:
        if len(group.rewards) < 2:
            return  # nothing to take a variance of
        flat = group.flat
        kind: KindOfPrompt = "easy" if fmean(group.rewards) > self._easy_above else "hard"
        self._count("groups", *([kind] if flat else []))
        z, before, draws = self.get(of_prompt(group.prompt.id), (0, kind, 0))
        z = 0 if not flat else z + 1 if kind == before else 1
        self.put(of_prompt(group.prompt.id), [z, kind, draws] if z or draws else None)

    def _count(self, *what: str) -> None:
        tally = self.get("tally", {})
        self.put("tally", tally | {each: tally.get(each, 0) + 1 for each in what})

    def on_version(self, version: int) -> None:
        """Steer by what was seen under the version before; where nothing was seen there is nothing to steer by."""
        tally = self.get("tally", {})
        self.put("tally", None)
        if not self.get("armed") or not tally:
            return
        for kind in KINDS:
            often = tally.get(kind, 0) / tally["groups"] >= self._targets[kind]
            moved = self.probability(kind) + (-self._step if often else self._step)
            self.put(f"p_{kind}", min(max(moved, LOWEST), HIGHEST))

    def _mark(self, prompt: Prompt) -> None:
        """Armed once every source seen so far has begun its second pass: one of its first prompts came again."""
        if self.get("armed"):
            return
        sources = self.get("sources", {})
        first = sources.get(prompt.source, [])
        if first == _PASSED:
            return
        if prompt.id in first:
            sources = sources | {prompt.source: _PASSED}
        elif len(first) < _MARKS:
            sources = sources | {prompt.source: [*first, prompt.id]}
        done = all(marks == _PASSED for marks in sources.values())
        self.put("armed", True if done else None)
        self.put("sources", None if done else sources)
