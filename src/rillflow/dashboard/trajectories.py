"""The browser of kept trajectories: a page of the table, one episode, and the tokens of one of its samples.

A token tree is drawn from the samples of an episode, put together where their tokens are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from rillflow.dashboard.charts import ROLE
from rillflow.dashboard.watched import WatchedRun
from rillflow.errors import BadRequest, RillflowError
from rillflow.observe.trajectories import token_texts
from rillflow.storage.trajectories import Trajectories
from rillflow.storage.trajectory_format import KINDS, TokenPath, Trajectory

# ---------------------------------------------------------------- token trees


MOST_PIECES = 3000


class Piece(msgspec.Struct):
    """Tokens `begin` to `end` of `sample`, drawn in `row`; `parent` is the piece before it, -1 for none. `shared`
    counts the samples that have it."""

    begin: int
    end: int
    row: int
    sample: int
    trained: bool
    shared: int
    parent: int
    fork: str = ""


class Tree(msgspec.Struct):
    """The tree of one policy. `cut` tells that pieces beyond the first were left out."""

    policy: str
    rows: int
    tokens: int
    pieces: list[Piece]
    cut: bool = False


def token_trees(samples: Sequence[TokenPath]) -> list[Tree]:
    """One tree for each policy, in the order of the samples."""
    trees = []
    for policy in dict.fromkeys(sample.policy for sample in samples):
        own = [number for number, sample in enumerate(samples) if sample.policy == policy]
        trees.append(_grown(policy, samples, own))
    return trees


def _grown(policy: str, samples: Sequence[TokenPath], own: list[int]) -> Tree:
    tree = Tree(policy, 0, max((len(samples[number].tokens) for number in own), default=0), [])
    # What is left to draw: samples that are the same up to `begin`, and the piece that they follow. The last comes
    # first, so that rows are in the order of the samples.
    waiting = [(group, 0, -1) for group in reversed(_apart(samples, own, 0))]
    while waiting and not tree.cut:
        group, begin, parent = waiting.pop()
        shared = _shared(samples, group, begin)
        if parent < 0 or tree.pieces[parent].end != begin or _is_fork(tree, parent):
            row = tree.rows
            tree.rows += 1
        else:
            row = tree.pieces[parent].row
        parent = _add_pieces(tree, samples, group, range(begin, shared), row=row, parent=parent)
        longer = [number for number in group if len(samples[number].tokens) > shared]
        waiting += [(one, shared, parent) for one in reversed(_apart(samples, longer, shared))]
    return tree


def _is_fork(tree: Tree, parent: int) -> bool:
    """Return whether a piece already has a child: the first child continues its row."""
    return any(piece.parent == parent for piece in tree.pieces[parent + 1 :])


def _apart(samples: Sequence[TokenPath], group: Sequence[int], at: int) -> list[list[int]]:
    """The samples by their token at `at`, in their order."""
    found: dict[int, list[int]] = {}
    for number in group:
        tokens = samples[number].tokens
        if len(tokens) > at:
            found.setdefault(int(tokens[at]), []).append(number)
    return list(found.values())


def _shared(samples: Sequence[TokenPath], group: Sequence[int], begin: int) -> int:
    """How many tokens, from the first, all of a group have in common."""
    first = samples[group[0]].tokens
    end = min(len(samples[number].tokens) for number in group)
    for number in group[1:]:
        differs = np.flatnonzero(samples[number].tokens[begin:end] != first[begin:end])
        if len(differs):
            end = begin + int(differs[0])
    return end


def _add_pieces(
    tree: Tree, samples: Sequence[TokenPath], group: Sequence[int], stretch: range, *, row: int, parent: int
) -> int:
    """Add the stretch as one piece for each change between given and trained tokens; returns the last piece."""
    # Tokens that several samples share train in one of them.
    trains = np.any([samples[number].mask[stretch.start : stretch.stop] for number in group], axis=0)
    edges = [0, *(np.flatnonzero(np.diff(trains.astype(np.int8))) + 1).tolist(), len(stretch)]
    for low, high in pairwise(edges):
        if len(tree.pieces) >= MOST_PIECES:
            tree.cut = True
            return parent
        fork = samples[group[0]].fork if low == 0 and parent >= 0 and row != tree.pieces[parent].row else ""
        tree.pieces.append(
            Piece(stretch[low], stretch.start + high, row, group[0], bool(trains[low]), len(group), parent, fork)
        )
        parent = len(tree.pieces) - 1
    return parent


# ---------------------------------------------------------------- the browser


_LONGEST = 20_000  # characters of one text that are sent
_MOST_MESSAGES = 400  # of one conversation
_MOST_PATHS = 64
MOST_TOKENS = 4000  # of one answer
Word = Annotated[str, Meta(max_length=200)]


class Wanted(msgspec.Struct):
    """A page of the table. Empty fields and None do not filter."""

    order: Word = "-time"
    offset: Annotated[int, Meta(ge=0)] = 0
    limit: Annotated[int, Meta(ge=1, le=500)] = 50
    first_step: int | None = None
    last_step: int | None = None
    least: float | None = None
    most: float | None = None
    version: int | None = None
    policy: Word = ""
    role: Word = ""
    status: Word = ""
    lane: Word = ""
    kept: Word = ""
    prompt: Word = ""


def table(run: WatchedRun, wanted: Wanted) -> dict[str, Any]:
    """The rows of one page, and how many there are in all."""
    found = Trajectories(
        run.folder.root,
        step=_pair(wanted.first_step, wanted.last_step),
        reward=_pair(wanted.least, wanted.most),
        version=wanted.version,
        policy=wanted.policy or None,
        role=wanted.role or None,
        status=wanted.status or None,
        lane=wanted.lane or None,
        kept=wanted.kept or None,
        prompt=wanted.prompt or None,
    )
    return {
        "count": len(found),
        "rows": msgspec.to_builtins(found.infos(wanted.order, wanted.offset, wanted.limit)),
        "choices": {"policy": run.policies, "role": _roles(run), "kept": KINDS},
    }


def _pair(low: Any, high: Any) -> Any:
    return None if low is None and high is None else (low, high)


def _roles(run: WatchedRun) -> list[str]:
    run.curves.follow()
    told = {name.removeprefix(ROLE) for name in run.curves.names() if name.startswith(ROLE)}
    return sorted({*told, *(run.recipe.get("roles") or {})})


def episode(run: WatchedRun, name: str) -> dict[str, Any]:
    """Return one trajectory: the messages of each path, its rewards, and its token trees."""
    found = Trajectories(run.folder.root).get(name)
    return {
        "info": msgspec.to_builtins(found.info),
        "payload": _cut(dict(found.payload)),
        "rewards": dict(found.rewards),
        "error": found.error[-_LONGEST:],
        "paths": [_path(found, number) for number in range(min(len(found.paths), _MOST_PATHS))],
        "left_out": max(len(found.paths) - _MOST_PATHS, 0),
        "trees": token_trees(found.samples),
        "samples": [
            {
                "policy": sample.policy,
                "role": sample.role,
                "reward": sample.reward,
                "fork": sample.fork,
                "truncated": sample.truncated,
                "path": sample.path,
                "tokens": len(sample.tokens),
                "trained": int(sample.mask.sum()),
            }
            for sample in found.samples
        ],
    }


def _path(found: Trajectory, number: int) -> dict[str, Any]:
    entry = found.paths[number]
    messages = found.messages(number)
    return {
        "policy": entry["policy"],
        "agent": entry.get("agent", ""),
        "fork": entry.get("fork", ""),
        "finish": entry.get("finish", ""),
        "reward": entry.get("reward"),
        "shared": len(messages) - len(entry["messages"]),
        "messages": [_cut(message) for message in messages[-_MOST_MESSAGES:]],
        "left_out": max(len(messages) - _MOST_MESSAGES, 0),
    }


def _cut(value: Any) -> Any:
    """The value with every text in it cut to what a page can show."""
    if isinstance(value, str):
        return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}… ({len(value):,} characters)"
    if isinstance(value, Mapping):
        return {str(name): _cut(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_cut(one) for one in value]
    return value


def tokens(run: WatchedRun, name: str, number: int, offset: int = 0) -> dict[str, Any]:
    """Return the tokens of one sample from `offset` on, with their values. Masked tokens have no log-prob."""
    found = Trajectories(run.folder.root).get(name)
    if not 0 <= number < len(found.samples):
        raise BadRequest(f"{name} has no sample {number}", f"it has {len(found.samples)}")
    sample = found.samples[number]
    part = slice(offset, offset + MOST_TOKENS)
    shown = sample.tokens[part].tolist()
    try:
        texts, unknown = token_texts(run.folder.root, sample.policy, shown), ""
    except RillflowError as error:  # the tokenizer is not on this machine
        texts, unknown = [f"⟨{token}⟩" for token in shown], error.message
    return {
        "offset": offset,
        "total": len(sample.tokens),
        "ids": shown,
        "texts": texts,
        "unknown": unknown,
        "mask": sample.mask[part].tolist(),
        "versions": sample.versions[part].tolist(),
        "logprobs": sample.logprobs[part].tolist(),
        **_told(sample, part),
    }


def _told(sample: TokenPath, part: slice) -> dict[str, Any]:
    """Return the trainer's values of the tokens; None where it reported none."""
    trainer = sample.trainer_logprobs
    return {
        "advantages": None if sample.advantages is None else sample.advantages[part].tolist(),
        "trainer_logprobs": None if trainer is None else trainer[part].tolist(),
        "differences": None if trainer is None else (trainer - sample.logprobs)[part].tolist(),
    }
