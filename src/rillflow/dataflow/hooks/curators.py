"""Curators decide which prompts are played."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Annotated, Literal, TypeGuard

from pydantic import Field

from rillflow.config.base import NonNegative, Positive
from rillflow.contracts import Group
from rillflow.dataflow.hooks.base import KeyedState, Share, Weight, of_prompt, options
from rillflow.dataflow.rules import derive_seed
from rillflow.types import Prompt

KindOfPrompt = Literal["easy", "hard"]
KINDS: tuple[KindOfPrompt, ...] = ("easy", "hard")
LOWEST, HIGHEST = 0.01, 0.99
_MARKS = 64  # first prompts of a source that are remembered, to see that its second pass has begun
_PASSED = "passed"
_ROUNDING = 1e-9


class Curriculum(KeyedState):
    """Easy prompts first: a prompt is played while its difficulty is at most a limit that rises with the versions.

    The difficulty is a number in the prompt's payload, or is learnt: 1 minus the mean reward of its latest group. A
    prompt of unknown difficulty is played. A learnt difficulty is kept if it is above `start`.
    """

    @options
    def __init__(self, *, start: float, end: float, versions: Positive, key: str | None = None) -> None:
        super().__init__()
        if end < start:
            raise ValueError(f"the limit rises: end must be at least start ({start}), not {end}")
        self._start, self._end, self._versions, self._key = start, end, versions, key

    @property
    def limit(self) -> float:
        """The most difficulty that is admitted now; `end` from `versions` on."""
        done = min(self.get("version", 0) / self._versions, 1.0)
        return self._end if done == 1.0 else self._start + (self._end - self._start) * done

    def admit(self, prompt: Prompt) -> bool:
        found = self.get(of_prompt(prompt.id)) if self._key is None else prompt.payload.get(self._key)
        return not _is_number(found) or found <= self.limit

    def observe(self, group: Group) -> None:
        if self._key is None:
            difficulty = 1.0 - fmean(group.rewards)
            self.put(of_prompt(group.prompt.id), difficulty if difficulty > self._start else None)

    def on_version(self, version: int) -> None:
        self.put("version", version)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class Greso(KeyedState):
    """GRESO: prompts whose groups keep coming back without variance are played less often.

    A prompt that had z such rounds in a row is played with the probability max(p ** z, floor) of its kind, easy (all
    episodes well) or hard. After the first full pass over the prompts p is steered, version by version, so that the
    share of groups without variance comes to a target.

    For a prompt it keeps (z, kind, draws), and nothing for a prompt that has always had variance.
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


class Mixing(KeyedState):
    """Prompts of several sources in given shares, by error diffusion.

    Every prompt played gives each source credit for its share and takes one from the source it came from; a prompt is
    played where that leaves its source's credit above -1. Credits always add up to 0, so some source is always owed
    one: shares are never off by more than the number of sources, whatever the order in which prompts are offered.

    A source not offered for `patience` prompts has run out: the others share its place until it comes back.
    Prompts of sources without a weight are played and not counted.
    """

    @options
    def __init__(
        self, *, weights: Annotated[dict[str, Weight], Field(min_length=1)], patience: Positive = 1000
    ) -> None:
        super().__init__()
        self._weights, self._patience = weights, patience

    def admit(self, prompt: Prompt) -> bool:
        if prompt.source not in self._weights:
            return True
        now = self.get("offers", 0) + 1
        credits = self._present(prompt.source, now)
        total = sum(self._weights[source] for source in credits)
        owed = {source: credit + self._weights[source] / total for source, credit in credits.items()}
        played = owed[prompt.source] > _ROUNDING
        if played:
            owed[prompt.source] -= 1
            credits = owed
        self.put("offers", now)
        self.put("credits", credits)
        return played

    def _present(self, source: str, now: int) -> dict[str, float]:
        """The credits of the sources that are still offered, `source` among them. They add up to 0."""
        last: dict[str, int] = self.get("last", {}) | {source: now}
        present = {each: at for each, at in last.items() if each in self._weights and now - at <= self._patience}
        self.put("last", present)
        credits = {each: credit for each, credit in self.get("credits", {}).items() if each in present}
        if credits:  # what those that left were owed goes to those that stay
            over = sum(credits.values()) / len(credits)
            credits = {each: credit - over for each, credit in credits.items()}
        return {source: 0.0} | credits

    def observe(self, group: Group) -> None:
        """Shares are of prompts played, whatever came of them."""

    def on_version(self, version: int) -> None:
        """Shares stay the same."""


class Solved(KeyedState):
    """Prompts that the policy solves time after time rest for a while.

    A prompt solved `times` in a row (mean reward at least `threshold`) is passed over for its next `rest` visits.

    Then it is played once: solved again, it rests again; else it starts from the beginning. For a prompt it keeps
    (solved in a row, visits left to rest), and nothing if both are 0.
    """

    @options
    def __init__(self, *, threshold: float = 1.0, times: Positive = 2, rest: Positive = 4) -> None:
        super().__init__()
        self._threshold, self._times, self._rest = threshold, times, rest

    def admit(self, prompt: Prompt) -> bool:
        row, left = self.get(of_prompt(prompt.id), (0, 0))
        if left == 0:
            return True
        self.put(of_prompt(prompt.id), [row, left - 1])
        return False

    def observe(self, group: Group) -> None:
        key = of_prompt(group.prompt.id)
        if fmean(group.rewards) < self._threshold:
            self.put(key, None)
            return
        row, left = self.get(key, (0, 0))
        row = min(row + 1, self._times)
        rests = row == self._times and left == 0  # a group that was in flight does not lengthen the rest
        self.put(key, [row, self._rest if rests else left])

    def on_version(self, version: int) -> None:
        """Do nothing: whether a prompt is solved does not depend on the version."""
