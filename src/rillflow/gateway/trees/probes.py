"""Conversations that tell whether a chat template is append-only.

They cover what real templates do to earlier turns: dropping the reasoning of old answers, writing the tools beside
the last question, joining consecutive tool results, a default system message. The texts are arbitrary but unlikely
to be special to any template.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from rillflow.gateway.trees.messages import Body


def _user(text: str) -> Body:
    return {"role": "user", "content": text}


def _answer(text: str) -> Body:
    return {"role": "assistant", "content": text}


def _result(text: str) -> Body:
    return {"role": "tool", "content": text, "tool_call_id": "probe0001", "name": "probe"}


def _calling(text: str) -> Body:
    function = {"name": "probe", "arguments": {"key": "value"}}
    return _answer(text) | {"tool_calls": [{"id": "probe0001", "type": "function", "function": function}]}


STAND_IN = [_user("qfirst"), _answer("afirst")]
STAND_IN_CALLING = [_user("qfirst"), _calling("afirst")]

_TOOL: Body = {
    "type": "function",
    "function": {
        "name": "probe",
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
        [_user("qolder"), _answer("aolder")],
        [_user("qolder"), _calling(""), _result("rolder")],
    )
    thinking = "<think>\nhmm\n</think>\n\nalast"
    reasoned = _answer("alast") | {"reasoning_content": "hmm"}
    answers = (_answer("alast"), _answer(""), _answer(thinking), reasoned)
    return [[*start, _user("qlast"), answer] for start, answer in product(starts, answers)]


def _calling_histories() -> list[list[Body]]:
    reasoned = _calling("alast") | {"reasoning_content": "hmm"}
    ends = (_calling("alast"), _calling(""), _calling("<think>\nhmm\n</think>\n\nalast"), reasoned)
    older = (_calling("aolder"), _calling("aolder") | {"reasoning_content": "hmm"})
    return [[_user("qlast"), end] for end in ends] + [
        [_user("qlast"), before, _result("rolder"), end] for before, end in product(older, ends)
    ]


def _probes() -> list[Probe]:
    asked = ([_user("qnew")], [_user("qnew"), _user("qmore")])
    results = ([_result("rnew")], [_result("rnew"), _result("rmore")], [_result("rnew"), _user("qnew")])
    shapes = [*product(_histories(), asked), *product(_calling_histories(), results)]
    return [Probe(history, list(new), tools) for (history, new), tools in product(shapes, (None, [_TOOL]))]


PROBES = _probes()
