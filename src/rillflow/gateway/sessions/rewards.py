"""The rewards of an episode: for a call, a turn, a leaf or the whole session.

Each target has one reward, the last one given. Calls and turns are looked up when the reward is given, leaves when the
session is settled, because the trees grow until then. A reward for an unknown target is refused, or reported by
`settle`; it never goes to another target.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from rillflow.gateway.shapes import CallRefused
from rillflow.gateway.trees.tree import Node, TokenTree

_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
_MOST_LEAVES = 16_384  # a leaf may be rewarded before it exists
_HIGHEST_LEAF = (1 << 31) - 1
_MOST_POLICIES = 1024  # likewise a policy
_LONGEST_NAME = 256
_NAMED = 8  # calls that a refusal lists


class Gift(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One reward with its target: `answers` by their nodes' `call`, a leaf of a policy, or else the session."""

    value: float
    answers: tuple[str, ...] = ()
    leaf: int | None = None
    policy: str | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """The rewards of a session by target. `unknown` lists the rewards whose target does not exist.

    `answers` are by a node's `call`, `leaves` by policy and number (the index of the sample), and `session` by policy,
    for policies that were called.
    """

    answers: Mapping[str, float] = field(default_factory=dict)
    leaves: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    session: Mapping[str, float] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


class Rewards:
    """The rewards of one session, whose `trees` may still grow."""

    def __init__(self, trees: Mapping[str, TokenTree]) -> None:
        self._trees = trees
        self._answers: dict[str, float] = {}
        self._leaves: dict[tuple[str, int], float] = {}
        self._session: dict[str | None, float] = {}

    def give(
        self,
        value: float,
        *,
        call: str | None = None,
        turn: int | None = None,
        leaf: int | None = None,
        policy: str | None = None,
    ) -> Gift:
        """Give `value` to one target; return the gift that `restore` takes.

        `call` is an id as the agent saw it, with or without the prefix of its dialect and the number of a choice.
        `turn` counts the calls that were begun and not abandoned, from 0; with `policy`, those of that policy. Without
        `policy`, a leaf belongs to the only policy, and a session's reward to all policies without their own.
        """
        if not math.isfinite(value):
            raise CallRefused("a reward must be a finite number", param="value")
        if sum(target is not None for target in (call, turn, leaf)) > 1:
            raise CallRefused("a reward has one target: a call, a turn or a leaf", param="call")
        if policy is not None and not 0 < len(policy) <= _LONGEST_NAME:
            raise CallRefused(f"the name of a policy has 1 to {_LONGEST_NAME} characters", param="policy")
        if call is not None:
            gift = Gift(float(value), self._call(call, policy))
        elif turn is not None:
            gift = Gift(float(value), self._turn(turn, policy))
        elif leaf is not None:
            gift = self._leaf(float(value), leaf, policy or self._only_policy())
        else:
            gift = self._whole(float(value), policy)
        self.restore([gift])
        return gift

    def restore(self, gifts: Iterable[Gift]) -> None:
        """Take gifts that `give` returned; later ones replace earlier ones."""
        for gift in gifts:
            if gift.answers:
                self._answers |= dict.fromkeys(gift.answers, gift.value)
            elif gift.leaf is not None and gift.policy is not None:
                self._leaves[gift.policy, gift.leaf] = gift.value
            else:
                self._session[gift.policy] = gift.value

    def state(self) -> list[Gift]:
        """Return gifts that give the same rewards."""
        return [
            *(Gift(value, (answer,)) for answer, value in self._answers.items()),
            *(Gift(value, leaf=leaf, policy=policy) for (policy, leaf), value in self._leaves.items()),
            *(Gift(value, policy=policy) for policy, value in self._session.items()),
        ]

    @property
    def of_session(self) -> bool:
        """True if the session, or a policy's part of it, has a reward."""
        return bool(self._session)

    def settle(self) -> Settled:
        """Return the rewards so far by target, for targets that exist."""
        there = {node.call for tree in self._trees.values() for node in tree.nodes() if node.usable}
        leaves: dict[str, dict[int, float]] = {}
        unknown = [f"answer {answer!r}" for answer in self._answers if answer not in there]
        many = {policy: len(self._trees[policy].leaves()) for policy, _ in self._leaves if policy in self._trees}
        for (policy, leaf), value in self._leaves.items():
            if leaf < many.get(policy, 0):
                leaves.setdefault(policy, {})[leaf] = value
            else:
                unknown.append(f"leaf {leaf} of policy {policy!r}, which has {many.get(policy, 0)}")
        unknown += [f"policy {policy!r}" for policy in self._session if policy and policy not in self._trees]
        answers = {answer: value for answer, value in self._answers.items() if answer in there}
        return Settled(answers, leaves, self._by_policy(), tuple(unknown))

    def _by_policy(self) -> dict[str, float]:
        given = {policy: self._session.get(policy, self._session.get(None)) for policy in self._trees}
        return {policy: value for policy, value in given.items() if value is not None}

    # ------------------------------------------------------------ looking up

    def _calls(self, policy: str | None) -> dict[str, list[Node]]:
        """Return the calls that were begun and not abandoned, with their answers, in order."""
        trees = [tree for name, tree in self._trees.items() if policy in (None, name)]
        calls = {
            id: [node for node in nodes if not node.abandoned] for tree in trees for id, nodes in tree.calls.items()
        }
        return {id: calls[id] for id in sorted(calls, key=lambda id: calls[id][0].id if calls[id] else 0) if calls[id]}

    def _call(self, call: str, policy: str | None) -> tuple[str, ...]:
        calls = self._calls(policy)
        for name in (call, *(call.removeprefix(prefix) for prefix in _PREFIXES)):
            found = calls.get(name) or [node for node in calls.get(name.rpartition("_")[0], ()) if node.call == name]
            if found:
                return tuple(node.call for node in found)
        raise _unknown(f"no call {call[:_LONGEST_NAME]!r}", calls, "call", policy)

    def _turn(self, turn: int, policy: str | None) -> tuple[str, ...]:
        calls = self._calls(policy)
        if not 0 <= turn < len(calls):
            raise _unknown(f"no turn {turn}", calls, "turn", policy)
        return tuple(node.call for node in list(calls.values())[turn])

    def _leaf(self, value: float, leaf: int, policy: str) -> Gift:
        if not 0 <= leaf <= _HIGHEST_LEAF:
            raise CallRefused(f"leaves are numbered from 0 to {_HIGHEST_LEAF}", param="leaf")
        if (policy, leaf) not in self._leaves and len(self._leaves) >= _MOST_LEAVES:
            raise CallRefused(f"at most {_MOST_LEAVES} leaves can have a reward", code="reward_limit_exceeded")
        return Gift(value, leaf=leaf, policy=policy)

    def _whole(self, value: float, policy: str | None) -> Gift:
        if policy not in self._session and len(self._session) >= _MOST_POLICIES:
            raise CallRefused(f"at most {_MOST_POLICIES} policies can have a reward", code="reward_limit_exceeded")
        return Gift(value, policy=policy)

    def _only_policy(self) -> str:
        if len(self._trees) == 1:
            return next(iter(self._trees))
        known = ", ".join(self._trees) or "none yet"
        raise CallRefused(f"name the policy whose leaf it is; policies of this session: {known}", param="policy")


def _unknown(what: str, calls: Mapping[str, list[Node]], param: str, policy: str | None) -> CallRefused:
    last = list(calls)[-_NAMED:]
    has = f"it has {len(calls)}, the last of them {', '.join(last)}" if last else "it has none"
    of = "this session" if policy is None else f"policy {policy!r} in this session"
    return CallRefused(f"{what} in {of}; {has}", status=404, code="call_not_found", param=param)
