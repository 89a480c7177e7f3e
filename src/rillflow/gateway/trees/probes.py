"""Conversations that tell whether a chat template is append-only.

They cover what real templates do to earlier turns: dropping the reasoning of old answers, writing the tools beside
the last question, joining consecutive tool results, a default system message. The texts are arbitrary but unlikely
to be special to any template.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from rillflow.gateway.trees.messages import Body

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
    reasoned = answer("alast") | {"reasoning_content": "hmm"}
    answers = (answer("alast"), answer(""), answer(thinking), reasoned)
    return [[*start, _user("qlast"), answer] for start, answer in product(starts, answers)]


def _calling_histories() -> list[list[Body]]:
    reasoned = calling("alast") | {"reasoning_content": "hmm"}
    ends = (calling("alast"), calling(""), calling("<think>\nhmm\n</think>\n\nalast"), reasoned)
    older = (calling("aolder"), calling("aolder") | {"reasoning_content": "hmm"})
    return [[_user("qlast"), end] for end in ends] + [
        [_user("qlast"), before, result("rolder"), end] for before, end in product(older, ends)
    ]


def _probes() -> list[Probe]:
    asked = ([_user("qnew")], [_user("qnew"), _user("qmore")])
    results = ([result("rnew")], [result("rnew"), result("rmore")], [result("rnew"), _user("qnew")])
    shapes = [*product(_histories(), asked), *product(_calling_histories(), results)]
    return [Probe(history, list(new), tools) for (history, new), tools in product(shapes, (None, [PROBE_TOOL]))]


PROBES = _probes()
