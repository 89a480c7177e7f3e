"""The requests of an engine and the slots that they sit in: one array per property, indexed by slot, so that a step
touches all rows at once.

Invariants: `cached[s] <= length[s]`, and the first `cached[s]` tokens of slot s have their keys and values in the
cache, computed by the current weights, or, where `stale[s]`, some of them by earlier ones: then no other sequence ever
takes them over. An active slot belongs to a request; an inactive one with `cached > 0` is
resident: a finished sequence kept for its prefix until its slot is needed. A waiting slot (`leader >= 0`) gets its
prefix from another slot as soon as that one has it. A leader may wait, too, but only for a slot that was taken before
it, so no cycle can form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rillflow.engine.embedded.sampling import Array, Matcher, Settings
from rillflow.engine.experts import UNKNOWN
from rillflow.types import Chunk, GenerateRequest, Sampling

MIN_SHARED = 8  # tokens; below this a copy costs more than computing them with the rest of the prompt


@dataclass(eq=False, slots=True)
class Ticket:
    """A request on its way through the engine."""

    request: GenerateRequest
    seed: int
    slot: int = -1
    ended: bool = False
    seam: str = ""  # why sampling was cut before the next token
    matcher: Matcher | None = None  # of its grammar


@dataclass(slots=True)
class Counts:
    """Counters of an engine since its start."""

    generated: int = 0
    prefilled: int = 0
    reused: int = 0
    steps: int = 0
    loads: int = 0


@dataclass(slots=True)
class Outbox:
    """Chunks for the callers, in order: steps fill it, and it is emptied between them."""

    chunks: list[tuple[Ticket, Chunk]] = field(default_factory=list)

    def take(self) -> list[tuple[Ticket, Chunk]]:
        taken, self.chunks = self.chunks, []
        return taken


class Match(NamedTuple):
    """The slot that shares most tokens, and how many; no slot (-1) where there is nothing to compare."""

    slot: int
    shared: int


class Slots:
    def __init__(self, count: int, context: int, width: int = 0) -> None:
        """`width` is the number of experts that are recorded for a token."""
        self.count = count
        self.context = context
        self.tokens = np.full((count, context), -1, np.int32)
        self.logprobs = np.zeros((count, context), np.float32)
        self.raw_logprobs = np.zeros((count, context), np.float32)
        self.experts = np.full((count, context, width), UNKNOWN, np.uint16)
        self.length = np.zeros(count, np.int64)  # tokens known: prompt and produced
        self.cached = np.zeros(count, np.int64)  # of which this many are in the KV cache
        self.sent = np.zeros(count, np.int64)  # of which this many the caller has, the prompt included
        self.limit = np.zeros(count, np.int64)  # length at which generation ends
        self.active = np.zeros(count, bool)
        self.stale = np.zeros(count, bool)  # part of the cache is of earlier weights
        self.used = np.zeros(count, np.int64)  # tick of the last use, for eviction
        self.leader = np.full(count, -1, np.int64)
        self.shared = np.zeros(count, np.int64)  # tokens to take over from the leader
        self.temperature = np.ones(count, np.float32)
        self.top_p = np.ones(count, np.float32)
        self.top_k = np.zeros(count, np.int64)
        self.seed = np.zeros(count, np.uint64)
        self.stops = np.full((count, 1), -1, np.int64)
        self.constrained = np.zeros(count, bool)  # under a grammar
        self.everyone = np.ones(count, bool)
        self._tick = 0

    def occupy(self, slot: int, tokens: list[int], sampling: Sampling, seed: int, cached: int) -> None:
        """Seat a sequence whose first `cached` tokens the slot already holds."""
        length = len(tokens)
        self.tokens[slot, :length] = tokens
        self.length[slot] = self.sent[slot] = length
        self.cached[slot] = cached
        self.stale[slot] = False
        self.limit[slot] = min(length + sampling.max_tokens, self.context)
        self.active[slot] = True
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        self.seed[slot] = np.uint64(seed)
        self._set_stops(slot, sampling.stop_tokens)

    def release(self, slot: int) -> None:
        """End the sequence; its tokens stay resident. Neutral settings keep the others' step on its fast path."""
        self._tick += 1
        self.active[slot] = False
        if self.stale[slot]:
            self.cached[slot] = 0
        self.used[slot] = self._tick
        self.leader[slot] = -1
        self.temperature[slot] = self.top_p[slot] = 1.0
        self.top_k[slot] = 0
        self.constrained[slot] = False

    def _set_stops(self, slot: int, stops: tuple[int, ...]) -> None:
        missing = len(stops) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(stops)] = stops

    def swap(self, one: int, other: int) -> None:
        """Exchange everything known about two slots (their KV columns are exchanged by the cache)."""
        pair, turned = [one, other], [other, one]
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray) and name != "leader":
                array[pair] = array[turned]
        leader = self.leader.copy()
        leader[pair] = self.leader[turned]
        self.leader = np.where(leader == one, other, np.where(leader == other, one, leader))

    def forget(self) -> None:
        """Forget everything cached, because the weights changed; no slot waits for a prefix any more."""
        self.cached[:] = 0
        self.stale[:] = False
        self.leader[:] = -1

    def outdate(self) -> None:
        """Keep the cached tokens of running sequences although the weights changed; no other sequence may copy them."""
        self.cached[~self.active] = 0
        self.stale[:] = self.active & (self.cached > 0)
        self.leader[:] = -1

    def match(self, tokens: Array, among: Array) -> Match:
        """The slot, of those in the mask `among`, with the longest common prefix, rather one that does not wait for its
        own. All slots are compared at once."""
        count = len(tokens)
        if not count:
            return Match(-1, 0)
        differ = self.tokens[:, :count] != tokens
        common = np.where(differ.any(1), differ.argmax(1), count)
        # An active slot will soon have cached all of its tokens; a resident one never will.
        common = np.minimum(common, np.where(self.active, self.length, self.cached))
        common[~among | self.stale] = 0
        slot = int((2 * common + (self.leader < 0)).argmax())
        return Match(slot, int(common[slot]))

    def vacant(self, keep: int) -> int:
        """The inactive slot to give away: an empty one, else the least recently used; `keep` only if it is the last."""
        order = np.where(self.cached > 0, self.used, 0)
        order[self.active] = np.iinfo(np.int64).max
        if keep >= 0 and not self.active[keep] and self.active.sum() < self.count - 1:
            order[keep] = np.iinfo(np.int64).max
        return int(order.argmin())

    def span(self) -> int:
        """One more than the highest active slot."""
        active = np.flatnonzero(self.active)
        return int(active[-1]) + 1 if active.size else 0

    def settings(self, rows: slice | Array) -> Settings:
        return Settings(self.temperature[rows], self.top_p[rows], self.top_k[rows], self.seed[rows], self.length[rows])

    def append(self, slots: Array, tokens: Array, logprobs: Array, raw_logprobs: Array) -> Array:
        """Add one sampled token to each of the slots; returns which of them have hit a stop token."""
        at = self.length[slots]
        self.tokens[slots, at] = tokens
        self.logprobs[slots, at] = logprobs
        self.raw_logprobs[slots, at] = raw_logprobs
        self.length[slots] = at + 1
        stopped: Array = (self.stops[slots] == tokens[:, None]).any(1)
        return stopped
