"""One question, one answer: the episode of every single-turn task."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rillflow.contracts import Episode


async def play(episode: Episode) -> str | None:
    """Ask what the prompt asks (`question`) and return the answer. The policy's sampling settings apply.

    The option `template` puts words around the question: "{question} Give only the number."
    """
    template = str(episode.options.get("template", "{question}"))
    question = template.replace("{question}", episode.payload["question"])
    response = await episode.client.chat.completions.create(
        model=episode.model, messages=[{"role": "user", "content": question}]
    )
    return response.choices[0].message.content
