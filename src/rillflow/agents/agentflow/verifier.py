"""The verifier: a model apart from the planner that says whether enough is known. It is never trained.

It is conservative: if its answer cannot be read, was cut or is late, the loop goes on.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from rillflow.agents.agentflow.options import Endpoint, FlowOptions, asked
from rillflow.contracts import Episode, Role

if TYPE_CHECKING:
    from openai import AsyncOpenAI

log = logging.getLogger(__name__)

ROLE = "verifier"
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"sufficient": {"type": "boolean"}},
    "required": ["sufficient"],
    "additionalProperties": False,
}
_MAX_TOKENS = 24


class Verifier(Protocol):
    async def sufficient(self, question: str, memory: str) -> bool: ...


class NoVerifier:
    """Only the planner ends a task."""

    async def sufficient(self, question: str, memory: str) -> bool:
        return False


class PolicyVerifier:
    """A role of the workflow. Its calls are the session's: the recipe's `untrained` keeps them out of training."""

    def __init__(self, role: Role, options: FlowOptions) -> None:
        self._role = role
        self._options = options
        self._settings: dict[str, Any] = {"max_tokens": _MAX_TOKENS}
        if options.structured:
            self._settings["schema"] = SCHEMA

    async def sufficient(self, question: str, memory: str) -> bool:
        prompt = asked(self._options.prompts, "verifier", question=question, memory=memory)
        said = await self._role.ask([{"role": "user", "content": prompt}], **self._settings)
        return says_sufficient(said.text)


class EndpointVerifier:
    """A model behind any OpenAI-compatible server. An error of the server counts as "not sufficient"."""

    def __init__(self, endpoint: Endpoint, options: FlowOptions) -> None:
        self._endpoint = endpoint
        self._options = options

    async def sufficient(self, question: str, memory: str) -> bool:
        import openai

        prompt = asked(self._options.prompts, "verifier", question=question, memory=memory)
        try:
            response = await client_of(self._endpoint).chat.completions.create(
                model=self._endpoint.model,
                messages=[{"role": "user", "content": prompt}],
                temperature=0,
                timeout=self._endpoint.seconds,
            )
        except openai.OpenAIError as error:
            log.warning("the verifier at %s did not answer: %s", self._endpoint.url, type(error).__name__)
            return False
        return says_sufficient(response.choices[0].message.content or "")


def verifier_of(episode: Episode, options: FlowOptions) -> Verifier:
    """Return the verifier that the recipe names."""
    if options.verifier == "none":
        return NoVerifier()
    if options.verifier == "role":
        return PolicyVerifier(episode.role(ROLE), options)
    return EndpointVerifier(options.verifier, options)


def says_sufficient(text: str) -> bool:
    """Return whether the text is JSON with `sufficient` true; anything else counts as false."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(said, dict) and said.get("sufficient") is True


@cache
def client_of(endpoint: Endpoint) -> AsyncOpenAI:
    """Return the client that all episodes of a process share. Its connections belong to one event loop."""
    return new_client(endpoint)


def new_client(endpoint: Endpoint) -> AsyncOpenAI:
    """Return a new client, which the caller closes."""
    import openai

    key = os.environ.get(endpoint.key_variable, "") if endpoint.key_variable else ""
    return openai.AsyncOpenAI(base_url=endpoint.url, api_key=key or "none", max_retries=2)
