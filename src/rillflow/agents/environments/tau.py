"""A customer service desk like that of tau-bench: tools, a database, rules, and a customer with a wish.

An action is a tool call, written as JSON `{"name": …, "arguments": {…}}`, or text for the customer. The reward is 1 if
the database is right when the customer leaves, and the agent has said the facts that it asked for; else 0.

With `user: script` the customer is part of the environment. With `user: role` the workflow `tau` plays the customer:
the observation of a text then has `info["awaits_customer"]`, and `leave` ends the episode.

A wish is made from a database. `changes` are the tool calls that lead to the wanted database; `told` lists the facts
that the customer asks for. A scripted customer recognises questions by keywords. It gives its name, agrees when asked,
and leaves when it is served, or after it had to repeat its wish too often.

The workflow `play` plays it with real tool calls. Roles: `agent` is trained; `customer` (with `user: role`) is any
policy, by the recipe's `roles`. Both get the episode's reward; a recipe that trains only the agent gives the customer a
policy that is not trained.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rillflow.agents.environments import tau_retail as retail
from rillflow.agents.environments.bases import Turn, World, rows, world_random
from rillflow.agents.environments.splits import check_split
from rillflow.errors import ConfigError
from rillflow.types import Observation

if TYPE_CHECKING:
    from rillflow.contracts import Episode, Role
    from rillflow.types import Said

WISHES = ("cancel", "address", "return", "exchange", "total", "refused")
PATIENCE = 4  # times that a customer repeats its wish
_ASKS_NAME = re.compile(r"\b(name|zip|who|identify|verify)\b", re.IGNORECASE)
_ASKS_YES = re.compile(r"\b(confirm|agree|go on|proceed|shall i|is that (right|ok)|yes)\b", re.IGNORECASE)
_BYE = re.compile(r"\b(bye|goodbye)\b", re.IGNORECASE)


@dataclass
class Wish:
    """The wish of a customer; `says` is its first message."""

    kind: str
    user: str
    order: str
    says: str
    changes: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def goal(self, data: retail.Database) -> retail.Database:
        """Return the database that the customer wants."""
        wanted = copy.deepcopy(data)
        for name, arguments in self.changes:
            said, _ = retail.call(wanted, name, arguments)
            assert not said.startswith("error"), said
        return wanted


def make_wish(data: retail.Database, kind: str, draw: random.Random) -> Wish:
    user = draw.choice(sorted(data["users"]))
    status = "pending" if kind in ("cancel", "address") else "delivered"
    order = next(number for number in data["users"][user]["orders"] if data["orders"][number]["status"] == status)
    item = draw.choice(data["orders"][order]["items"])
    about = data["items"][item]
    what = f"the {about['variant']} {about['product']}"
    if kind == "cancel":
        reason = draw.choice(retail.REASONS)
        changes = [("cancel_order", {"order": order, "reason": reason})]
        return Wish(kind, user, order, f"Please cancel my order {order}, it was {reason}.", changes)
    if kind == "address":
        address = f"{draw.randrange(1, 99)} {draw.choice(retail.STREETS)}"
        changes = [("change_address", {"order": order, "address": address})]
        return Wish(kind, user, order, f"Please send my order {order} to {address}.", changes)
    if kind == "return":
        changes = [("return_item", {"order": order, "item": item})]
        return Wish(kind, user, order, f"I want to return {what} of my order {order}.", changes)
    if kind == "exchange":
        others = [
            number
            for number, other in data["items"].items()
            if other["product"] == about["product"] and number not in data["orders"][order]["items"]
        ]
        new = draw.choice(others)
        changes = [("exchange_item", {"order": order, "item": item, "new_item": new})]
        says = f"In my order {order}, please exchange {what} for the {data['items'][new]['variant']} one."
        return Wish(kind, user, order, says, changes)
    if kind == "total":
        total = sum(data["items"][number]["price"] for number in data["orders"][order]["items"])
        return Wish(kind, user, order, f"How much was my order {order} in total?", told=[str(total)])
    return Wish(kind, user, order, f"Please cancel my order {order}, it was ordered by mistake.", told=["delivered"])


class ScriptedCustomer:
    """A customer that follows a script. `left` says that it has gone."""

    def __init__(self, wish: Wish, user: dict[str, Any]) -> None:
        self._wish = wish
        self._user = user
        self._repeated = 0
        self.left = False

    def answer(self, text: str, *, served: bool) -> str:
        """Return the answer to the agent's text; `served` says whether the wish is fulfilled."""
        if served:
            self.left = True
            return "Thank you, that is all."
        if _BYE.search(text):
            self.left = True
            return "Bye."
        if _ASKS_NAME.search(text):
            return f"I am {self._user['name']}, zip code {self._user['zip']}."
        if _ASKS_YES.search(text):
            return "Yes."
        self._repeated += 1
        if self._repeated > PATIENCE:
            self.left = True
            return "This leads nowhere. Bye."
        return self._wish.says


def briefing(wish: Wish, user: dict[str, Any]) -> str:
    """Return the instructions for a role that plays this customer."""
    return (
        f"You are {user['name']}, zip code {user['zip']}, a customer of a shop, writing to its service desk. What you "
        f"want: {wish.says} Say only what you are asked for, in one short sentence. Agree when you are asked whether "
        "to go on with what you want. When you have what you want, or it was refused for good, say END."
    )


_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w])")
_STATUS = re.compile(r"\b(pending|delivered|cancelled)\b")
_NOTHING: retail.Database = {"users": {}, "orders": {}, "items": {}}


class Tau(World):
    """A payload has `world` and `wish`; missing ones are drawn at random. With `brief` the first observation leaves out
    the rules and the tools, for workflows that send `info["rules"]` and `info["tools"]` themselves."""

    def __init__(self, *, steps: int = 20, user: Literal["script", "role"] = "script", brief: bool = False) -> None:
        super().__init__(steps=steps)
        self._scripted = user == "script"
        self._brief = brief
        self.data = self.wanted = _NOTHING
        self.wish = Wish("", "", "", "")
        self._said: list[str] = []
        self._customer: ScriptedCustomer | None = None

    def begin(self, payload: Mapping[str, Any], seed: int) -> str:
        draw = world_random("tau", payload, seed)
        self.data = retail.make_database(draw)
        self.wish = make_wish(self.data, payload.get("wish") or draw.choice(WISHES), draw)
        self.wanted = self.wish.goal(self.data)
        self._said = []
        user = self.data["users"][self.wish.user]
        self._customer = ScriptedCustomer(self.wish, user) if self._scripted else None
        says = f"Customer: {self.wish.says}"
        return says if self._brief else f"{retail.RULES}\nTools, called as JSON: {_signatures()}\n{says}"

    def info(self) -> dict[str, Any]:
        if self._taken:
            return {"awaits_customer": False}
        briefed = briefing(self.wish, self.data["users"][self.wish.user])
        return {"rules": retail.RULES, "tools": retail.schemas(), "customer": briefed, "awaits_customer": False}

    def act(self, action: str) -> Turn:
        called = tool_call(action)
        if called is not None:
            said, sense = retail.call(self.data, *called)
            return Turn(said, invalid=not sense)
        if not action or action.startswith("{"):
            return Turn('error: a tool call is {"name": …, "arguments": {…}}', invalid=True)
        self._said.append(action)
        if self._customer is None:
            return Turn("")
        answer = self._customer.answer(action, served=self.served())
        if self._customer.left:
            return Turn(f"Customer: {answer}", float(self.served()), done=True)
        return Turn(f"Customer: {answer}")

    async def step(self, action: str) -> Observation:
        seen = await super().step(action)
        if self._customer is None and not seen.done and not seen.text:
            return Observation(seen.text, seen.reward, seen.done, seen.actions, seen.info | {"awaits_customer": True})
        return seen

    async def leave(self) -> Observation:
        """End the episode, because the customer that a role plays has left."""
        self._state = "over"
        reward = float(self.served())
        info = {"invalid": False, "won": reward == 1.0, "steps": self._taken}
        return Observation("The customer has left.", reward, True, [], info)

    def served(self) -> bool:
        """Return whether the database is as the customer wants it, and the agent has said the facts asked for."""
        told = all(any(_tells(said, fact) for said in self._said) for fact in self.wish.told)
        return told and self.data == self.wanted

    def actions(self) -> list[str] | None:
        return None

    async def plan(self) -> list[str]:
        """Return the actions of a good agent, from the beginning: identify, look up, ask, change."""
        user = self.data["users"][self.wish.user]
        found = copy.deepcopy(user)
        calls: list[tuple[str, dict[str, str]]] = [
            ("find_user", {"name": found["name"], "zip": found["zip"]}),
            ("get_order", {"order": self.wish.order}),
        ]
        plan = ["What is your name and zip code?", *(_written(*called) for called in calls)]
        if self.wish.kind == "exchange":
            product = self.data["items"][self.wish.changes[0][1]["item"]]["product"]
            plan.append(_written("get_product", {"product": product}))
        if self.wish.changes:
            plan.append("I will do that. Shall I go on?")
            plan += [_written(*called) for called in self.wish.changes]
            return [*plan, "It is done."]
        if self.wish.kind == "refused":
            return [*plan, "I cannot cancel it, it is delivered."]
        return [*plan, f"It was {self.wish.told[0]} dollars."]


def _tells(said: str, fact: str) -> bool:
    """Return whether a text names the fact and no rival: a list of guesses does not count."""
    rivals = _NUMBER.findall(said) if _NUMBER.fullmatch(fact) else _STATUS.findall(said.lower())
    return set(rivals) == {fact}


def tool_call(action: str) -> tuple[Any, Any] | None:
    """Return the name and the arguments of a tool call, or None for other actions."""
    if not action.startswith("{"):
        return None
    try:
        read = json.loads(action)
    except (ValueError, RecursionError):
        return None
    return (read.get("name"), read.get("arguments")) if isinstance(read, dict) else None


def _written(name: str, arguments: Mapping[str, str]) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def _signatures() -> str:
    return "; ".join(f"{name}({', '.join(retail.arguments_of(tool))})" for name, (tool, _) in retail.TOOLS.items())


def prompts(split: str, count: int, seed: int, wishes: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield `count` prompts; worlds with even numbers are for training, those with odd numbers are held out."""
    check_split(split)
    unknown = set(wishes or ()) - set(WISHES)
    if unknown:
        raise ValueError(f"unknown wishes: {', '.join(sorted(unknown))}; there are {', '.join(WISHES)}")
    draw = random.Random(f"tau/{split}/{seed}")

    def payloads() -> Iterator[dict[str, Any]]:
        while True:
            yield {
                "world": 2 * draw.randrange(1 << 29) + (split == "heldout"),
                "wish": draw.choice(wishes or WISHES),
            }

    yield from rows("tau", payloads(), split, count, seed)


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
                seen = await environment.step(_sent(use.name, use.arguments))
                messages.append({"role": "tool", "tool_call_id": use.id, "content": seen.text})
            continue
        seen = await _tell(environment, customer, said)
        messages.append({"role": "user", "content": seen.text.removeprefix("Customer: ")})
    return seen.reward if seen.done else 0.0


def _sent(name: str, arguments: str) -> str:
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
