"""Published chat templates: an episode with tools is one path, or each fork has its cause; calls are read back.

Run as a program, this file writes the table of docs/templates.md: `python tests/unit/gateway/test_templates.py`.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import jinja2
import llguidance
import pytest
from gateway_support import CHATML, PLAIN, make_renderer, make_tokenizer
from template_episodes import PUBLISHED, TOOL, Played, Published, Stage, play, templates_folder, tokenizer_of

from rillflow.config.policy import REASONING_FORMATS as REASONING_NAMES
from rillflow.config.policy import TOOL_FORMATS as TOOL_NAMES
from rillflow.engine.requests import llguidance_grammar
from rillflow.errors import BadRequest, ConfigError
from rillflow.gateway.grammars import Calls, composed
from rillflow.gateway.reading import REASONING_FORMATS, TOOL_FORMATS, tool_format
from rillflow.gateway.reading.tools import Offered, ParsedCall
from rillflow.gateway.trees.messages import ToolCall, message
from rillflow.gateway.trees.probes import PROBE_TOOL, RESULT, STAND_IN, calling, result
from rillflow.gateway.trees.record import cause
from rillflow.gateway.trees.render import History
from rillflow.gateway.trees.template import ChatTemplate
from rillflow.gateway.trees.tree import TokenTree

PAGE = Path(__file__).resolve().parents[3] / "docs" / "templates.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->\n"
# Templates that rewrite earlier turns of an agent with its tools, without and with reasoning.
REWRITING = {
    ("Qwen-QwQ-32B", False),
    ("Qwen-QwQ-32B", True),
    ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", False),
    ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", False),
    ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", True),
    ("deepseek-ai-DeepSeek-V3.1", True),
    ("MiniMax-M2", False),
    ("NVIDIA-Nemotron-Nano-v2", False),
    ("NVIDIA-Nemotron-Nano-v2", True),
}

pytestmark = pytest.mark.needs("templates")


@cache
def stage(published: Published, *, reasons: bool, history: History = "template") -> Stage:
    return Stage(published, reasons=reasons, history=history)


@cache
def played(published: Published, *, reasons: bool, history: History) -> Played:
    return play(stage(published, reasons=reasons, history=history))


def of(name: str) -> Published:
    return next(one for one in PUBLISHED if one.name.startswith(name))


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda one: one.name)
def test_an_episode_is_one_path_unless_the_template_rewrites_it(published: Published) -> None:
    for reasons in (False, True) if published.thought else (False,):
        assert_path(published, reasons=reasons)
        for history in ("template", "append"):
            assert_sampled_tokens_stay(played(published, reasons=reasons, history=history).tree)
    assert line(published) in PAGE.read_text(), f"run python {Path(__file__).name}"


def assert_path(published: Published, *, reasons: bool) -> None:
    found = played(published, reasons=reasons, history="template")
    assert found.parsed, "every call and all reasoning is read, whole and in pieces"
    if (published.name, reasons) not in REWRITING:
        assert (found.leaves, found.forks) == (1, [])
        assert found.exact, "every prompt is the template's own text"
        return
    assert found.leaves > 1
    assert {fork.fork for fork in found.forks} == {"template"}
    assert all("history: append" in cause(found.tree, fork) for fork in found.forks)
    appended = played(published, reasons=reasons, history="append")
    assert (appended.leaves, appended.forks) == (1, [])
    assert appended.tokens < found.tokens


def assert_sampled_tokens_stay(tree: TokenTree) -> None:
    """Sampled ids are in the paths of all answers that follow."""
    for leaf in tree.leaves():
        prompt = leaf.prompt()
        at = 0
        for node in leaf.path():
            assert prompt[at : at + len(node.tokens)] == list(node.tokens)
            at += len(node.tokens)


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda one: one.name)
def test_the_text_is_what_transformers_writes(published: Published) -> None:
    """But for templates that build lists, which it refuses."""
    tokenizer = tokenizer_of(published, (templates_folder() / published.file).read_text())
    template = ChatTemplate(tokenizer)
    called = [STAND_IN[0], template._quiet(calling("")), result(RESULT)]
    compared = 0
    for messages in (STAND_IN[:1], STAND_IN, called):
        for tools, prompt in ((None, True), ([PROBE_TOOL], True), ([PROBE_TOOL], False)):
            try:
                theirs = tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=prompt)
            except (jinja2.TemplateError, TypeError):
                continue
            assert template._written(messages, tools, prompt=prompt) == theirs
            compared += 1
    assert compared >= 4


# ---------------------------------------------------------------- reasoning between questions


def test_questions_without_reasoning_are_one_path() -> None:
    found = play(stage(of("Qwen-Qwen3"), reasons=False), users=True)
    assert (found.leaves, found.exact) == (1, True)


def test_reasoning_that_is_dropped_at_a_question_forks_or_is_appended() -> None:
    found = play(stage(of("Qwen-Qwen3"), reasons=True), users=True)
    assert (found.leaves, found.exact) == (8, True)
    told = cause(found.tree, found.forks[0])
    assert "messages[1], without its reasoning," in told
    appended = play(stage(of("Qwen-Qwen3"), reasons=True, history="append"), users=True)
    assert (appended.leaves, appended.forks) == (1, [])
    (leaf,) = appended.tree.leaves()
    assert stage(of("Qwen-Qwen3"), reasons=True).renderer.decode(leaf.prompt()).count("I count.") == 8


def test_a_generation_prompt_that_the_template_drops_forks_or_is_appended() -> None:
    """`enable_thinking: false` of Qwen3 writes an empty thought before each answer, and drops it from the history."""
    off = Stage(of("Qwen-Qwen3"), enable_thinking=False)
    found = play(off)
    assert (found.leaves, found.exact) == (8, True)
    appended = play(Stage(of("Qwen-Qwen3"), history="append", enable_thinking=False))
    assert (appended.leaves, appended.forks) == (1, [])


def test_words_that_a_template_drops_beside_a_call_fork() -> None:
    """Llama 3's template writes the call alone; `history: append` keeps the words."""
    for history, leaves in (("template", 2), ("append", 1)):
        one = stage(of("meta-llama-Llama-3.1"), reasons=False, history=history)
        assert one.renderer.append_only
        found = play(one, last=2, words="I look. <|python_tag|>")
        assert found.leaves == leaves


def test_other_spelling_of_a_call_stays_on_the_path() -> None:
    """A model that leaves out the spaces of JSON has said the same."""
    one = stage(of("Qwen-Qwen3"), reasons=False)
    found = play(one, last=3, spelled=lambda text: text.replace(": ", ":").replace(", ", ","))
    assert (found.leaves, found.exact) == (1, False)


# ---------------------------------------------------------------- options


def test_options_are_the_templates_own() -> None:
    published = of("Qwen-Qwen3")
    with pytest.raises(ConfigError, match="no option 'enable_thinkin'") as refused:
        Stage(published, enable_thinkin=False)
    assert "did you mean 'enable_thinking'? it has: enable_thinking" in refused.value.hint
    renderer = stage(published, reasons=False).renderer
    with pytest.raises(BadRequest, match=r"chat_template_kwargs: .* no option 'messages'"):
        renderer.variant({"messages": []})
    off = renderer.variant({"enable_thinking": False})
    assert off is renderer.variant({"enable_thinking": False})
    asked = [message("user", "hello")]
    assert off.text(asked, None, prompt=True).endswith("<think>\n\n</think>\n\n")
    assert renderer.text(asked, None, prompt=True).endswith("assistant\n")


# ---------------------------------------------------------------- formats


CALLS = [ParsedCall("lookup", '{"item": "box 1", "most": 1}')]


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_what_a_format_writes_is_read_and_fits_its_grammar(name: str) -> None:
    format = TOOL_FORMATS[name]()
    schema = TOOL["function"]["parameters"]
    written = format.write(CALLS)
    parser = format.parser(Offered(schemas={"lookup": schema}))
    parts = [*parser.feed(written), *parser.finish()]
    assert [part[:2] for part in parts if isinstance(part, ParsedCall)] == [CALLS[0][:2]]
    assert parser.unparsed == 0
    renderer = make_renderer()
    grammar = composed(None, Calls([TOOL], format, forced=True), None, renderer)
    assert grammar is not None
    assert not llguidance.LLMatcher.validate_grammar(llguidance_grammar(grammar)).startswith("ERROR")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>{oops}</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=lookup>\n<parameter=item>\nbox</function>\n</tool_call>"),
        ("glm", "<tool_call>lookup\n<arg_key>item</arg_key>\n</tool_call>"),
        ("mistral", "[TOOL_CALLS][{oops}]"),
        ("deepseek", "<｜tool▁calls▁begin｜>oops<｜tool▁calls▁end｜>"),
        ("kimi", "<|tool_calls_section_begin|>oops<|tool_calls_section_end|>"),
        ("harmony", " to=functions.lookup<|channel|>commentary json<|message|>{oops}"),
        ("pythonic", "[lookup(item=box)]"),
        ("granite", '<|tool_call|>[{"name": "lookup"'),
    ],
)
def test_a_call_that_cannot_be_parsed_stays_text_and_is_counted(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        parser = TOOL_FORMATS[name]().parser(Offered())
        parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
        assert "".join(str(part) for part in parts) == text
        assert parser.unparsed == 1


def test_arguments_are_what_the_schema_says() -> None:
    schema = {"properties": {"code": {"type": "string"}, "most": {"type": "integer"}, "all": {"type": "boolean"}}}
    parser = TOOL_FORMATS["qwen3_coder"]().parser(Offered(schemas={"run": schema}))
    body = (
        "<tool_call>\n<function=run>\n<parameter=code>\n  12\n\n</parameter>\n<parameter=most>\n3\n</parameter>\n"
        "<parameter=all>\nTrue\n</parameter>\n</function>\n</tool_call>"
    )
    assert parser.feed(body) == [ParsedCall("run", '{"code": "  12\\n", "most": 3, "all": true}')]


def test_an_unknown_format_is_refused_at_the_start() -> None:
    odd = CHATML.replace("<tool_call>", "<<call>>").replace("</tool_call>", "<</call>>")
    with pytest.raises(ConfigError, match=r"writes a call as .*<<call>>") as refused:
        tool_format("auto", ChatTemplate(make_tokenizer(odd)), "policies.solver")
    assert "set policies.solver.tools to one of hermes, qwen3_coder," in refused.value.hint
    told = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + PLAIN
    with pytest.raises(ConfigError, match="writes tools, but no calls"):
        tool_format("auto", ChatTemplate(make_tokenizer(told)))
    with pytest.raises(ConfigError, match="no format 'herms'"):
        tool_format("herms", ChatTemplate(make_tokenizer()))
    assert tool_format("auto", ChatTemplate(make_tokenizer(PLAIN))) is None, "it has no place for tools"
    own = tool_format("rillflow.gateway.reading.json_formats:Hermes", ChatTemplate(make_tokenizer()))
    assert own is not None


def test_a_template_without_a_place_for_calls_is_given_them_as_text() -> None:
    one = stage(of("google-gemma"), reasons=False)
    history = [
        message("user", "how many?"),
        message("assistant", "", [ToolCall("c1", "lookup", '{"item": "box"}')]),
        message("tool", "12", call_id="c1"),
    ]
    text = one.renderer.text(history, None, prompt=True)
    assert '<tool_call>\n{"name": "lookup", "arguments": {"item": "box"}}\n</tool_call><end_of_turn>' in text
    assert "<start_of_turn>user\n<tool_response>\n12\n</tool_response><end_of_turn>" in text


def test_names_in_recipes_are_those_of_the_registries() -> None:
    assert set(TOOL_NAMES) == {"auto", *TOOL_FORMATS}
    assert set(REASONING_NAMES) == {"auto", "none", *REASONING_FORMATS}


# ---------------------------------------------------------------- the page


HEAD = "| template | tools | leaves, tokens without reasoning | with reasoning | with `history: append` |\n"


def line(published: Published) -> str:
    """Return the template's line of the table."""
    kind = type(stage(published, reasons=False).policy.tools)
    name = next(name for name, one in TOOL_FORMATS.items() if one is kind)
    tools = f"`{name}`" if published.tools == "auto" else f"none; set to `{name}`"
    cells = [_cell(published, reasons=reasons) for reasons in (False, True)]
    appended = [_cell(published, reasons=reasons, append=True) for reasons in (False, True)]
    return f"| {published.name} | {tools} | {cells[0]} | {cells[1]} | {'; '.join(filter(None, appended))} |\n"


def table() -> str:
    return "".join([HEAD, "|---|---|---|---|---|\n", *map(line, PUBLISHED)])


def _cell(published: Published, *, reasons: bool, append: bool = False) -> str:
    rewritten = (published.name, reasons) in REWRITING
    if (reasons and not published.thought) or (append and not rewritten):
        return "" if append else "does not reason"
    found = played(published, reasons=reasons, history="append" if append else "template")
    return f"{found.leaves}, {found.tokens:,}" + (" (rewritten)" if rewritten and not append else "")


def test_the_page_has_the_table() -> None:
    """And no other lines; each is compared with its episodes above."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    head, _, *lines = rest.partition(END)[0].splitlines(keepends=True)
    assert head == HEAD
    assert [line.split(" | ")[0] for line in lines] == [f"| {published.name}" for published in PUBLISHED]
    assert all(f"`{name}`" in before + rest for name in [*TOOL_FORMATS, *REASONING_FORMATS])


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: BEGIN + table() + END, text, flags=re.DOTALL))
