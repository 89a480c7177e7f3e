"""Changing what a worker can do, while the run goes on.

A change is refused if the run could never progress after it. A worker without tags is idle. Set the tags of a lost
worker, even to the same ones, to try it again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from rillflow.config import Recipe
from rillflow.config.resources import Tag
from rillflow.errors import ConfigError, RunError
from rillflow.resources.placement import plan, planned
from rillflow.resources.workers import TAGS, Worker, find

NONE = "none"


def parse_tags(words: Sequence[str], now: Collection[Tag]) -> frozenset[Tag]:
    """Parse tags: `rollout,train` or `none` replace the tags, `+train -rollout` change those of `now`."""
    names = [name for word in words for name in word.replace(",", " ").split()]
    signed = [name for name in names if name[0] in "+-"]
    if not names or (signed and len(signed) < len(names)) or (NONE in names and len(names) > 1):
        raise ConfigError(
            f"{' '.join(names)!r} is not a list of tags", "say `rollout,train`, `none`, or `+train -rollout`"
        )
    tags: set[Tag] = set(now) if signed else set()
    for name in names:
        if name.startswith("-"):
            tags.discard(_tag(name[1:]))
        elif name != NONE:
            tags.add(_tag(name.removeprefix("+")))
    return frozenset(tags)


def _tag(name: str) -> Tag:
    for tag in TAGS:
        if name == tag:
            return tag
    raise ConfigError(f"unknown tag {name!r}", f"one of: {', '.join(TAGS)}")


def retagged(recipe: Recipe, workers: Sequence[Worker], name: str, words: Sequence[str]) -> list[Worker]:
    """Return the workers after the change of one; raises RunError if the run could not continue with them."""
    old = find(workers, name)
    new = msgspec.structs.replace(old, tags=parse_tags(words, old.tags), lost=False)
    changed = [new if worker is old else worker for worker in workers]
    try:
        plan(recipe, changed, planned(recipe, workers))
    except RunError as error:
        tags = ",".join(sorted(new.tags)) or NONE
        raise RunError(f"{name} cannot have the tags {tags}: {error.message}", error.hint) from None
    return changed
