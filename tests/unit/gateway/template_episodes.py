"""Episodes with tools under published chat templates, with answers as a model of each template would write them.

The templates are read from the folder of public data. The models' tokenizers are not available, so each template has a
byte-level tokenizer with its special tokens; every other byte is one token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rillflow.dataflow.sources.benchmarks import data_folder
from rillflow.gateway.calls import Policy
from rillflow.gateway.reading import Read, Reader
from rillflow.gateway.reading.incremental import Detokeniser
from rillflow.gateway.reading.reasoning import Thought
from rillflow.gateway.reading.tools import ParsedCall, offered
from rillflow.gateway.trees.matching import Place
from rillflow.gateway.trees.messages import Message, ToolCall, message
from rillflow.gateway.trees.render import History, Renderer
from rillflow.gateway.trees.template import ChatTemplate
from rillflow.gateway.trees.tree import Node, TokenTree
from rillflow.types import Chunk

TURNS = 8
TODAY = datetime(2026, 1, 15)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Count an item.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}, "most": {"type": "integer"}},
            "required": ["item", "most"],
        },
    },
}
THOUGHT, FINAL = "I count.", "There are 28."
_PIPED = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜<>]+｜>|<SPECIAL_\d+>|<seed:[be]os>|\]~!b\[|\]~b\]|\[e~\[|</?s>")
_SQUARE = re.compile(r"\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|SYSTEM_PROMPT|TOOL_CONTENT|ARGS|CALL_ID)\]")
_TAGS = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value|seed:\w+|minimax:\w+|TOOLCALL)>")

Write = Callable[[int], str]  # the call of a turn, as the model writes it


class Published(NamedTuple):
    """A template and the texts of its model: `call`, `thought` before it (with `options`), `around` the last answer.

    `end` follows an answer, `called` a call. `plain` replaces the thought in an answer without reasoning. `tools` is
    the format for a template that has no place for tools.
    """

    file: str
    call: Write
    end: str
    called: str = ""
    bos: str = ""
    plain: str = ""
    thought: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    around: tuple[str, str] = ("", "")
    tools: str = "auto"

    @property
    def name(self) -> str:
        return self.file.removesuffix(".jinja")


def arguments(turn: int) -> dict[str, Any]:
    return {"item": f"box {turn}", "most": turn}


def call_id(turn: int) -> str:
    return f"call0000{turn}"


def _json(turn: int) -> str:
    return json.dumps(arguments(turn))


def _object(turn: int, given: str = "arguments") -> str:
    return f'{{"name": "lookup", "{given}": {_json(turn)}}}'


def _hermes(turn: int) -> str:
    return f"<tool_call>\n{_object(turn)}\n</tool_call>"


def _llama(turn: int) -> str:
    return _object(turn, "parameters")


def _coder(turn: int) -> str:
    item, most = arguments(turn).values()
    return (
        f"<tool_call>\n<function=lookup>\n<parameter=item>\n{item}\n</parameter>\n<parameter=most>\n{most}\n"
        "</parameter>\n</function>\n</tool_call>"
    )


def _seed(turn: int) -> str:
    item, most = arguments(turn).values()
    return (
        f"<seed:tool_call>\n<function=lookup>\n<parameter=item>{item}</parameter>\n<parameter=most>{most}</parameter>\n"
        "</function>\n</seed:tool_call>"
    )


def _glm(turn: int) -> str:
    item, most = arguments(turn).values()
    return (
        f"\n<tool_call>lookup\n<arg_key>item</arg_key>\n<arg_value>{item}</arg_value>\n<arg_key>most</arg_key>\n"
        f"<arg_value>{most}</arg_value>\n</tool_call>"
    )


def _minimax(turn: int) -> str:
    item, most = arguments(turn).values()
    return (
        f'\n<minimax:tool_call>\n<invoke name="lookup">\n<parameter name="item">{item}</parameter>\n'
        f'<parameter name="most">{most}</parameter>\n</invoke>\n</minimax:tool_call>'
    )


def _mistral(turn: int) -> str:
    return f'[TOOL_CALLS][{_object(turn)[:-1]}, "id": "{call_id(turn)}"}}]'


def _mistral_args(turn: int) -> str:
    return f"[TOOL_CALLS]lookup[CALL_ID]{call_id(turn)}[ARGS]{_json(turn)}"


def _deepseek(turn: int) -> str:
    body = f"lookup<｜tool▁sep｜>{_json(turn)}"
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def _deepseek_r1(turn: int) -> str:
    body = f"function<｜tool▁sep｜>lookup\n```json\n{_json(turn)}\n```"
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def _kimi(turn: int) -> str:
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.lookup:{turn - 1}<|tool_call_argument_begin|>"
        f"{_json(turn)}<|tool_call_end|><|tool_calls_section_end|>"
    )


def _harmony(turn: int) -> str:
    return f" to=functions.lookup<|channel|>commentary json<|message|>{_json(turn)}"


def _granite(turn: int) -> str:
    return f"<|tool_call|>[{_object(turn)}]"


def _nemotron(turn: int) -> str:
    return f"<TOOLCALL>[{_object(turn)}]</TOOLCALL>"


def _command(turn: int) -> str:
    body = f'{{"tool_call_id": "{turn - 1}", "tool_name": "lookup", "parameters": {_json(turn)}}}'
    return f"<|START_ACTION|>[\n    {body}\n]<|END_ACTION|>"


THINK = f"<think>\n{THOUGHT}\n</think>\n\n"
_OPENED = f"{THOUGHT}\n</think>\n\n"
_ON = (("enable_thinking", True),)
_LLAMA = {"end": "<|eot_id|>", "bos": "<|begin_of_text|>"}
_DEEPSEEK: dict[str, str] = {"end": "<｜end▁of▁sentence｜>", "bos": "<｜begin▁of▁sentence｜>"}

PUBLISHED = [
    Published("Qwen-Qwen2.5-7B-Instruct.jinja", _hermes, "<|im_end|>"),
    Published("Qwen-Qwen3-0.6B.jinja", _hermes, "<|im_end|>", thought=THINK),
    Published("Qwen-QwQ-32B.jinja", _hermes, "<|im_end|>", plain="\n\n", thought=_OPENED, options=_ON),
    Published("Qwen3-Coder.jinja", _coder, "<|im_end|>"),
    Published("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja", _hermes, "<|im_end|>", bos="<|begin_of_text|>"),
    Published("meta-llama-Llama-3.1-8B-Instruct.jinja", _llama, **_LLAMA),
    Published("meta-llama-Llama-3.2-3B-Instruct.jinja", _llama, **_LLAMA),
    Published("meta-llama-Llama-3.3-70B-Instruct.jinja", _llama, **_LLAMA),
    Published("mistralai-Mistral-Nemo-Instruct-2407.jinja", _mistral, "</s>", bos="<s>"),
    Published("Mistral-Small-3.2-24B-Instruct-2506.jinja", _mistral_args, "</s>", bos="<s>"),
    Published(
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja",
        _deepseek_r1,
        plain="\n\n",
        thought=_OPENED,
        options=_ON,
        **_DEEPSEEK,
    ),
    Published(
        "deepseek-ai-DeepSeek-V3.1.jinja",
        _deepseek,
        thought=f"{THOUGHT}</think>",
        options=(("thinking", True),),
        **_DEEPSEEK,
    ),
    Published(
        "GLM-4.6.jinja",
        _glm,
        "<|user|>",
        "<|observation|>",
        plain="\n<think></think>",
        thought=f"\n<think>{THOUGHT}</think>",
        around=("\n", ""),
    ),
    Published("Kimi-K2-Instruct.jinja", _kimi, "<|im_end|>"),
    Published(
        "openai-gpt-oss-120b.jinja",
        _harmony,
        "<|return|>",
        "<|call|>",
        thought=f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant",
        around=("<|channel|>final<|message|>", ""),
    ),
    Published("ibm-granite-granite-3.3-2B-Instruct.jinja", _granite, "<|end_of_text|>", thought=THINK),
    Published("ibm-granite-granite-4.0.jinja", _hermes, "<|end_of_text|>"),
    Published("google-gemma-2-2b-it.jinja", _hermes, "<end_of_turn>", bos="<bos>", tools="hermes"),
    Published("microsoft-Phi-3.5-mini-instruct.jinja", _hermes, "<|end|>", tools="hermes"),
    Published("HuggingFaceTB-SmolLM3-3B.jinja", _hermes, "<|im_end|>", thought=THINK, tools="hermes"),
    Published(
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja",
        _command,
        "<|END_OF_TURN_TOKEN|>",
        bos="<BOS_TOKEN>",
        thought=f"<|START_THINKING|>{THOUGHT}<|END_THINKING|>",
        options=_ON,
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    Published("MiniMax-M2.jinja", _minimax, "[e~[", plain="\n</think>\n\n", thought=_OPENED),
    Published("NVIDIA-Nemotron-Nano-v2.jinja", _nemotron, "<SPECIAL_12>", plain="</think>", thought=_OPENED),
    Published(
        "ByteDance-Seed-OSS.jinja",
        _seed,
        "<seed:eos>",
        bos="<seed:bos>",
        thought=f"<seed:think>{THOUGHT}</seed:think>\n",
    ),
]


def templates_folder() -> Path:
    return data_folder() / "templates"


def tokenizer_of(published: Published, source: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer that knows the special tokens of a template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = [published.end, published.called or published.end]
    special = dict.fromkeys([*ends, *([published.bos] if published.bos else []), *_PIPED.findall(source)])
    tools = [token for token in special if "tool" in token and token not in ends]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special if token not in tools])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in tools])
    tags = dict.fromkeys([*_TAGS.findall(source), *_SQUARE.findall(source)])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in tags])
    names = {"bos_token": published.bos} if published.bos else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=published.end, **names)
    fast.chat_template = source
    return fast


class Stage:
    """One template with its options, as a gateway would have it."""

    def __init__(self, published: Published, *, reasons: bool = False, history: History = "template", **options: Any):
        self.published = published
        self.reasons = reasons
        source = (templates_folder() / published.file).read_text()
        self.tokenizer = tokenizer_of(published, source)
        chosen = {**dict(published.options if reasons else ()), **options}
        template = ChatTemplate(self.tokenizer, None, chosen, now=lambda: TODAY)
        called = self.tokenizer.convert_tokens_to_ids([published.called] if published.called else [])
        self.renderer = Renderer(self.tokenizer, called, template=template, history=history)
        self.policy = Policy(None, self.renderer, published.tools)  # type: ignore[arg-type]  # nothing is sampled

    def said(self, turn: int, prompt: str) -> str:
        """Return what the model writes at a turn, behind a prompt: a call, or the last answer."""
        published = self.published
        before, after = published.around
        words = published.call(turn) if turn < TURNS else f"{before}{FINAL}{after}"
        return (self._thought(prompt) if self.reasons else self._plain(prompt)) + words

    def _plain(self, prompt: str) -> str:
        plain = self.published.plain
        closes = plain.strip().startswith("</think>") and not prompt.rstrip().endswith("<think>")
        return "" if closes or prompt.endswith("<｜tool▁outputs▁end｜>") else plain

    def _thought(self, prompt: str) -> str:
        """Return the reasoning; DeepSeek's templates open it only behind a question."""
        thought = self.published.thought
        opens = thought.startswith(THOUGHT) and not prompt.rstrip().endswith("<think>")
        return f"<think>{thought}" if opens else thought

    def end(self, turn: int) -> str:
        return (self.published.called if turn < TURNS else "") or self.published.end

    def read(self, prompt: str, text: str, *, each: int = 0) -> list[Read]:
        """Return the parts of an answer, read whole or `each` characters at a time."""
        policy = self.policy
        assert policy.tools is not None
        inside = policy.reasoning is not None and policy.reasoning.opened_by(prompt)
        splitter = None if policy.reasoning is None else policy.reasoning.splitter(inside=inside)
        ids: list[int] = []
        reader = Reader(
            Detokeniser(lambda found: "".join(map(chr, found)), ids),
            None,
            splitter,
            policy.tools.parser(offered([TOOL])),
        )
        letters = list(map(ord, text))
        if not each:
            return reader.whole(letters)
        pieces = [part for at in range(0, len(letters), each) for part in reader.feed(letters[at : at + each])]
        return pieces + reader.finish()


class Played(NamedTuple):
    """The result of an episode: its leaves and the tokens of all their paths.

    `exact`: every prompt was the template's own text. `parsed`: every call was read, whole and in pieces.
    """

    leaves: int
    tokens: int
    exact: bool
    parsed: bool
    forks: list[Node]
    tree: TokenTree


def play(
    stage: Stage, *, last: int = TURNS, users: bool = False, words: str = "", spelled: Callable[[str], str] = str
) -> Played:
    """Play an episode of `last` turns with a tool; with `users` a question follows every answer instead. `words` come
    before what the model writes, which is `spelled` in another way."""
    tree, renderer = TokenTree(), stage.renderer
    history: list[Message] = [message("user", "How many in all boxes?")]
    exact = parsed = True
    for turn in range(1, last + 1):
        place = Place(tree, renderer, history, [TOOL], b"[]", reading=stage.policy.reading([TOOL]))
        given = place.give()
        prompt = renderer.decode(given.prompt())
        exact = exact and prompt == renderer.text(history, [TOOL], prompt=True)
        text = words + spelled(stage.said(TURNS if users else turn, prompt))
        said = _message(stage, prompt, text, turn)
        parsed = parsed and _is_right(said, stage, TURNS if users else turn) and _same_in_pieces(stage, prompt, text)
        node = tree.sample(given, 1.0, f"c{turn}_0")
        ids = renderer.encode(text + stage.end(TURNS if users else turn))
        node.add(Chunk(tokens=ids, logprobs=[0.0] * len(ids), raw_logprobs=[0.0] * len(ids), version=0))
        node.end("stop", said)
        answer = message("user", f"And {turn}?") if users else message("tool", f"{turn} found", call_id=_id(said))
        history += [said, answer]
    leaves = tree.leaves()
    tokens = sum(len(leaf.prompt()) for leaf in leaves)
    return Played(len(leaves), tokens, exact, parsed, [node for node in tree.nodes() if node.fork], tree)


def _message(stage: Stage, prompt: str, text: str, turn: int) -> Message:
    parts = stage.read(prompt, text)
    made = [part for part in parts if isinstance(part, ParsedCall)]
    calls = [ToolCall(call.id or f"call_{turn:020}_0", call.name, call.arguments) for call in made]
    said = "".join(part for part in parts if isinstance(part, str))
    return message(
        "assistant", said, calls, reasoning="".join(part.text for part in parts if isinstance(part, Thought))
    )


def _id(said: Message) -> str:
    return next(iter(said.call_ids), "")


def _is_right(said: Message, stage: Stage, turn: int) -> bool:
    calls = [call["function"] for call in said.body.get("tool_calls", ())]
    wanted = [{"name": "lookup", "arguments": arguments(turn)}] if turn < TURNS else []
    words = said.body["content"].strip() == (FINAL if turn == TURNS else "")
    return calls == wanted and words and said.reasoning == (THOUGHT if stage.reasons else "")


def _same_in_pieces(stage: Stage, prompt: str, text: str) -> bool:
    whole = _joined(stage.read(prompt, text))
    return all(_joined(stage.read(prompt, text, each=each)) == whole for each in (1, 7))


def _joined(parts: list[Read]) -> list[Read]:
    joined: list[Read] = []
    for part in parts:
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            joined[-1] += part
        elif joined and isinstance(part, Thought) and isinstance(joined[-1], Thought):
            joined[-1] = Thought(joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined
