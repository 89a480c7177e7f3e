"""Attention of a forest of packed rows, in which a shared prefix is computed once.

In depth-first order a segment's descendants follow it without a gap. So each token's attention has two parts: its own
segment, causally, and each of its ancestors, in full. A *pass* computes one such part for many tokens, spans of queries
against spans of keys: the first pass has every segment against itself, pass d + 1 the descendants of segments of depth
d against those segments. No pass needs a mask.

`Joined` is one operator: a kernel computes the passes, which are joined by their log-sum-exps. A shared prefix is never
copied, and only queries, keys, values, the result and its log-sum-exps are kept for the backward pass, as in flash
attention. The operator is opaque to torch.compile, so no graph breaks at it. On a CPU it computes no passes, but whole
paths (`attention.paths`). `Flex` is torch's flex attention with one block-sparse mask for the whole pack.

Layers of a model may differ in their windows: `Packed` has the tables or the mask of each. A window counts the tokens
of a path, from a token back to the root. Passes know only places within segments, so kernels of passes have windows in
packs without trees alone, and no capped scores. Paths and flex attention have both. Attention sinks are joined to the
result of any kernel by the log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from rillflow.errors import ConfigError
from rillflow.trainer.attention import paths
from rillflow.trainer.attention.kernels import (
    PLAIN,
    Cudnn,
    Flash,
    Found,
    Heads,
    Kernel,
    Options,
    Plain,
    Spans,
    accumulating,
)
from rillflow.trainer.packing import Layout

if TYPE_CHECKING:
    from rillflow.trainer.batches import Ints


@dataclass(frozen=True)
class Pass:
    """Span c has `query_C[c]` queries, which begin at `query_at_C[c]` of the packed tokens, and `key_C[c]` keys, which
    begin at `key_at_C[c]`. The first pass is causal and covers all tokens; its queries and keys are the same.
    """

    query_C: Ints
    key_C: Ints
    query_at_C: Ints
    key_at_C: Ints


def subtree_ends(layout: Layout) -> Ints:
    """Return the end in P of each segment's descendants."""
    end_S = layout.start_S + layout.length_S
    for segment in range(len(end_S) - 1, -1, -1):
        parent = layout.parent_S[segment]
        if parent >= 0:
            end_S[parent] = max(end_S[parent], end_S[segment])
    return end_S


def passes(layout: Layout) -> list[Pass]:
    own = Pass(layout.length_S, layout.length_S, layout.start_S, layout.start_S)
    if (layout.parent_S < 0).all():
        return [own]
    after_S = layout.start_S + layout.length_S
    hanging_S = subtree_ends(layout) - after_S
    depth_S = _depths(layout.parent_S)
    made = [own]
    for depth in range(int(depth_S.max())):
        at = np.flatnonzero((depth_S == depth) & (hanging_S > 0))
        made.append(Pass(hanging_S[at], layout.length_S[at], after_S[at], layout.start_S[at]))
    return made


def _depths(parent_S: Ints) -> Ints:
    depth_S = np.zeros_like(parent_S)
    for segment, parent in enumerate(parent_S.tolist()):
        if parent >= 0:
            depth_S[segment] = depth_S[parent] + 1
    return depth_S


def longest(layout: Layout) -> int:
    """Return the tokens of the longest path."""
    end_S = layout.length_S.copy()
    for segment, parent in enumerate(layout.parent_S.tolist()):
        if parent >= 0:
            end_S[segment] += end_S[parent]
    return int(end_S.max())


# ---------------------------------------------------------------- joined passes


PATHS = "paths"  # on a CPU; the tables are those of `attention.paths`
KERNELS: dict[str, Kernel] = {"plain": Plain(), "flash": Flash(), "cudnn": Cudnn()}
_TABLES = 4  # for each pass: places of queries and of keys, edges of spans of queries and of keys
_ROUND = 128


class Joined(NamedTuple):
    """A forest's passes, or its paths, as the operator takes them. `window` is for passes, 0 without one; the tables of
    paths contain it."""

    tables: list[torch.Tensor]
    most: list[int]
    kernel: str
    window: int = 0

    def __call__(self, heads: Heads, scale: float, options: Options = PLAIN) -> torch.Tensor:
        out: torch.Tensor = torch.ops.rillflow.forest_attention(
            *heads, options.sinks, self.tables,
            most=self.most, way=self.kernel, scale=scale, softcap=options.softcap, window=self.window,
        )[0]  # fmt: skip
        return out


def joined(layout: Layout, kernel: str, window: int | None = None) -> Joined:
    """Kernels that loop over spans on the host want their edges there."""
    if kernel == PATHS:
        return Joined(paths.tables(layout, window), [0], kernel)
    if window is not None and (kernel == "plain" or (layout.parent_S >= 0).any()):
        raise ConfigError(
            f"the attention kernel {kernel} has no sliding windows in trees", "set trainer.attention: auto"
        )
    device = layout.tokens_P.device
    edges_on = device if kernel in {"flash", "cudnn"} else torch.device("cpu")
    tables: list[torch.Tensor] = []
    most: list[int] = []
    for one in passes(layout):
        tables += [_cuts(one.query_at_C, one.query_C, layout), _cuts(one.key_at_C, one.key_C, layout)]
        tables += [_edges(one.query_C).to(edges_on), _edges(one.key_C).to(edges_on)]
        most += [_rounded(one.query_C), _rounded(one.key_C)]
    return Joined(tables, most, kernel, window or 0)


def _cuts(at_C: Ints, count_C: Ints, layout: Layout) -> torch.Tensor:
    """Return the sizes of the pieces that spans cut all tokens into, on the host: every second piece is a span."""
    edges = np.stack([at_C, at_C + count_C], axis=1).reshape(-1)
    return torch.from_numpy(np.diff(edges, prepend=0, append=len(layout.tokens_P)).astype(np.int64))


def _edges(count_C: Ints) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(count_C)]).astype(np.int32))


def _rounded(count_C: Ints) -> int:
    """Return the longest span's length, rounded up, so that compiled code serves more batches."""
    return -(-int(count_C.max()) // _ROUND) * _ROUND


class _Step(NamedTuple):
    query_cuts: list[int]
    key_cuts: list[int]
    spans: Spans


def _steps(tables: Sequence[torch.Tensor], most: Sequence[int], window: int) -> Iterator[_Step]:
    """Yield the passes. The first is causal and covers all tokens."""
    for number in range(len(tables) // _TABLES):
        query_cuts, key_cuts, query_edges, key_edges = tables[number * _TABLES : (number + 1) * _TABLES]
        spans = Spans(query_edges, key_edges, most[2 * number], most[2 * number + 1], number == 0, window)
        yield _Step(query_cuts.tolist(), key_cuts.tolist(), spans)


def _pieces(part: torch.Tensor, cuts: list[int]) -> list[torch.Tensor]:
    """Return views of the spans."""
    return list(torch.split(part, cuts)[1::2])


def _picked(part: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    pieces = _pieces(part, cuts)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@torch.library.custom_op("rillflow::forest_attention", mutates_args=())
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    tables: list[torch.Tensor],
    *,
    most: list[int],
    way: str,
    scale: float,
    softcap: float | None,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    heads = Heads(query, key, value)
    if way == PATHS:
        whole = paths.forward(heads, tables, scale=scale, softcap=softcap)
    else:
        assert softcap is None, "no kernel of passes caps scores"
        run = KERNELS[way]
        own, *above = _steps(tables, most, window)
        whole = run.forward(heads, own.spans, scale)
        for step in above:
            _join(whole, step.query_cuts, run.forward(_heads(heads, step), step.spans, scale))
    if sinks is not None:
        whole = Found(*_with_sinks(*whole, sinks))
    return whole.out.contiguous(), whole.lse.contiguous()  # compiled code relies on contiguous results


def _heads(heads: Heads, step: _Step) -> Heads:
    query, *others = heads
    return Heads(_picked(query, step.query_cuts), *(_picked(part, step.key_cuts) for part in others))


def _join(whole: Found, cuts: list[int], some: Found) -> None:
    """Join the results of some queries over further keys into `whole`."""
    before = _picked(whole.lse, cuts)
    share = torch.sigmoid(some.lse - before)[..., None]  # of the further keys in the softmax over both
    exact = accumulating(whole.out.dtype)
    out = torch.lerp(_picked(whole.out, cuts).to(exact), some.out.to(exact), share)
    for all_of_it, part in ((whole.out, out.to(whole.out.dtype)), (whole.lse, torch.logaddexp(before, some.lse))):
        torch._foreach_copy_(_pieces(all_of_it, cuts), list(torch.split(part, cuts[1::2])))


def _with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks_H: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Join a key whose value is zero to results [queries, heads, size] and log-sum-exps [queries, heads]."""
    score_H = sinks_H.to(lse.dtype)
    share = torch.sigmoid(lse - score_H)[..., None]  # of the other keys in the softmax over all
    return (out * share).to(out.dtype), torch.logaddexp(lse, score_H)


@_attention.register_fake
def _(query: torch.Tensor, *others: Any, **options: Any) -> Any:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=accumulating(query.dtype))


@torch.library.custom_op("rillflow::forest_attention_backward", mutates_args=())
def _attention_backward(
    grad: torch.Tensor,
    heads: list[torch.Tensor],
    found: list[torch.Tensor],
    tables: list[torch.Tensor],
    *,
    most: list[int],
    way: str,
    scale: float,
    softcap: float | None,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs, whole = Heads(*heads), Found(*found)
    if way == PATHS:
        of = paths.backward(grad, inputs, whole, tables, scale=scale, softcap=softcap)
        return of.query, of.key, of.value
    run = KERNELS[way]
    own, *above = _steps(tables, most, window)
    grads = run.backward(grad, inputs, whole, own.spans, scale)
    for step in above:
        pulled, *theirs = (_picked(part, step.query_cuts) for part in (grad, *whole))
        some = run.backward(pulled, _heads(inputs, step), Found(*theirs), step.spans, scale)
        for all_of_it, cuts, part in zip(grads, (step.query_cuts, step.key_cuts, step.key_cuts), some, strict=True):
            torch._foreach_add_(_pieces(all_of_it, cuts), list(torch.split(part, cuts[1::2])))
    of_query, of_key, of_value = (part.contiguous() for part in grads)
    return of_query, of_key, of_value


@_attention_backward.register_fake
def _(grad: torch.Tensor, heads: Sequence[torch.Tensor], *others: Any, **options: Any) -> Any:
    query, key, value = (part.new_empty(part.shape) for part in heads)
    return query, key, value


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, ...]) -> None:
    query, key, value, sinks, tables = inputs
    ctx.save_for_backward(query, key, value, *output, sinks, *tables)
    ctx.options = keyword_only_inputs
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, out, lse, sinks, *tables = ctx.saved_tensors
    grads = torch.ops.rillflow.forest_attention_backward(
        grad.contiguous(), [query, key, value], [out, lse], tables, **ctx.options
    )
    return (*grads, None if sinks is None else _of_sinks(grad, out, lse, sinks), [None] * len(tables))


def _of_sinks(grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks_H: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sinks: as of any score, but their value is zero."""
    weights = (sinks_H.to(lse.dtype) - lse).exp()
    return -(weights * (grad.to(lse.dtype) * out).sum(-1)).sum(0).to(sinks_H.dtype)


_attention.register_autograd(_differentiate, setup_context=_keep)


# ---------------------------------------------------------------- flex attention


class Flex(NamedTuple):
    mask: BlockMask

    def __call__(self, heads: Heads, scale: float, options: Options = PLAIN) -> torch.Tensor:
        run = _compiled() if heads.query.is_cuda and not torch.compiler.is_compiling() else flex_attention
        heads_first = (part.transpose(0, 1)[None] for part in heads)
        asked: dict[str, Any] = {} if options.softcap is None else {"score_mod": _bending(options.softcap)}
        if options.sinks is not None:
            asked["return_aux"] = AuxRequest(lse=True)
        shared = heads.query.shape[1] != heads.key.shape[1]
        found: Any = run(*heads_first, block_mask=self.mask, scale=scale, enable_gqa=shared, **asked)
        if options.sinks is None:
            out: torch.Tensor = found[0].transpose(0, 1)
            return out
        out_1HQD, further = found
        return _with_sinks(out_1HQD[0].transpose(0, 1), further.lse[0].t(), options.sinks)[0]


def _bending(softcap: float) -> Any:
    def bend(score: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return bend


def flex(layout: Layout, window: int | None = None) -> Flex:
    device = layout.tokens_P.device
    end_P = torch.from_numpy(np.repeat(subtree_ends(layout), layout.length_S)).to(device)
    place_P = layout.position_P

    # A token sees another one if that is not after it, and its own place is before the end of the other's descendants.
    def sees(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = (key <= query) & (query < end_P[key])
        return seen if window is None else seen & (place_P[query] - place_P[key] < window)

    tokens = len(end_P)
    return Flex(create_block_mask(sees, None, None, tokens, tokens, device=str(device)))


@lru_cache(maxsize=1)
def _compiled() -> Any:
    """Without compiling, flex attention holds all scores in memory."""
    return torch.compile(flex_attention, dynamic=True)


# ---------------------------------------------------------------- the layers of a model


class Packed(NamedTuple):
    """The attention of a pack by the window of a layer. A window that no path exceeds has the attention of None."""

    by_window: dict[int | None, Joined | Flex]

    def __call__(self, heads: Heads, scale: float, options: Options = PLAIN) -> torch.Tensor:
        if options.window not in self.by_window:
            raise ConfigError(
                f"a layer has a sliding window of {options.window}, and the model's config names others: "
                f"{', '.join(map(str, self.by_window))}",
                "set trainer.attention: padded",
            )
        return self.by_window[options.window](heads, scale, options)


def packed(layout: Layout, windows: Set[int | None], make: Callable[[int | None], Joined | Flex]) -> Packed:
    """Return the attention of layers with these windows; `make` makes that of a window which hides something."""
    most = longest(layout) if windows - {None} else 0
    hiding = {window: window if window is not None and window < most else None for window in windows}
    made = {window: make(window) for window in set(hiding.values())}
    return Packed({window: made[hiding[window]] for window in windows})
