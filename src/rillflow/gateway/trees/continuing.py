"""A call that follows an earlier answer of its session by naming it, as `previous_response_id` does.

The trees keep every answer's messages: nothing is stored for this, nor lost with a restart. What followed a raw prompt
is no message of a conversation.
"""

from __future__ import annotations

from rillflow.gateway.failures import CallRefused
from rillflow.gateway.sessions.session import Session
from rillflow.gateway.trees.messages import Message
from rillflow.gateway.trees.tree import RAW, Node

INSTRUCTIONS = "instructions"  # marks, in a message's body, what is said to one call and not to those that follow it


def following(session: Session, answer: str, new: list[Message]) -> list[Message]:
    """The whole history: the instructions of this call, what `answer` ends, and what is new."""
    told = [message for message in new if INSTRUCTIONS in message.body]
    _, node = answer_of(session, answer, "previous_response_id")
    before = [message for above in node.path() for message in above.messages]
    return [*told, *_plain(before), *_plain(new)]


def _plain(messages: list[Message]) -> list[Message]:
    return [message for message in messages if INSTRUCTIONS not in message.body]


def answer_of(session: Session, answer: str, param: str) -> tuple[str, Node]:
    """Return the policy and the node of an answer of this session, of which `param` holds the id."""
    for policy, tree in session.trees.items():
        for node in tree.calls.get(answer, ()):
            if node.usable and node.path()[0].parent is not tree.roots().get(RAW):
                return policy, node
    raise CallRefused(
        f"no response with the id 'resp_{answer}' was given in this session",
        status=404,
        code="previous_response_not_found" if param == "previous_response_id" else "response_not_found",
        param=param,
    )
