"""What a session leaves: training samples, a transcript, and the causes of its forks.

Each root-to-leaf path of a tree is one sample. A sampled node that several leaves share trains in the first of them, by
order of creation, and is masked in the others; a leaf always has its own answer to train. So the trained tokens of all
samples are exactly the tokens that were sampled and not abandoned, each once. The exception are tokens that a grammar
left no choice about (log-prob 0): they carry no signal and are masked. An answer without any choice, or a greedy one,
trains as a whole.

A reward that was given to an answer belongs to the sample in which that answer trains, and to no other.

Each fork is one more sample of its episode and repeats what it shares with the others, so an agent that forks at every
call trains on few of the tokens that are forwarded. `cause` says at which message and field a call left its path.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from rillflow.engine.experts import UNKNOWN, pack, unpack
from rillflow.gateway.sessions.rewards import Rewards, Settled
from rillflow.gateway.trees.messages import Message
from rillflow.gateway.trees.tree import RAW, Node, TokenTree, answer_id
from rillflow.types import COLUMNS

_COLUMNS = ("tokens", "mask", "logprobs", "raw_logprobs", "temperatures", "versions")
_NOTHING = Settled()


@dataclass(frozen=True, slots=True)
class Sample:
    """One training row. `truncated`: the last answer of the path reached its length limit.

    `fork` says why the path left another one. `seams` counts the interruptions in what trains here. `reward` is that of
    the sample (`LeafReward.value`). `agent` made the call of the first answer that trains here, and `turn` is the
    number of that call among the agent's calls.
    """

    policy: str
    columns: Mapping[str, npt.NDArray[Any]]
    truncated: bool
    fork: str
    seams: int = 0
    reward: float | None = None
    agent: str = ""
    turn: int = 0

    @property
    def tokens(self) -> int:
        return len(self.columns["tokens"])

    @property
    def trained(self) -> int:
        return int(self.columns["mask"].sum())

    @property
    def oldest(self) -> int:
        return int(self._trained_versions().min())

    @property
    def newest(self) -> int:
        return int(self._trained_versions().max())

    def _trained_versions(self) -> npt.NDArray[Any]:
        versions: npt.NDArray[Any] = self.columns["versions"][self.columns["mask"] == 1]
        return versions


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A closed session. `incomplete` says what may be missing; it is empty if nothing is.

    Rewards may still be given after it was closed. Samples have the rewards that were given before they were made.
    """

    session: str
    calls: int
    trees: Mapping[str, TokenTree]
    rewards: Rewards | None = None
    incomplete: str = ""

    @property
    def trainable(self) -> bool:
        """False if something may be missing: such a record is kept for people and never trained on."""
        return not self.incomplete

    def settled(self) -> Settled:
        return _NOTHING if self.rewards is None else self.rewards.settle()

    def samples(self, policy: str) -> list[Sample]:
        """Return one sample for each leaf of the policy's tree, in the order of the leaves."""
        tree = self.trees.get(policy)
        return [] if tree is None else samples(policy, tree, self.settled())

    def transcript(self) -> list[dict[str, Any]]:
        """Return the paths of all policies as JSON; see `transcript`."""
        settled = self.settled()
        return [path for policy, tree in self.trees.items() for path in transcript(policy, tree, settled)]


@dataclass(frozen=True, slots=True)
class LeafReward:
    """The rewards of one sample: that of its leaf, if any, and those of the answers that train in it."""

    agent: str
    leaf: float | None
    answers: tuple[float, ...]

    @property
    def value(self) -> float | None:
        """The reward of the leaf, else the sum of those of the answers; None without any."""
        if self.leaf is None and self.answers:
            return math.fsum(self.answers)
        return self.leaf


def leaf_rewards(policy: str, tree: TokenTree, settled: Settled) -> list[LeafReward]:
    """Return the rewards of a policy's samples, in the order of the leaves."""
    own = settled.leaves.get(policy, {})
    return [_leaf_reward(fresh, own.get(n), settled) for n, (_, fresh) in enumerate(_paths(tree))]


def _leaf_reward(fresh: list[Node], leaf: float | None, settled: Settled) -> LeafReward:
    answers = tuple(settled.answers[node.call] for node in fresh if node.call in settled.answers)
    return LeafReward(fresh[0].agent, leaf, answers)


def _paths(tree: TokenTree) -> Iterator[tuple[list[Node], list[Node]]]:
    """Yield the path to each leaf, and the answers on it that no earlier path has: these train in its sample."""
    trained: set[Node] = set()
    for leaf in tree.leaves():
        path = leaf.path()
        fresh = [node for node in path if node.kind == "sampled" and node.tokens and node not in trained]
        trained.update(fresh)
        yield path, sorted(fresh, key=lambda node: node.id)


def samples(policy: str, tree: TokenTree, settled: Settled = _NOTHING) -> list[Sample]:
    made: list[Sample] = []
    own, turns = settled.leaves.get(policy, {}), _turns(tree)
    for number, (path, fresh) in enumerate(_paths(tree)):
        forks = [node.fork for node in path if node.fork]
        made.append(
            Sample(
                policy,
                _columns(path, set(fresh), settled.answers),
                truncated=path[-1].finish == "length",
                fork=forks[-1] if forks else "",
                seams=sum(len(node.seams) for node in fresh),
                reward=_leaf_reward(fresh, own.get(number), settled).value,
                agent=fresh[0].agent,
                turn=turns.get(answer_id(fresh[0].call), 0),
            )
        )
    return made


def _turns(tree: TokenTree) -> dict[str, int]:
    """Return the number of each call among the calls of its agent, from 0, without failed calls."""
    seen: Counter[str] = Counter()
    turns: dict[str, int] = {}
    for call, nodes in sorted(tree.calls.items(), key=lambda item: item[1][0].id):
        if not all(node.abandoned for node in nodes):
            turns[call] = seen[nodes[0].agent]
            seen[nodes[0].agent] += 1
    return turns


def _columns(path: list[Node], fresh: set[Node], rewards: Mapping[str, float]) -> dict[str, npt.NDArray[Any]]:
    size = sum(len(node.tokens) for node in path)
    columns = {name: np.zeros(size, COLUMNS[name]) for name in _COLUMNS}
    columns["versions"].fill(-1)
    if any(node.call in rewards for node in fresh):
        columns["rewards"] = np.full(size, math.nan, COLUMNS["rewards"])
    at = 0
    for node in path:
        here = slice(at, at + len(node.tokens))
        at = here.stop
        columns["tokens"][here] = node.tokens
        if node in fresh:
            columns["mask"][here] = chosen = _chosen(node)
            columns["logprobs"][here] = node.logprobs
            columns["raw_logprobs"][here] = node.raw_logprobs
            columns["temperatures"][here] = node.temperature
            columns["versions"][here] = node.versions
            if node.call in rewards:
                columns["rewards"][here.start + int(np.flatnonzero(chosen)[-1])] = rewards[node.call]
    if any(node.experts for node in path):
        columns["experts"] = np.frombuffer(_experts(path, size), COLUMNS["experts"])
    return columns


def _experts(path: list[Node], size: int) -> bytes:
    """Return the experts of all tokens of a path. Those of a node end before its last token."""
    parts = [unpack(node.experts) if node.experts else None for node in path]
    chosen_NW = np.full((size, next(part.shape[1] for part in parts if part is not None)), UNKNOWN, np.uint16)
    end = 0
    for node, part in zip(path, parts, strict=True):
        end += len(node.tokens)
        if part is not None:
            chosen_NW[end - 1 - len(part) : end - 1] = part
    return pack(chosen_NW)


def _chosen(node: Node) -> npt.NDArray[Any]:
    """Return which tokens of an answer train; at least one does."""
    if node.constrained:
        free: npt.NDArray[Any] = np.asarray(node.logprobs) != 0.0
        if free.any():
            return free
    return np.ones(len(node.tokens), np.bool_)


def transcript(policy: str, tree: TokenTree, settled: Settled = _NOTHING) -> list[dict[str, Any]]:
    """Return one entry for each leaf: its messages without those that it shares with an earlier entry.

    `follows` is the index of that earlier entry (None for a separate path), and `shared` the number of messages that
    the two have in common. `seams` and `rewards` give the position of their message in the entry. `agent` is the agent
    of the leaf's answer, if the call named one.
    """
    entries: list[dict[str, Any]] = []
    owners: dict[Node, int] = {}
    own = settled.leaves.get(policy, {})
    for number, leaf in enumerate(tree.leaves()):
        path = leaf.path()
        known = [node for node in path if node in owners]
        new = [node for node in path if node not in owners]
        owners |= dict.fromkeys(new, number)
        entry = {
            "policy": policy,
            "follows": owners[known[-1]] if known else None,
            "shared": sum(len(node.messages) for node in known),
            "fork": next((node.fork for node in new if node.fork), ""),
            "finish": leaf.finish,
            "messages": [message.body for node in new for message in node.messages],
        }
        entry |= {"agent": leaf.agent} if leaf.agent else {}
        entries.append(entry | _asides(new, settled.answers) | ({"reward": own[number]} if number in own else {}))
    return entries


def _asides(nodes: list[Node], rewards: Mapping[str, float]) -> dict[str, Any]:
    """Return the seams and rewards of single messages, if there are any."""
    seams: list[dict[str, Any]] = []
    given: list[dict[str, Any]] = []
    place = 0
    for node in nodes:
        seams += [{"message": place, "token": seam.offset, "cause": seam.cause} for seam in node.seams]
        if node.call in rewards:
            given.append({"message": place, "reward": rewards[node.call]})
        place += len(node.messages)
    return ({"seams": seams} if seams else {}) | ({"rewards": given} if given else {})


# ---------------------------------------------------------------- forks


_SHOWN = 40  # characters of a difference
_FIELDS = ("content", "name", "tool_calls", "reasoning_content")
_FEWEST = 2  # forks from which on `forks_always` may be true


def forks(tree: TokenTree) -> list[Node]:
    """Return the answered prompts that left every earlier path, in the order of their calls."""
    found = [node for node in tree.nodes() if node.fork and any(_answered(child) for child in node.children)]
    return sorted(found, key=lambda node: node.id)


def forks_always(tree: TokenTree) -> bool:
    """Return whether every call of the tree except the first has forked."""
    calls = {answer_id(node.call) for node in tree.nodes() if _answered(node)}
    return len(found := forks(tree)) >= _FEWEST and len(found) >= len(calls) - 1


def cause(tree: TokenTree, fork: Node) -> str:
    """Return why the call of `fork` did not continue the earlier path that it shares most messages with."""
    if fork.fork == "template":
        return _rewritten(tree, fork)
    if fork.path()[0].parent is tree.roots().get(RAW):
        return "the raw prompt does not begin with an earlier prompt and its answer"
    mine, tools = _messages(fork), _tools(tree, fork)
    earlier = [node for node in tree.nodes() if _answered(node) and node.id < fork.id and _tools(tree, node) != RAW]
    if not earlier:
        return "no earlier call was answered"
    other = max(earlier, key=lambda node: (_shared(_messages(node), mine), _tools(tree, node) == tools, node.id))
    theirs = _messages(other)
    at = _shared(theirs, mine)
    if at < min(len(mine), len(theirs)):
        return _difference(at, theirs[at], mine[at])
    if _tools(tree, other) != tools:
        return _other_key(_tools(tree, other), tools)
    shorter = f"the history ends before messages[{at}] of an earlier call"
    return shorter if at == len(mine) else "the history continues an earlier call that failed"


def _difference(at: int, old: Message, new: Message) -> str:
    where = f"messages[{at}]"
    if old.role != new.role:
        return f"{where} has the role {new.role}, not {old.role}: messages were removed or inserted"
    field = next((field for field in _FIELDS if _text(old, field) != _text(new, field)), "content")
    before, now = _text(old, field), _text(new, field)
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, now, strict=False)))
    shown = f"{now[start : start + _SHOWN]!r} instead of {before[start : start + _SHOWN]!r}"
    what = "the client changes the system prompt" if new.role == "system" else f"the {new.role}'s message differs"
    return f"{what}: {field} of {where} differs at character {start}: {shown}"


def _text(message: Message, field: str) -> str:
    """Return a field of a message as text. Ids of tool calls are left out, because they do not count."""
    value: Any = message.body.get(field, "")
    if field == "tool_calls" and value:
        return json.dumps([call["function"] for call in value], sort_keys=True)
    return str(value)


def _answered(node: Node) -> bool:
    return node.kind == "sampled" and node.usable and bool(node.tokens)


def _messages(node: Node) -> list[Message]:
    return [message for above in node.path() for message in above.messages]


def _shared(old: list[Message], new: list[Message]) -> int:
    """Return how many messages, from the first, are equal for the tree."""
    return sum(1 for _ in takewhile(lambda pair: _same(*pair), zip(old, new, strict=False)))


def _same(old: Message, new: Message) -> bool:
    return old.key in (new.key, new.unnamed) and new.reasoning in ("", old.reasoning)


def _tools(tree: TokenTree, node: Node) -> bytes:
    root = node.path()[0].parent
    return next(tools for tools, one in tree.roots().items() if one is root)


def _other_key(before: bytes, now: bytes) -> str:
    if _names(before) == _names(now) and _options(before) != _options(now):
        return f"chat_template_kwargs changed: {_options(now)} instead of {_options(before)}"
    return f"the tool list changed: {_names(now)} instead of {_names(before)}"


def _rewritten(tree: TokenTree, fork: Node) -> str:
    """Return which answer the chat template rewrites: the newest one that is not on the path of `fork`.

    If not even the first prompt stays, the template rewrites a message before the answers."""
    kept = set(fork.path())
    history = _messages(fork)
    earlier = [node for node in tree.nodes() if _answered(node) and node.id < fork.id and node not in kept]
    lost = max(earlier, key=lambda node: (_shared(_messages(node), history), node.id), default=None)
    what = "an earlier message"
    if lost is not None and not kept.isdisjoint(lost.path()):
        (said,), at = lost.messages, len(_messages(lost)) - 1
        what = f"the answer messages[{at}]" + (", without its reasoning," if said.reasoning else "")
    return f"the chat template writes {what} differently now; policies.NAME.history: append keeps what was sampled"


def _names(key: bytes) -> str:
    found = json.loads(key or b"[]")
    tools = found["tools"] if isinstance(found, dict) else found
    names = [tool.get("function", tool).get("name", "") for tool in tools]
    return ", ".join(names) or "no tools"


def _options(key: bytes) -> str:
    found = json.loads(key or b"[]")
    return json.dumps(found["chat_template_kwargs"] if isinstance(found, dict) else {})
