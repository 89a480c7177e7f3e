"""Raw prompts: sampled text keeps its ids, and chats share no path with them."""

from __future__ import annotations

import pytest
from gateway_support import chunk, make_renderer, make_tokenizer
from tokenizers import processors

from rillflow.gateway import Renderer
from rillflow.gateway.shapes import CallRefused
from rillflow.gateway.trees.matching import Place, RawPlace
from rillflow.gateway.trees.messages import message
from rillflow.gateway.trees.record import samples, transcript
from rillflow.gateway.trees.tree import Node, TokenTree

RENDERER = make_renderer()
END = RENDERER.end_token or 0
ODD = [*RENDERER.encode("a"), *RENDERER.encode("b"), *RENDERER.encode("c")]  # not how "abc" is tokenised


def answered(tree: TokenTree, given: Node, ids: list[int], shown: str) -> Node:
    node = tree.sample(given, 1.0)
    node.add(chunk(ids))
    node.end("stop", message("assistant", shown))
    return node


def test_text_behind_an_answer_keeps_its_ids() -> None:
    tree = TokenTree()
    first = RawPlace(tree, RENDERER, "hello ").give()
    assert list(first.tokens) == RENDERER.encode("hello ")
    node = answered(tree, first, ODD, "abc")
    second = RawPlace(tree, RENDERER, "hello abc, hello").give()
    assert second.parent is node
    assert second.prompt() == RENDERER.encode("hello ") + ODD + RENDERER.encode(", hello")
    assert second.fork == ""


def test_an_answer_repeated_without_its_stop_token_is_given_with_its_ids() -> None:
    tree = TokenTree()
    first = RawPlace(tree, RENDERER, "hello ").give()
    answered(tree, first, [*ODD, END], "abc")
    second = RawPlace(tree, RENDERER, "hello abc, hello").give()
    assert (second.parent, second.fork) == (first, "history")
    assert list(second.tokens) == ODD + RENDERER.encode(", hello")
    answered(tree, second, [9, END], RENDERER.decode([9]))
    third = RawPlace(tree, RENDERER, "hello abc, hello" + RENDERER.decode([9]) + "more").give()
    assert third.parent is second
    answered(tree, third, [8], "y")
    assert [row.trained for row in samples("p", tree)] == [4, 2, 1]


def test_the_same_prompt_is_the_same_node() -> None:
    tree = TokenTree()
    for prompt in ("hello", [1, 2, 3], "hello more"):
        given = RawPlace(tree, RENDERER, prompt).give()
        assert RawPlace(tree, RENDERER, prompt).give() is given
        answered(tree, given, ODD, "abc")
        assert RawPlace(tree, RENDERER, prompt).give() is given
    again = RawPlace(tree, RENDERER, "helloabc").give()
    assert (len(again.tokens), again.messages) == (0, ())
    assert RawPlace(tree, RENDERER, "helloabc").give() is again


def test_given_text_is_tokenised_in_one_piece() -> None:
    tree = TokenTree()
    answered(tree, RawPlace(tree, RENDERER, "ab").give(), [1], "!")
    longer = RawPlace(tree, RENDERER, "abc").give()
    assert longer.prompt() == RENDERER.encode("abc")
    assert longer.fork == "history"


def test_ids_extend_the_longest_path_of_ids() -> None:
    tree = TokenTree()
    first = RawPlace(tree, RENDERER, [1, 2, 3]).give()
    node = answered(tree, first, [4, 5], "xy")
    other = answered(tree, first, [4], "x")
    assert RawPlace(tree, RENDERER, [1, 2, 3, 4, 5, 6]).give().parent is node
    assert RawPlace(tree, RENDERER, [1, 2, 3, 4, 7]).give().parent is other
    assert RawPlace(tree, RENDERER, [1, 2]).give().prompt() == [1, 2]
    for prompt in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7], [1, 2, 3, 9], [2]):
        assert RawPlace(tree, RENDERER, prompt).give().prompt() == prompt


def test_chats_and_raw_prompts_never_meet() -> None:
    tree = TokenTree()
    user, reply = message("user", "hello"), message("assistant", "abc")
    chat = Place(tree, RENDERER, [user], None, b"").give()
    answered(tree, chat, [*ODD, END], "abc")
    raw = RawPlace(tree, RENDERER, chat.prompt()).give()
    assert raw.path() == [raw]
    answered(tree, raw, [*ODD, END], "abc")
    raw_again = RawPlace(tree, RENDERER, RENDERER.decode(raw.prompt()) + "abc<|im_end|>").give()
    chat_again = Place(tree, RENDERER, [user, reply], None, b"").give()
    assert raw_again.path()[0] is raw
    assert chat_again.path()[0] is chat
    assert Place(tree, RENDERER, [reply], None, b"").give().path()[0] not in (raw, chat)


def test_transcripts_show_raw_prompts() -> None:
    tree = TokenTree()
    answered(tree, RawPlace(tree, RENDERER, "hello").give(), ODD, "abc")
    (entry,) = transcript("p", tree)
    assert entry["messages"] == [{"role": "prompt", "content": "hello"}, {"role": "assistant", "content": "abc"}]


@pytest.mark.parametrize("prompt", ["", [], [-1], [10**6], [1, 2**40]])
def test_prompts_that_cannot_be_sampled_from(prompt: str | list[int]) -> None:
    with pytest.raises(CallRefused) as caught:
        RawPlace(TokenTree(), RENDERER, prompt).give()
    assert caught.value.param == "prompt"


def opening_renderer() -> tuple[Renderer, int]:
    """Return the renderer of a tokenizer that puts an id before every text, and that id."""
    tokenizer = make_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    return Renderer(tokenizer), bos


def test_a_tokenizer_that_opens_every_text() -> None:
    renderer, bos = opening_renderer()
    tree = TokenTree()
    first = RawPlace(tree, renderer, "hello").give()
    assert first.prompt() == [bos, *renderer.encode("hello")]
    assert RawPlace(tree, renderer, "<|endoftext|>hello").give().prompt() == first.prompt()
    node = answered(tree, first, ODD, "abc")
    assert RawPlace(tree, renderer, "helloabc go").give().parent is node


def test_ids_without_the_opening_are_not_the_text_that_has_it() -> None:
    renderer, bos = opening_renderer()
    tree = TokenTree()
    bare = RawPlace(tree, renderer, renderer.encode("hello")).give()
    answered(tree, bare, ODD, "abc")
    text = RawPlace(tree, renderer, "hello").give()
    assert text.prompt() == [bos, *renderer.encode("hello")]
    assert RawPlace(tree, renderer, "hello").give() is text
    assert RawPlace(tree, renderer, "helloabc").give().prompt() == [bos, *renderer.encode("helloabc")]
    assert RawPlace(tree, renderer, renderer.encode("hello")).give() is bare
