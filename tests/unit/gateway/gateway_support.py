"""A byte-level tokenizer, chat templates and a scripted engine for the gateway's tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rillflow.gateway import Renderer
from rillflow.types import Chunk, EngineStats, GenerateRequest

CHATML = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif -%}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- else %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}"
    "{%- for call in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' }}'
    "{{ (call.function.arguments | tojson) ~ '}\n</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Drops what came before </think> from every answer but the last message, as reasoning models' templates do.
FORGETFUL = CHATML.replace(
    "~ m.content }}",
    "~ (m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1]) }}",
)
# Writes the number of messages at the top: nothing that was rendered before stays as it was.
COUNTING = "{{ 'n=' ~ (messages | length) ~ '\n' }}" + CHATML
# Nothing ends a turn but a line.
PLAIN = (
    "{%- for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

# Reasoning of answers since the last question is kept, that of older ones dropped, as Qwen3's template does.
_THINKING = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_THOUGHT = (
    "{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    "{%- set thought = m.reasoning_content or '' %}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last and (thought or loop.last) %}"
    "{{ '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' }}"
    "{%- endif %}{{ m.content }}"
)
QWEN_LIKE = _THINKING + CHATML.replace("{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}", _THOUGHT)
# The prompt opens the reasoning and no answer in the history has any, as in DeepSeek-R1's.
DEEPSEEK_LIKE = (
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{{ '<|im_start|>' ~ m.content.split('</think>')[-1].lstrip() ~ '<|im_end|>' }}"
    "{%- else %}{{ m.role ~ ': ' ~ m.content }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|><think>\n' }}{% endif %}"
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("a", "b"), ("ab", "c"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ċ", "Ċ")]


def make_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    for left, right in MERGES:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = template
    return fast


@cache
def make_renderer(template: str = CHATML) -> Renderer:
    """Return the renderer that all tests of this process share."""
    return Renderer(make_tokenizer(template))


def chunk(ids: list[int], version: int = 1, finish: Any = None, seam: str = "") -> Chunk:
    logprobs = [-0.25 * (1 + number % 4) for number in range(len(ids))]
    raw = [2 * x for x in logprobs]
    return Chunk(tokens=ids, logprobs=logprobs, raw_logprobs=raw, version=version, finish=finish, seam=seam)


Script = list[Chunk | Exception | None]


class ScriptedEngine:
    """Plays scripts in the order of the requests. None in a script waits until the test sets `gate`."""

    context = 4096
    version = 1

    def __init__(self, scripts: list[Script] | None = None, choose: Callable[[GenerateRequest], Script] | None = None):
        self.scripts = scripts or []
        self.choose = choose
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.waiting = asyncio.Event()
        self.gate = asyncio.Event()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def load(self, tensors: Mapping[str, Any], version: int) -> None: ...

    def stats(self) -> EngineStats:
        raise NotImplementedError

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        script = self.choose(request) if self.choose else self.scripts.pop(0)
        ended = False
        try:
            for step in script:
                if step is None:
                    self.waiting.set()
                    await self.gate.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    await asyncio.sleep(0)
                    ended = step.finish is not None
                    yield step
        finally:
            if not ended:
                self.aborted.append(request.id)


def says(renderer: Renderer, text: str, *, finish: str = "stop", version: int = 1, step: int = 3) -> Script:
    """Return a script that samples `text` in small chunks, with the end of the turn if it finishes with `stop`."""
    ids = renderer.encode(text) + ([renderer.end_token] if finish == "stop" and renderer.end_token else [])
    parts = [ids[at : at + step] for at in range(0, len(ids), step)] or [[]]
    return [chunk(part, version, finish if place == len(parts) - 1 else None) for place, part in enumerate(parts)]
