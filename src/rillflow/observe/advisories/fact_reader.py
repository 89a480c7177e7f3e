"""Reads the facts of a run from its folder, as it grows.

Invariants: reading never raises for what a run folder holds; what cannot be read is listed in `Facts.unread`. Each call
of `read` reads only what was written since the one before, so looking at a long run again costs milliseconds. Numbers
that are not finite, or absurdly large, are None. A reader is used by one thread at a time.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rillflow.config import Recipe, SamplingConfig
from rillflow.config.load import FIT, parse
from rillflow.dataflow.ledger_facts import LedgerFacts, NodeFacts, read_ledger_facts
from rillflow.errors import DataError, RillflowError
from rillflow.observe.advisories.advisory import LARGEST, AnswerFacts, Evaluation, Facts, Refusal, Settings, Step
from rillflow.observe.metrics import MetricsReader
from rillflow.runtime.folder import RunFolder
from rillflow.storage.spans import SpanFollower
from rillflow.types import NodeInfo, Status

if TYPE_CHECKING:
    from rillflow.storage.trajectories import Trajectories
    from rillflow.storage.trajectory_format import Trajectory

_LOG_BYTES = 256 << 10  # of the end of each log
_LOGS = 64
_SPAN_BYTES = 256 << 10  # of the end of each worker's timeline
_KEPT = 256  # steps of a policy: as many of the first and of the latest
_CAUSES = "numerics|stale weights|wrong weights|cut distribution"
_NOT_SERVED = re.compile(
    r"policy (?P<policy>\S+): version (?P<version>\d+) not loaded, (?P<still>.*?): version \d+ is not served, "
    rf"(?P<cause>{_CAUSES}): (?P<why>.*)"
)
_LOADED = re.compile(r"policy (?P<policy>\S+): version \d+, \w+, \d+ bytes: fetched")
_NO_SPACE = re.compile(r".*no space left.*", re.IGNORECASE)
_TROUBLE = re.compile(
    r"(?:node|engine) (?P<worker>\S+): policy (?P<policy>\S+): version (?P<version>\d+) not loaded: version \d+ is not "
    rf"served, (?P<cause>{_CAUSES}): (?P<why>.*)"
)


class FactReader:
    """Follows one run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._steps = StepReader(folder.metrics)
        self._logs = _LogReader(folder.root / "logs")
        self._idle = _IdleShares(folder.root)
        self._answers = AnswerReader(folder.root)
        self._settings: Settings | None = None
        self._unread: list[str] = []

    def read(self, status: Status | None = None, nodes: Sequence[NodeInfo] | None = None, now: float = 0.0) -> Facts:
        """Return the facts of now; `status` and `nodes` are a live service's answers, newer than the folder."""
        folder, self._unread = self._folder, []
        nothing: dict[str, Any] = {}
        state = self._part(folder.state, nothing)
        running = state.get("state") == "running"
        self._part(self._steps.follow, None)
        self._part(self._logs.follow, None)
        waits = list(status.waits) if status is not None else []
        refusals = self._logs.refusals()
        return Facts(
            now=now,
            state=str(state.get("state", "new")),
            reason=status.reason if status is not None and status.reason else str(state.get("reason", "")),
            live=status is not None and status.phase != "ended",
            held=running and self._part(lambda: folder.held, False),
            started=_number(state.get("time")) if running else self._part(lambda: folder.started, None),
            settings=self._part(self._read_settings, Settings()),
            policies=self._steps.policies(),
            heldout=self._steps.heldout,
            ledger=_with_live(self._part(self._read_ledger, LedgerFacts()), status, nodes, now),
            waits=waits,
            refusals=[*refusals, *_refusals_of(waits, refusals)],
            answers=self._part(self._answers.follow, {}),
            no_space=self._logs.no_space,
            disk_free=self._part(self._disk_free, None),
            idle=self._part(self._idle.follow, {}),
            unread=self._unread,
        )

    def _part(self, read: Callable[[], Found], otherwise: Found) -> Found:
        """Return what `read` returns, or `otherwise` where that fails, which is remembered."""
        try:
            return read()
        except (RillflowError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._unread.append(" ".join(str(error).split())[:300] or type(error).__name__)
            return otherwise

    def _read_ledger(self) -> LedgerFacts:
        paths = self._folder.ledgers if self._folder.ledger.is_file() else []
        return read_ledger_facts([path for path in paths if path.is_file()])

    def _read_settings(self) -> Settings:
        """Return what advice needs of the recipe, which does not change while a run goes on."""
        if self._settings is None:
            self._settings = _settings(self._folder)
        return self._settings

    def _disk_free(self) -> float | None:
        usage = shutil.disk_usage(self._folder.root)
        return usage.free / usage.total if usage.total else None


# ---------------------------------------------------------------- metrics.jsonl


class StepReader:
    """The steps of each policy and the evaluations of the live lines of weights. Other lines are passed over."""

    def __init__(self, path: Path) -> None:
        self._reader = MetricsReader(path)
        self._first: dict[str, list[Step]] = {}
        self._latest: dict[str, deque[Step]] = {}
        self.heldout: list[Evaluation] = []

    def follow(self) -> None:
        lines: Iterator[Any] = self._reader.new()  # of a file that anybody may have written
        for line in lines:
            if not isinstance(line, dict) or (step := _whole(line.get("step"))) is None:
                continue
            policy = str(line.get("policy", ""))
            match line.get("event"):
                case None:
                    self._add(policy, _step(step, line))
                case "evaluation" if (reward := _number(line.get("reward"))) is not None:
                    self.heldout.append(Evaluation(step, reward))
                case "rollback":
                    self._roll_back(policy, step)

    def policies(self) -> dict[str, list[Step]]:
        """Return the first and the latest steps of each policy."""
        return {policy: [*steps, *self._latest[policy]] for policy, steps in self._first.items()}

    def _add(self, policy: str, step: Step) -> None:
        first = self._first.setdefault(policy, [])
        latest = self._latest.setdefault(policy, deque(maxlen=_KEPT))
        (first if len(first) < _KEPT else latest).append(step)

    def _roll_back(self, policy: str, step: int) -> None:
        if policy in self._first:
            kept = [one for one in chain(self._first[policy], self._latest[policy]) if one.step <= step]
            self._first[policy] = kept[:_KEPT]
            self._latest[policy] = deque(kept[_KEPT:], maxlen=_KEPT)


_NAMES = {field.name: field.encode_name for field in msgspec.structs.fields(Step) if field.name != "step"}


def _step(number: int, line: Mapping[str, Any]) -> Step:
    return Step(number, **{name: _number(line.get(written)) for name, written in _NAMES.items()})


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62 else None


# ---------------------------------------------------------------- logs and timeline


class _LogReader:
    """The engines that serve nothing, as their logs end, and the last line about a full disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._at: dict[Path, int] = {}
        self._refused: dict[Path, dict[str, Refusal]] = {}
        self.no_space = ""

    def follow(self) -> None:
        for path in sorted(self._folder.glob("*.log"))[:_LOGS]:
            for line in self._new_lines(path):
                self._take(path, line)

    def refusals(self) -> list[Refusal]:
        return [refusal for _, refused in sorted(self._refused.items()) for refusal in refused.values()]

    def _take(self, path: Path, line: str) -> None:
        if match := _NOT_SERVED.search(line):
            self._refused.setdefault(path, {})[match["policy"]] = _refusal(path.stem, match)
        elif match := _LOADED.search(line):
            self._refused.get(path, {}).pop(match["policy"], None)
        elif _NO_SPACE.match(line):
            self.no_space = f"{path.name}: {line.strip()[:300]}"

    def _new_lines(self, path: Path) -> list[str]:
        """Return the lines since the last look, of the end of the log at most. A torn line is
        returned again once it is whole: a full disk may tear the very line that reports it."""
        size, at = path.stat().st_size, self._at.get(path, 0)
        if size == at:
            return []
        begin = max(at if at < size else 0, size - _LOG_BYTES)
        with open(path, "rb") as file:
            file.seek(begin)
            data = file.read(_LOG_BYTES)
        self._at[path] = begin + data.rfind(b"\n") + 1
        return data.decode(errors="replace").splitlines()


class _IdleShares:
    """The share of its time that each worker did nothing, since shortly before the first look."""

    def __init__(self, run: Path) -> None:
        self._spans = SpanFollower(run, _SPAN_BYTES)
        self._seconds: dict[str, tuple[float, float]] = {}  # idle, and in all

    def follow(self) -> dict[str, float]:
        for worker, spans in self._spans.new(rest=True).items():
            idle, total = self._seconds.get(worker, (0.0, 0.0))
            total += sum(span.end - span.begin for span in spans)
            idle += sum(span.end - span.begin for span in spans if span.state == "idle")
            self._seconds[worker] = idle, total
        return {worker: idle / total for worker, (idle, total) in self._seconds.items() if total > 0}


# ---------------------------------------------------------------- answers, from the trajectories that a run keeps

# Only episodes drawn at random from the steps are looked at (`kept` as a sample): the best, the worst and the failures
# are chosen, so their shares say nothing.

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


Found = TypeVar("Found")


# ---------------------------------------------------------------- the recipe and the service


def _settings(folder: RunFolder) -> Settings:
    if FIT in parse(folder.root / "recipe.yaml"):
        return Settings()
    recipe: Recipe = folder.recipe
    return Settings(
        staleness=max(recipe.staleness(name) for name in recipe.policies),
        max_tokens={name: policy.sampling.max_tokens for name, policy in recipe.policies.items()},
        lr={name: policy.trainer.lr for name, policy in recipe.policies.items()},
        episode_timeout=recipe.rollout.episode_timeout,
        filters=any(hook.name == "zero_variance" for hook in recipe.dataflow.filters),
        on_policy=recipe.mode == "colocated",
        probed={name: policy.proves for name, policy in recipe.policies.items()},
        cuts={name: cut for name, policy in recipe.policies.items() if (cut := _cut(policy.sampling))},
        dtypes={name: (policy.engine.dtype, policy.trainer.dtype) for name, policy in recipe.policies.items()},
    )


def _cut(sampling: SamplingConfig) -> str:
    """Return the settings by which a policy samples from another distribution than its model's; empty if none."""
    plain = SamplingConfig()
    names = ("temperature", "top_p", "top_k")
    return ", ".join(
        f"{name} {value:g}" for name in names if (value := getattr(sampling, name)) != getattr(plain, name)
    )


def _refusals_of(waits: Sequence[str], known: Sequence[Refusal]) -> Iterator[Refusal]:
    """Engines elsewhere have no log here: the service says what is wrong with them."""
    workers = {one.worker for one in known}
    for wait in waits:
        if (match := _TROUBLE.search(wait)) and match["worker"] not in workers:
            yield _refusal(match["worker"], match)


def _refusal(worker: str, match: re.Match[str]) -> Refusal:
    version = int(match["version"][:18])
    return Refusal(worker, match["policy"], version, match["cause"], match["why"].strip()[:300])


def _with_live(ledger: LedgerFacts, status: Status | None, nodes: Sequence[NodeInfo] | None, now: float) -> LedgerFacts:
    if nodes is not None:
        ledger = msgspec.structs.replace(ledger, nodes=[_live_node(one, now) for one in nodes])
    if status is not None:
        ledger = msgspec.structs.replace(
            ledger, errors=status.errors or ledger.errors, notes={**ledger.notes, **status.notes}
        )
    return ledger


def _live_node(node: NodeInfo, now: float) -> NodeFacts:
    return NodeFacts(
        name=node.name,
        state=node.state,
        seen=now - node.seen,
        completed=node.completed,
        failed=node.failed,
        pace=node.pace,
        versions=node.versions,
    )
