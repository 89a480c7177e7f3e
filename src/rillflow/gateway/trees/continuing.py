"""A call that follows an earlier answer of its session by naming it, as `previous_response_id` does.

The trees keep every answer's messages: nothing is stored for this, nor lost with a restart. What followed a raw prompt
is no message of a conversation.
"""

from __future__ import annotations

from rillflow.gateway.failures import CallRefused
from rillflow.gateway.sessions.session import Session
from rillflow.gateway.trees.messages import Message
from rillflow.gateway.trees.tree import RAW

INSTRUCTIONS = "instructions"  # marks, in a message's body, what is said to one call and not to those that follow it


def following(session: Session, answer: str, new: list[Message]) -> list[Message]:
    """The whole history: the instructions of this call, what `answer` ends, and what is new."""
    told = [message for message in new if INSTRUCTIONS in message.body]
    return [*told, *_plain(_up_to(session, answer)), *_plain(new)]


def _plain(messages: list[Message]) -> list[Message]:
    return [message for message in messages if INSTRUCTIONS not in message.body]


def _up_to(session: Session, answer: str) -> list[Message]:
    for tree in session.trees.values():
        for node in tree.calls.get(answer, ()):
            path = node.path()
            if node.usable and path[0].parent is not tree.roots().get(RAW):
                return [message for before in path for message in before.messages]
    raise CallRefused(
        f"no response with the id 'resp_{answer}' was given in this session",
        status=404,
        code="previous_response_not_found",
        param="previous_response_id",
    )
