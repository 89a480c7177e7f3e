"""The environment `tau` with real tool calls: an agent serves a customer, which another role may play.

Roles: `agent` is trained; `customer` (with the environment's `user: role`) is any policy, by the recipe's `roles`. Both
get the episode's reward; a recipe that trains only the agent gives the customer a policy that is not trained.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rillflow.agents.environments.tau import Tau, tool_call
from rillflow.errors import ConfigError

if TYPE_CHECKING:
    from rillflow.contracts import Episode, Role
    from rillflow.types import Observation, Said

Message = dict[str, Any]
_TURNS = 30
_END = "END"


async def play(episode: Episode) -> float:
    """Play one episode and return its reward."""
    environment = episode.environment
    if not isinstance(environment, Tau):
        raise ConfigError("the workflow `tau` plays the environment `tau`", "give `environment: {name: tau}`")
    seen = await environment.reset(episode.payload, episode.seed)
    customer = _Customer(episode.role("customer"), seen.info["customer"], environment.wish.says)
    agent, tools = episode.role("agent"), seen.info["tools"]
    messages: list[Message] = [
        {"role": "system", "content": seen.info["rules"]},
        {"role": "user", "content": environment.wish.says},
    ]
    for _ in range(_TURNS):
        if seen.done:
            break
        said = await agent.ask(messages, tools=tools)
        messages.append(said.message)
        if said.uses:
            for use in said.uses:
                seen = await environment.step(_written(use.name, use.arguments))
                messages.append({"role": "tool", "tool_call_id": use.id, "content": seen.text})
            continue
        seen = await _tell(environment, customer, said)
        messages.append({"role": "user", "content": seen.text.removeprefix("Customer: ")})
    return seen.reward if seen.done else 0.0


def _written(name: str, arguments: str) -> str:
    """Return a call in the environment's format; arguments that are not JSON become null, which it refuses."""
    try:
        return json.dumps({"name": name, "arguments": json.loads(arguments)})
    except (ValueError, RecursionError):
        return json.dumps({"name": name, "arguments": None})


async def _tell(environment: Tau, customer: _Customer, said: Said) -> Observation:
    """Return the customer's reply to the agent's text."""
    # Text is never a tool call here, even if it looks like one: calls come as such.
    text = f"({said.text})" if tool_call(said.text.strip()) is not None else said.text
    seen = await environment.step(text or "…")
    if not seen.info.get("awaits_customer"):
        return seen
    answer = await customer.answer(said.text)
    if answer is None:
        return await environment.leave()
    return type(seen)(answer, seen.reward, seen.done, seen.actions, seen.info)


class _Customer:
    """A role that plays the customer; it sees the conversation from the other side, without tools."""

    def __init__(self, role: Role, briefing: str, first: str) -> None:
        self._role = role
        self._messages: list[Message] = [
            {"role": "system", "content": briefing},
            {"role": "user", "content": "Hello, what can I do for you?"},
            {"role": "assistant", "content": first},
        ]

    async def answer(self, text: str) -> str | None:
        """Return the customer's reply, or None if it has left."""
        self._messages.append({"role": "user", "content": text})
        said = await self._role.ask(self._messages)
        self._messages.append(said.message)
        return None if _END in said.text else said.text
