"""What a session leaves: training samples and a transcript.

Each root-to-leaf path of a tree is one sample. A sampled node that several leaves share trains in the first of them,
by order of creation, and is masked in the others; a leaf with nothing left to train gives no sample. So the trained
tokens of all samples together are exactly the tokens that were sampled and not abandoned, each once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rillflow.gateway.tree import Node, TokenTree
from rillflow.types import COLUMNS

_COLUMNS = ("tokens", "mask", "logprobs", "raw_logprobs", "temperatures", "versions")


@dataclass(frozen=True, slots=True)
class Sample:
    """One training row. `truncated`: the last answer of the path was cut by its length."""

    policy: str
    columns: Mapping[str, npt.NDArray[Any]]
    truncated: bool
    fork: str

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
    """A closed session."""

    session: str
    calls: int
    trees: Mapping[str, TokenTree]

    def samples(self, policy: str) -> list[Sample]:
        tree = self.trees.get(policy)
        return [] if tree is None else samples(policy, tree)

    def transcript(self) -> list[dict[str, Any]]:
        """The paths of all policies as JSON; see `transcript`."""
        return [path for policy, tree in self.trees.items() for path in transcript(policy, tree)]


def leaves(tree: TokenTree) -> list[Node]:
    """The answers that no other answer builds on, in the order in which they were begun."""
    found: list[Node] = []
    continued: set[int] = set()
    for node in sorted(tree.nodes(), key=lambda node: -node.id):
        if node.id in continued:
            _continue(node, continued)
        elif node.kind == "sampled" and node.usable and node.tokens:
            found.append(node)
            _continue(node, continued)
    found.reverse()
    return found


def _continue(node: Node, continued: set[int]) -> None:
    if node.parent is not None:
        continued.add(node.parent.id)


def samples(policy: str, tree: TokenTree) -> list[Sample]:
    trained: set[int] = set()
    made: list[Sample] = []
    for leaf in leaves(tree):
        path = leaf.path()
        fresh = {node.id for node in path if node.kind == "sampled" and node.tokens} - trained
        trained |= fresh
        forks = [node.fork for node in path if node.fork]
        made.append(Sample(policy, _columns(path, fresh), leaf.finish == "length", forks[-1] if forks else ""))
    return made


def _columns(path: list[Node], fresh: set[int]) -> dict[str, npt.NDArray[Any]]:
    size = sum(len(node.tokens) for node in path)
    columns = {name: np.zeros(size, COLUMNS[name]) for name in _COLUMNS}
    columns["versions"].fill(-1)
    at = 0
    for node in path:
        here = slice(at, at + len(node.tokens))
        at = here.stop
        columns["tokens"][here] = node.tokens
        if node.id in fresh:
            columns["mask"][here] = 1
            columns["logprobs"][here] = node.logprobs
            columns["raw_logprobs"][here] = node.raw_logprobs
            columns["temperatures"][here] = node.temperature
            columns["versions"][here] = node.versions
    return columns


def transcript(policy: str, tree: TokenTree) -> list[dict[str, Any]]:
    """One entry for each leaf: its messages, less those that it shares with an earlier entry.

    `follows` is that entry's index among this policy's (None for a path of its own) and `shared` the number of
    messages, from the first, that the two have in common.
    """
    entries: list[dict[str, Any]] = []
    owners: dict[int, int] = {}
    for leaf in leaves(tree):
        path = leaf.path()
        known = [node for node in path if node.id in owners]
        new = [node for node in path if node.id not in owners]
        owners |= {node.id: len(entries) for node in new}
        entries.append(
            {
                "policy": policy,
                "follows": owners[known[-1].id] if known else None,
                "shared": sum(len(node.messages) for node in known),
                "fork": next((node.fork for node in new if node.fork), ""),
                "finish": leaf.finish,
                "messages": [message.body for node in new for message in node.messages],
            }
        )
    return entries
