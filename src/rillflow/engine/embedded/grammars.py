"""Which tokens a grammar allows next: a matcher for every constrained sequence, and the masks of all of them.

Invariants: a token is allowed if the grammar can still be fulfilled after it; a stop token if it is fulfilled already,
and not otherwise. A matcher is a function of the grammar and the tokens of the answer alone, so an answer that was cut
goes on wherever its tokens are. Masks of the next token are computed beside the forward that they are needed after.

The cost of a grammar's first use (its compilation, and once for an engine the tokenizer's tree) is paid in a thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any

import llguidance
import llguidance.hf
import llguidance.numpy
import numpy as np
import torch

from rillflow.engine.embedded.sampling import Allowed, Array
from rillflow.engine.requests import llguidance_grammar
from rillflow.errors import BadRequest, EngineError
from rillflow.types import GenerateRequest, Grammar

_COMPILED = 128  # grammars that are kept compiled, the last used
_WORD = 32  # tokens of a word of a mask


Flags = list[tuple[int, np.uint32]]  # tokens by word and bit of a mask


class Matcher:
    """The state of one answer in its grammar. `bits` is the mask of its next token once `wait` has returned."""

    def __init__(self, state: llguidance.LLMatcher, stops: Sequence[int]) -> None:
        self.state = state
        self.stops = _flags(stops)
        self.bits: Array = np.empty(0, np.int32)
        self._ready: Future[None] | None = None

    def take(self, token: int) -> bool:
        """Add a token to the answer; return whether another can follow. An answer that exceeds the matcher's limits is
        cut there."""
        self.state.consume_token(token)
        return not self.state.is_error() and (bool(self.stops) or not self.state.is_stopped())

    @property
    def fulfilled(self) -> bool:
        return not self.state.is_error() and self.state.is_accepting()

    def due(self, bits: Array, ready: Future[None]) -> None:
        self.bits, self._ready = bits, ready

    def wait(self) -> Array:
        assert self._ready is not None, "a mask is asked for when the sequence is seated"
        self._ready.result()
        return self.bits


Matched = Sequence[tuple[int, Matcher]]  # the places of a batch that have a matcher


class Grammars:
    """The grammars of one engine. `tokenizer` returns the model's tokenizer; it is called once."""

    def __init__(self, tokenizer: Callable[[], Any] | None, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._tree: llguidance.LLTokenizer | None = None
        self._ends: Flags = []  # end tokens of the tree, which are not used: each request has its own stop tokens
        self._kept: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()
        self._lock = Lock()  # of what is kept: compilation runs in a thread of its own
        self._compiler = ThreadPoolExecutor(1, "grammars")
        self._filler = ThreadPoolExecutor(1, "masks")
        self._parallel: llguidance.LLExecutor | None = None

    def close(self) -> None:
        self._compiler.shutdown(cancel_futures=True)
        self._filler.shutdown(cancel_futures=True)

    # ------------------------------------------------------------ matchers

    def known(self, request: GenerateRequest) -> Matcher | None:
        """Return a matcher if the grammar is compiled and the answer has no tokens yet, else None."""
        grammar = request.sampling.grammar
        if grammar is None or request.begun:
            return None
        with self._lock:
            made = self._kept.get(grammar)
            if made is None:
                return None
            self._kept.move_to_end(grammar)
        return Matcher(made.deep_copy(), request.sampling.stop_tokens)

    def prepare(self, request: GenerateRequest) -> Future[Matcher]:
        """Make a matcher in a thread. BadRequest where the grammar cannot be used, or the answer does not match it."""
        return self._compiler.submit(self._make, request)

    def _make(self, request: GenerateRequest) -> Matcher:
        grammar = request.sampling.grammar
        assert grammar is not None
        with self._lock:
            made = self._kept.get(grammar)
        if made is None:
            made = llguidance.LLMatcher(self._built(), llguidance_grammar(grammar), log_level=0)
            if made.is_error():
                raise BadRequest(f"the grammar cannot be used: {made.get_error()}", "ask for a simpler one")
            with self._lock:
                self._kept[grammar] = made
                if len(self._kept) > _COMPILED:
                    self._kept.popitem(last=False)
        state = made.deep_copy()
        begun = request.tokens[len(request.tokens) - request.begun :]
        if begun and not state.consume_tokens(begun):
            raise BadRequest("the answer has left its grammar", "it was begun under another one: start again")
        return Matcher(state, request.sampling.stop_tokens)

    def _built(self) -> llguidance.LLTokenizer:
        if self._tree is None:
            if self._tokenizer is None:
                raise EngineError("this engine was made without a tokenizer", "give it one: grammars describe text")
            tokenizer = self._tokenizer()
            try:
                size = max(self._vocabulary, len(tokenizer))
                self._tree = llguidance.hf.from_tokenizer(tokenizer, n_vocab=size)
            except ValueError as error:
                raise EngineError(f"no grammars with this tokenizer: {error}", "use a model with a fast one") from error
            self._ends = _flags(self._tree.eos_tokens)
        return self._tree

    # ------------------------------------------------------------ masks

    def ask(self, matchers: Sequence[Matcher]) -> None:
        """Compute the masks of the next tokens in a thread."""
        if not matchers:
            return
        assert self._tree is not None, "there are no matchers before the tree"
        bits = llguidance.numpy.allocate_token_bitmask(len(matchers), self._tree.vocab_size)
        ready = self._filler.submit(self._fill, list(matchers), bits)
        for row, matcher in enumerate(matchers):
            matcher.due(bits[row], ready)

    def _fill(self, matchers: list[Matcher], bits: Array) -> None:
        states = [(matcher.state, row) for row, matcher in enumerate(matchers)]
        if self._parallel is None:
            self._parallel = llguidance.LLExecutor()
        llguidance.numpy.fill_next_token_bitmask_par(self._parallel, states, bits)
        words = bits.view(np.uint32)
        for row, matcher in enumerate(matchers):
            for word, flag in self._ends:
                words[row, word] &= ~flag
            if matcher.state.is_accepting():
                for word, flag in matcher.stops:
                    words[row, word] |= flag
        # An answer ends as it is if no token of this vocabulary can follow.
        for row in np.flatnonzero(~words.any(1)).tolist():
            words[row] = 0 if matchers[row].stops else 0xFFFFFFFF
            for word, flag in matchers[row].stops:
                words[row, word] |= flag

    def allowed(self, matched: Matched, logits: torch.Tensor) -> Allowed:
        """Return the tokens that the rows of `logits` with a matcher may draw."""
        bits_AW = torch.from_numpy(np.stack([matcher.wait() for _, matcher in matched])).to(logits.device)
        shift_B = torch.arange(_WORD, dtype=torch.int32, device=logits.device)
        flags_AV = ((bits_AW[:, :, None] >> shift_B) & 1).bool().flatten(1)[:, : logits.shape[1]]
        return Allowed(np.asarray([place for place, _ in matched]), flags_AV)

    def advance(self, matched: Matched, tokens: Array, stopped: Array, ended: Array) -> None:
        """Advance the matchers by the drawn tokens, and compute the next masks while the loop and the next forward run.
        An answer that no token can follow ends: fulfilled, or cut."""
        more = []
        for place, matcher in matched:
            if ended[place]:
                continue
            if matcher.take(int(tokens[place])):
                more.append(matcher)
            else:
                ended[place], stopped[place] = True, matcher.fulfilled
        self.ask(more)


def _flags(tokens: Sequence[int]) -> Flags:
    return [(token // _WORD, np.uint32(1 << (token % _WORD))) for token in tokens]
