"""One question, one answer: the workflow of every single-turn task, with its prompts and demonstrations.

`prompts` splits any source of questions into `train` and `heldout`. Invariant: a question belongs to exactly one split,
however often the source repeats it, and is yielded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

from rillflow.agents.environments.splits import check_split
from rillflow.agents.options import fill_template
from rillflow.agents.rewards.base import golds
from rillflow.config import SourceConfig
from rillflow.dataflow.sources import open_source

if TYPE_CHECKING:
    from rillflow.contracts import Episode

_HELD_OUT = 4  # every fourth question, by its hash


async def play(episode: Episode) -> str | None:
    """Ask the prompt's `question` with the policy's sampling settings and return the answer.

    The option `template` puts text around the question: "{question} Give only the number."
    """
    template = str(episode.options.get("template", "{question}"))
    question = fill_template(template, {"question": episode.payload["question"]})
    response = await episode.client.chat.completions.create(
        model=episode.model, messages=[{"role": "user", "content": question}]
    )
    return response.choices[0].message.content


def prompts(split: str, **source: Any) -> Iterator[dict[str, Any]]:
    """Yield the questions of `split`; `source` has the keys of a recipe's `data.prompts`."""
    check_split(split)
    opened = open_source(SourceConfig.model_validate(source), seed=0, shuffle=False)
    seen: set[int] = set()
    for index in range(opened.length):
        prompt = opened.at(index)
        digest = xxh3_64_intdigest(prompt.payload["question"].encode())
        if digest not in seen and (digest % _HELD_OUT == 0) == (split == "heldout"):
            yield {"id": prompt.id, "payload": prompt.payload}
        seen.add(digest)


def demonstrations(split: str, key: str | None = None, **source: Any) -> Iterator[dict[str, Any]]:
    """Yield rows for sft: each question of `split` with its right answer."""
    for prompt in prompts(split, **source):
        payload = prompt["payload"]
        messages = [
            {"role": "user", "content": payload["question"]},
            {"role": "assistant", "content": golds(payload, key)[0]},
        ]
        yield {"id": prompt["id"], "payload": {"messages": messages}}
