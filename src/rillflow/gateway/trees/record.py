"""What a session leaves: training samples and a transcript.

Each root-to-leaf path of a tree is one sample. A sampled node that several leaves share trains in the first of them,
by order of creation, and is masked in the others; a leaf always has its own answer to train. So the trained tokens of
all samples together are exactly the tokens that were sampled and not abandoned, each once; except those that a grammar
left no choice about (log-prob 0), which nobody chose and nothing is to be learned from. An answer in which there was no
choice at all, or that was greedy, trains as a whole.

A reward that was given to an answer belongs to the sample in which that answer trains, and to no other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rillflow.gateway.sessions.rewards import Rewards, Settled
from rillflow.gateway.trees.tree import Node, TokenTree, answer_id
from rillflow.types import COLUMNS

_COLUMNS = ("tokens", "mask", "logprobs", "raw_logprobs", "temperatures", "versions")
_NOTHING = Settled()


@dataclass(frozen=True, slots=True)
class Sample:
    """One training row. `truncated`: the last answer of the path was cut by its length.

    `fork` says why the path left another one, `seams` how often the sampling of what trains here was cut and
    continued; `reward` is the sample's own (`LeafReward.value`). `agent` is whom the first answer that trains here was
    of, `turn` which of that agent's calls it was.
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
    """A closed session. `incomplete` says what of it may be missing; empty where nothing is.

    Its `rewards` may still be given after it was closed: samples have those that were given before they were made.
    """

    session: str
    calls: int
    trees: Mapping[str, TokenTree]
    rewards: Rewards | None = None
    incomplete: str = ""

    @property
    def trainable(self) -> bool:
        """A record with holes can be looked at, never trained on."""
        return not self.incomplete

    def settled(self) -> Settled:
        return _NOTHING if self.rewards is None else self.rewards.settle()

    def samples(self, policy: str) -> list[Sample]:
        """One for each leaf of the policy's tree, by the leaf's number."""
        tree = self.trees.get(policy)
        return [] if tree is None else samples(policy, tree, self.settled())

    def transcript(self) -> list[dict[str, Any]]:
        """The paths of all policies as JSON; see `transcript`."""
        settled = self.settled()
        return [path for policy, tree in self.trees.items() for path in transcript(policy, tree, settled)]


@dataclass(frozen=True, slots=True)
class LeafReward:
    """The rewards of one leaf's sample: the leaf's, if it was given one, and those of the answers that train in it."""

    agent: str
    leaf: float | None
    answers: tuple[float, ...]

    @property
    def value(self) -> float | None:
        """The sample's own reward: its leaf's, else the sum of its answers'; None where neither was given one."""
        if self.leaf is None and self.answers:
            return math.fsum(self.answers)
        return self.leaf


def leaf_rewards(policy: str, tree: TokenTree, settled: Settled) -> list[LeafReward]:
    """Return the rewards of a policy's samples, by the leaf's number."""
    own = settled.leaves.get(policy, {})
    return [_leaf_reward(fresh, own.get(n), settled) for n, (_, fresh) in enumerate(_paths(tree))]


def _leaf_reward(fresh: list[Node], leaf: float | None, settled: Settled) -> LeafReward:
    answers = tuple(settled.answers[node.call] for node in fresh if node.call in settled.answers)
    return LeafReward(fresh[0].agent, leaf, answers)


def _paths(tree: TokenTree) -> Iterator[tuple[list[Node], list[Node]]]:
    """Yield the path to each leaf, and the answers of it that no earlier leaf's path has: those train in its sample."""
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
    """Which of its agent's calls each call is, from 0, in the order in which they were begun; without what failed."""
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
    return columns


def _chosen(node: Node) -> npt.NDArray[Any]:
    """Which tokens of an answer train; at least one."""
    if node.constrained:
        free: npt.NDArray[Any] = np.asarray(node.logprobs) != 0.0
        if free.any():
            return free
    return np.ones(len(node.tokens), np.bool_)


def transcript(policy: str, tree: TokenTree, settled: Settled = _NOTHING) -> list[dict[str, Any]]:
    """One entry for each leaf: its messages, less those that it shares with an earlier entry.

    `follows` is that entry's index among this policy's (None for a path of its own) and `shared` the number of
    messages, from the first, that the two have in common. `seams` and `rewards` name the message of the entry that
    they belong to by its place. `agent` is whom the leaf's answer is of, where the call said so.
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
    """What is said of single messages, as far as there is anything."""
    seams: list[dict[str, Any]] = []
    given: list[dict[str, Any]] = []
    place = 0
    for node in nodes:
        seams += [{"message": place, "token": seam.offset, "cause": seam.cause} for seam in node.seams]
        if node.call in rewards:
            given.append({"message": place, "reward": rewards[node.call]})
        place += len(node.messages)
    return ({"seams": seams} if seams else {}) | ({"rewards": given} if given else {})
