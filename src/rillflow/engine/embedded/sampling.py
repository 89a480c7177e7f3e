"""Draws one token per row of logits, reproducibly and without a Python loop over rows, among those a grammar allows.

Invariants: the token of a row depends on its logits, its settings, its seed and the absolute position of the token
in its sequence, on nothing else, so a request gives the same tokens alone or among neighbours, and one that is cut
and continued elsewhere from its produced ids goes on with the same random numbers. `logprobs` are of the
distribution that was drawn from (a greedy row draws from a point mass: 0.0), `raw_logprobs` of the untempered one,
from which no token is missing.

A constrained sequence has a matcher of its grammar. A token is allowed if the grammar can still be fulfilled after it;
a stop token if it is fulfilled already, and not otherwise. A matcher is a function of the grammar and the tokens of the
answer alone, so an answer that was cut goes on wherever its tokens are. Masks of the next token are computed beside the
forward that they are needed after. The cost of a grammar's first use (its compilation, and once for an engine the
tokenizer's tree) is paid in a thread.

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple

import llguidance
import llguidance.hf
import llguidance.numpy
import numpy as np
import numpy.typing as npt
import torch

from rillflow.engine.requests import llguidance_grammar
from rillflow.errors import BadRequest, EngineError
from rillflow.types import GenerateRequest, Grammar

Array = npt.NDArray[Any]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_COMPILED = 128  # grammars that are kept compiled, the last used
_WORD = 32  # tokens of a word of a mask


Flags = list[tuple[int, np.uint32]]  # tokens by word and bit of a mask


class Settings(NamedTuple):
    """How each of R rows is drawn; `position` is where in its sequence the drawn token will stand."""

    temperature: Array
    top_p: Array
    top_k: Array
    seed: Array
    position: Array


class Allowed(NamedTuple):
    """Which tokens the rows `at` may draw; the others any."""

    at: Array
    flags_AV: torch.Tensor


class Drawn(NamedTuple):
    tokens: Array
    logprobs: Array
    raw_logprobs: Array


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_A
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_B
    return bits ^ (bits >> np.uint64(31))


def uniforms(seed: Array, position: Array) -> npt.NDArray[np.float64]:
    """One number in (0, 1) per row, a pure function of its seed and position."""
    counter = position.astype(np.uint64) * _GOLDEN
    bits = _mix(_mix(seed.astype(np.uint64) + _GOLDEN) + counter)
    # The middle of one of 2**52 cells: never 0 or 1, so the drawn token always has a positive weight.
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def draw(logits_RV: torch.Tensor, settings: Settings, allowed: Allowed | None = None) -> Drawn:
    """Draw a token for every row. Passes over the vocabulary are only made for the rows that need them."""
    logits_RV = logits_RV.float()
    shifted_RV = logits_RV - logits_RV.amax(-1, keepdim=True)
    uniform_R = _to(uniforms(settings.seed, settings.position), logits_RV)
    plain = (settings.temperature == 1.0) & (settings.top_p >= 1.0) & (settings.top_k == 0)
    if plain.all() and allowed is None:  # what rollouts do: the distribution drawn from is the raw one
        token_R, logprob_R = _invert(shifted_RV, uniform_R)
        tokens, logprobs = torch.stack((token_R.double(), logprob_R)).cpu().numpy()
        logprobs = logprobs.astype(np.float32)
        return Drawn(tokens.astype(np.int32), logprobs, logprobs)
    open_RV = shifted_RV if allowed is None else _masked(shifted_RV, allowed)
    token_R, logprob_R = _draw_shaped(open_RV, uniform_R, settings)
    picked_R = shifted_RV.gather(1, token_R[:, None])[:, 0].double()
    raw_R = picked_R - _total(shifted_RV, running=allowed is not None).log()
    tokens, logprobs, raw = torch.stack((token_R.double(), logprob_R, raw_R)).cpu().numpy()
    return Drawn(tokens.astype(np.int32), logprobs.astype(np.float32), raw.astype(np.float32))


def _masked(shifted_RV: torch.Tensor, allowed: Allowed) -> torch.Tensor:
    """Give tokens that are not allowed no weight, and the likeliest of the others the weight 1, however unlikely it is
    in the whole distribution. A row that may draw nothing has no finite weight: the caller sees its NaN log-prob."""
    index = _to(allowed.at, shifted_RV)
    rows_AV = shifted_RV[index].masked_fill(~allowed.flags_AV, -torch.inf)
    return shifted_RV.index_copy(0, index, rows_AV - rows_AV.amax(-1, keepdim=True))


def _total(shifted_RV: torch.Tensor, *, running: bool) -> torch.Tensor:
    """The normaliser of the raw distribution; as a running sum it is, bit for bit, that of a plain draw."""
    weight_RV = shifted_RV.exp()
    if running:
        return weight_RV.cumsum(-1, dtype=torch.float64)[:, -1]
    return weight_RV.sum(-1, dtype=torch.float64)


def _draw_shaped(
    shifted_RV: torch.Tensor, uniform_R: torch.Tensor, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with temperatures, cuts or greedy choice among them."""
    temperature = settings.temperature
    divisor_R = np.where(temperature == 0.0, np.float32(1.0), temperature).astype(np.float32)
    scaled_RV = shifted_RV / _to(divisor_R, shifted_RV)[:, None]
    token_R, logprob_R = _invert(scaled_RV, uniform_R)
    _cut_rows(scaled_RV, uniform_R, settings, token_R, logprob_R)
    _greedy_rows(shifted_RV, temperature, token_R, logprob_R)
    return token_R, logprob_R


def _to(values: Array, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device, non_blocking=True)


def _invert(scaled_RV: torch.Tensor, uniform_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse CDF. The one running sum serves as CDF and as normaliser; float64 keeps it monotone on every device."""
    cdf_RV = scaled_RV.exp().cumsum(-1, dtype=torch.float64)
    total_R = cdf_RV[:, -1]
    token_R = torch.searchsorted(cdf_RV, (uniform_R * total_R)[:, None], right=True)[:, 0]
    # Only logits that are not finite can push the index past the end; the caller sees their NaN log-prob.
    token_R.clamp_(max=scaled_RV.shape[1] - 1)
    logprob_R = scaled_RV.gather(1, token_R[:, None])[:, 0].double() - total_R.log()
    return token_R, logprob_R


def _greedy_rows(shifted_RV: torch.Tensor, temperature: Array, token_R: torch.Tensor, logprob_R: torch.Tensor) -> None:
    rows = np.flatnonzero(temperature == 0.0)
    if rows.size:
        index = _to(rows, shifted_RV)
        token_R[index] = shifted_RV[index].argmax(-1)
        logprob_R[index] = 0.0


def _cut_rows(
    scaled_RV: torch.Tensor,
    uniform_R: torch.Tensor,
    settings: Settings,
    token_R: torch.Tensor,
    logprob_R: torch.Tensor,
) -> None:
    """Rows with top-k or top-p are drawn again among the likeliest tokens: first k, then the nucleus of those."""
    rows = np.flatnonzero(((settings.top_k > 0) | (settings.top_p < 1.0)) & (settings.temperature > 0.0))
    if not rows.size:
        return
    index = _to(rows, scaled_RV)
    sorted_RV, order_RV = scaled_RV[index].sort(stable=True, dim=-1, descending=True)
    vocabulary = sorted_RV.shape[1]
    wanted = np.where(settings.top_k[rows] > 0, settings.top_k[rows], vocabulary)
    rank_V = torch.arange(vocabulary, device=scaled_RV.device)
    sorted_RV = sorted_RV.masked_fill(rank_V >= _to(wanted.astype(np.int64), scaled_RV)[:, None], -torch.inf)
    weight_RV = sorted_RV.double().exp()
    before_RV = weight_RV.cumsum(-1) - weight_RV
    nucleus_R = _to(settings.top_p[rows].astype(np.float64), scaled_RV) * weight_RV.sum(-1)
    # The first token is always kept: nothing stands before it and top_p is above 0.
    sorted_RV = sorted_RV.masked_fill(before_RV >= nucleus_R[:, None], -torch.inf)
    picked_R, cut_logprob_R = _invert(sorted_RV, uniform_R[index])
    token_R[index] = order_RV.gather(1, picked_R[:, None])[:, 0]
    logprob_R[index] = cut_logprob_R


# ------------------------------------------------------------ grammars


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
