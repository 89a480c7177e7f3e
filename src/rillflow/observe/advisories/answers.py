"""What a run's policies say, by the trajectories that it keeps: answers that repeat themselves, are cut, or equal.

Only episodes drawn at random from the steps are looked at (`kept` as a sample): the best, the worst and the failures
are chosen, so their shares say nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rillflow.errors import DataError
from rillflow.observe.advisories.advisory import AnswerFacts

if TYPE_CHECKING:
    from rillflow.storage.trajectories import Trajectories
    from rillflow.storage.trajectory_format import Trajectory

_LATEST = 48  # episodes that are looked at
_ENDS = (24, 60, 120)  # characters at the end of an answer that are looked at; shorter answers are not judged
_TIMES = 4  # that something is said in a row
_SHOWN = 60  # characters of an answer that are shown


class Answer(msgspec.Struct, frozen=True):
    """The last message of a policy in an episode."""

    episode: str
    prompt: str
    policy: str
    text: str
    cut: bool

    @property
    def repeats(self) -> bool:
        """Return whether its end is a repetition."""
        text = self.text.strip()
        return any(_periodic(text[-size:]) for size in _ENDS if len(text) >= size)


def _periodic(text: str) -> bool:
    return any(text[period:] == text[:-period] for period in range(1, len(text) // _TIMES + 1))


class AnswerReader:
    """Follows the trajectories of a run folder; each is read once."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._answers: dict[str, list[Answer]] = {}

    def follow(self) -> dict[str, AnswerFacts]:
        """Return what is known of the latest answers of each policy."""
        from rillflow.storage.trajectories import Trajectories  # numpy: a run that shows no advice needs none
        from rillflow.storage.trajectory_format import FILE  # numpy: a run that shows no advice needs none

        if not (self._run / FILE).is_file():
            return {}
        kept = Trajectories(self._run, lane="train", kept="sample", status="done")
        names = [info.id for info in kept.infos("-time", 0, _LATEST)]
        self._answers = {
            name: self._answers[name] if name in self._answers else list(_read(kept, name)) for name in names
        }
        found: dict[str, list[Answer]] = {}
        for answer in (one for of_episode in self._answers.values() for one in of_episode):
            found.setdefault(answer.policy, []).append(answer)
        return {policy: summed_up(said) for policy, said in found.items()}


def _read(kept: Trajectories, name: str) -> Iterator[Answer]:
    with suppress(DataError):  # it has made room for another since
        yield from answers(kept.get(name))


def answers(trajectory: Trajectory) -> Iterator[Answer]:
    """Yield the last answer on each path of an episode."""
    for number, path in enumerate(trajectory.paths):
        said = [message for message in trajectory.messages(number) if message.get("role") == "assistant"]
        if said:
            yield Answer(
                trajectory.info.id,
                trajectory.info.prompt,
                str(path.get("policy", "")),
                _text(said[-1]),
                path.get("finish") == "length",
            )


def _text(message: dict[str, Any]) -> str:
    content, calls = message.get("content"), message.get("tool_calls")
    return (content if isinstance(content, str) else "") + (str(calls) if calls else "")


def summed_up(said: Sequence[Answer]) -> AnswerFacts:
    repeating = [answer for answer in said if answer.repeats]
    text, same = Counter(answer.text for answer in said).most_common(1)[0]
    return AnswerFacts(
        count=len(said),
        prompts=len({answer.prompt for answer in said}),
        cut=sum(answer.cut for answer in said),
        repeating=len(repeating),
        cut_repeating=sum(answer.cut for answer in repeating),
        repeated=f"{_shown(repeating[0].text)} ({repeating[0].episode})" if repeating else "",
        same=same,
        same_prompts=len({answer.prompt for answer in said if answer.text == text}),
        text=_shown(text),
    )


def _shown(text: str) -> str:
    plain = " ".join(text.split())
    return repr(plain if len(plain) <= _SHOWN else f"{plain[:_SHOWN]}…")
