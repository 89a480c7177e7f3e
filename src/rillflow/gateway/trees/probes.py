"""Conversations that find out how a chat template treats earlier turns.

They cover what real templates do: they drop the reasoning of old answers, write the tools beside the last question,
join consecutive tool results, or add a default system message. The texts are arbitrary but unlikely to be special to a
template.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from rillflow.errors import BadRequest
from rillflow.gateway.trees.messages import REASONING, Body

if TYPE_CHECKING:
    from rillflow.gateway.trees.render import Renderer

NAME, ARGUMENT, RESULT, ID = "probe", "qvalue", "rprobe", "probe0001"


def _user(text: str) -> Body:
    return {"role": "user", "content": text}


def answer(text: str) -> Body:
    return {"role": "assistant", "content": text}


def result(text: str, id: str = ID) -> Body:
    return {"role": "tool", "content": text, "tool_call_id": id, "name": NAME}


def calling(text: str, id: str = ID) -> Body:
    function = {"name": NAME, "arguments": {"key": ARGUMENT}}
    return answer(text) | {"tool_calls": [{"id": id, "type": "function", "function": function}]}


STAND_IN = [_user("qfirst"), answer("afirst")]
STAND_IN_CALLING = [_user("qfirst"), calling("afirst")]

PROBE_TOOL: Body = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "a probe",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


class Probe(NamedTuple):
    """A history that ends with an answer, and messages that may follow it."""

    history: list[Body]
    new: list[Body]
    tools: list[Body] | None


def _histories() -> list[list[Body]]:
    system: Body = {"role": "system", "content": "rules"}
    starts: tuple[list[Body], ...] = (
        [],
        [system],
        [_user("qolder"), answer("aolder")],
        [_user("qolder"), calling(""), result("rolder")],
    )
    thinking = "<think>\nhmm\n</think>\n\nalast"
    reasoned = answer("alast") | {REASONING: "hmm"}
    answers = (answer("alast"), answer(""), answer(thinking), reasoned)
    return [[*start, _user("qlast"), answer] for start, answer in product(starts, answers)]


def _calling_histories() -> list[list[Body]]:
    reasoned = calling("alast") | {REASONING: "hmm"}
    ends = (calling("alast"), calling(""), calling("<think>\nhmm\n</think>\n\nalast"), reasoned)
    older = (calling("aolder"), calling("aolder") | {REASONING: "hmm"})
    return [[_user("qlast"), end] for end in ends] + [
        [_user("qlast"), before, result("rolder"), end] for before, end in product(older, ends)
    ]


def _probes() -> list[Probe]:
    asked = ([_user("qnew")], [_user("qnew"), _user("qmore")])
    results = ([result("rnew")], [result("rnew"), result("rmore")], [result("rnew"), _user("qnew")])
    shapes = [*product(_histories(), asked), *product(_calling_histories(), results)]
    return [Probe(history, list(new), tools) for (history, new), tools in product(shapes, (None, [PROBE_TOOL]))]


PROBES = _probes()

# ---------------------------------------------------------------- what the probes find


class Traits(NamedTuple):
    """How a template treats earlier turns.

    `append_only`: no message changes how an earlier one is written. `near`: an answer and the tool results after it do
    not change anything before them. `drops_words`: it leaves out words beside tool calls.
    """

    append_only: bool = False
    near: bool = False
    drops_words: bool = False


def traits_of(renderer: Renderer) -> Traits:
    """Return how the renderer's template treats earlier turns, over all probes."""
    probing = _Probing(renderer)
    append_only = near = True
    for probe in PROBES:
        append_only = append_only and probing.appends(probe)
        near = near and (not only_results(probe.new) or probing.is_near(probe))
        if not (append_only or near):
            break
    return Traits(append_only, near, probing.drops_words)


class _Probing:
    def __init__(self, renderer: Renderer) -> None:
        self.drops_words = False
        self._renderer = renderer

    def appends(self, probe: Probe) -> bool:
        """Return whether new messages are written after a stand-in as they are after the whole history."""
        renderer = self._renderer
        try:
            found = renderer.continued(probe.history, probe.new, probe.tools)
        except BadRequest:
            return True  # the template refuses this shape, so it never occurs
        try:
            rest = renderer.after_stand_in(probe.new)
            beside = renderer.after_stand_in([probe.history[-1], *probe.new], answered=False)
        except BadRequest:
            return False
        if found is None or rest is None or beside != found or not found.endswith(rest):
            return False
        return self._has_words(probe.history[-1], found[: len(found) - len(rest)])

    def _has_words(self, answer: Body, written: str) -> bool:
        """Return whether `written` holds the words of a probe's answer. Words beside calls may be missing."""
        words = [answer["content"].rpartition("\n")[2]] if answer["content"] else []
        if answer.get("tool_calls") and words and words[0] not in written:
            self.drops_words, words = True, []
        thought = [answer[REASONING]] if REASONING in answer and not self.drops_words else []
        return all(word in written for word in [*words, *thought])

    def is_near(self, probe: Probe) -> bool:
        """Return whether an answer after a stand-in is continued, or rewritten, as in the whole history."""
        renderer = self._renderer
        try:
            whole = renderer.continued(probe.history, probe.new, probe.tools)
        except BadRequest:
            return True
        try:
            near = [STAND_IN[0], probe.history[-1]]
            return renderer.continued(near, probe.new, renderer.template.least_tools) == whole
        except BadRequest:
            return False


def only_results(new: list[Body]) -> bool:
    return bool(new) and all(body["role"] == "tool" for body in new)
