"""Teams of ranks. Context parallel (`trainer.context_ranks`): they share the tokens of each micro-batch.

Of teams of n ranks, ranks 0 to n - 1 are the first, the next n the second. The ranks of a team have the same rows and
make the same micro-batches; teams divide a batch as single ranks do otherwise (`Teams`). Token p of a pack belongs to
rank p mod n of the team, so that the trained tokens of every row are spread evenly. A rank runs the embedding, the
linear layers, the norms and the head on its own tokens. For attention it gives its tokens' heads away and gets its
share of the heads of all tokens (Ulysses): attention sees the whole pack, so packs, trees and all backends compute what
they do on one rank. Key heads that n does not divide are repeated.

With tensor parallel (`tensor`) the ranks of a team share weights instead: each has all tokens and some of the heads,
and of what is above only the scores of trained tokens are shared.

Scores are gathered before the loss, which every rank of a team computes for the whole micro-batch, because losses of
whole rows need all of their tokens. Backward keeps the gradients of a rank's own scores, so the sum of the gradients
over all ranks counts every token once.

Invariants: a sum or a count over teams has each row once; the ranks of a team have equal scores, bit for bit; all ranks
run equally many passes, since a rank that left one would leave its team inside the model.

Axes: P packed tokens, T trained tokens, I own tokens of a rank, R ranks of a team, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from rillflow.config import TrainerConfig
from rillflow.errors import ConfigError
from rillflow.trainer.parallel import Peers

if TYPE_CHECKING:
    from rillflow.trainer.attention.forest import Packed
    from rillflow.trainer.attention.kernels import Heads, Options
    from rillflow.trainer.packing import Layout, MicroBatch

_UNKNOWN = -1  # in a layout, in place of an expert that was not recorded
_PATIENCE = timedelta(seconds=600)  # for a rank of the team, in one exchange
# By name: arguments of operators cannot be groups.
_GROUPS: dict[str, dist.ProcessGroup] = {}


# ---------------------------------------------------------------- batches: teams as peers


def in_teams(peers: Peers, config: TrainerConfig) -> Peers:
    """Return the peers among which rows are divided and counted: the ranks or their teams."""
    return peers if config.team == 1 or peers.size == 1 else Teams(peers, config.team)


def group_of(name: str) -> dist.ProcessGroup:
    return _GROUPS[name]


class Teams:
    """Peers that are teams of `each` ranks, whose ranks say the same: the first speaks, and all hear the answers.

    All ranks call each method together.
    """

    def __init__(self, ranks: Peers, each: int) -> None:
        self.rank, self._place = divmod(ranks.rank, each)
        self.size = ranks.size // each
        self._ranks = ranks
        self._each = each

    def total(self, values: Sequence[float]) -> list[float]:
        return self._ranks.total([0.0] * len(values) if self._place else values)

    def highest(self, values: Sequence[float]) -> list[float]:
        return self._ranks.highest(values)

    def first(self, message: bytes) -> bytes:
        return self._ranks.first(message)

    def everyone(self, message: bytes) -> list[bytes]:
        return self._ranks.everyone(b"" if self._place else message)[:: self._each]

    def exchange(self, messages: Sequence[bytes | memoryview]) -> list[bytes]:
        """Each rank exchanges with the ranks that have its place in the other teams."""
        sent: list[bytes | memoryview] = [b""] * self._ranks.size
        sent[self._place :: self._each] = messages
        return self._ranks.exchange(sent)[self._place :: self._each]

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._place:
            for tensor in tensors:
                tensor.zero_()
        self._ranks.add(tensors)

    def agree(self, error: Exception | None) -> None:
        self._ranks.agree(error)


# ---------------------------------------------------------------- micro-batches: a rank's share


class Trained(NamedTuple):
    """The trained tokens that a rank scores, at their places among its own tokens. `gather` makes their scores those of
    the whole micro-batch."""

    select_I: torch.Tensor
    target_I: torch.Tensor
    temperature_I: torch.Tensor
    gather: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Context:
    """A rank's place in its team, which shares tokens or `weights`. The default is a rank that has its micro-batches
    for itself."""

    rank: int = 0
    size: int = 1
    group: str = ""
    weights: bool = False

    @classmethod
    def of(cls, config: TrainerConfig, peers: Peers) -> Context:
        """Connect this rank with its team. Collective."""
        size, weights = config.team, config.tensor_ranks > 1
        if size == 1:
            return cls()
        if peers.size % size:
            raise ConfigError(
                f"{peers.size} ranks cannot form teams of {size}",
                "set trainer.ranks to a multiple of trainer.context_ranks or tensor_ranks",
            )
        group, _ = dist.new_subgroups(size, timeout=_PATIENCE)  # type: ignore[no-untyped-call]
        _GROUPS[group.group_name] = group
        return cls(peers.rank % size, size, group.group_name, weights)

    def check(self, model: Any) -> None:
        """Raise ConfigError if the ranks of the team cannot share the heads of this model."""
        if self.size == 1:
            return
        config, option = model.config.get_text_config(), "tensor_ranks" if self.weights else "context_ranks"
        for name in ("num_attention_heads", *(["num_key_value_heads"] if self.weights else [])):
            heads = getattr(config, name, None)
            if not isinstance(heads, int) or heads % self.size:
                raise ConfigError(
                    f"{self.size} ranks cannot share the attention heads of {type(model).__name__}: {name} is {heads}",
                    f"set trainer.{option} to a divisor of it",
                )

    def padded(self, layout: Layout) -> Layout:
        """Return the layout with as many tokens for each rank: its last segment goes on with tokens that no other one
        sees. They are at position 0, because long positions may change a model's rotary embedding."""
        more = 0 if self.weights else -len(layout.tokens_P) % self.size
        if not more:
            return layout
        length_S = layout.length_S.copy()
        length_S[-1] += more
        experts_PW = layout.experts_PW
        return replace(
            layout,
            tokens_P=pad(layout.tokens_P, (0, more)),
            position_P=pad(layout.position_P, (0, more)),
            length_S=length_S,
            experts_PW=None if experts_PW is None else pad(experts_PW, (0, 0, 0, more), value=_UNKNOWN),
        )

    def own(self, of_P: torch.Tensor) -> torch.Tensor:
        """Return the values of this rank's tokens."""
        return of_P if self.weights else of_P[self.rank :: self.size]

    def experts(self, layout: Layout) -> torch.Tensor | None:
        """Return the recorded experts of this rank's tokens."""
        chosen_PW = self.padded(layout).experts_PW
        return None if chosen_PW is None else self.own(chosen_PW)

    def exchanging(self, attention: Packed) -> Packed | Exchanging:
        """Return the attention of a whole pack as one that is given this rank's tokens."""
        return attention if self.size == 1 or self.weights else Exchanging(attention, self.rank, self.size, self.group)

    def trained(self, micro: MicroBatch) -> Trained:
        temperature_T = micro.columns["temperature_T"]
        if self.size == 1:
            return Trained(micro.select_T, micro.target_T, temperature_T, _as_it_is)
        if self.weights:
            number_I = torch.arange(self.rank, len(micro.select_T), self.size, device=micro.select_T.device)
            select_I = micro.select_T[number_I]
        else:
            number_I = torch.nonzero(micro.select_T % self.size == self.rank)[:, 0]
            select_I = micro.select_T[number_I] // self.size
        gather = partial(self._gathered, at_I=number_I, count=len(micro.select_T))
        return Trained(select_I, micro.target_T[number_I], temperature_T[number_I], gather)

    def whole(self, of_I: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the values of all `tokens` of a pack from those of every rank's own tokens."""
        if self.size == 1:
            return of_I
        at_I = torch.arange(self.rank, self.size * len(of_I), self.size, device=of_I.device)
        return self._gathered(of_I, at_I, self.size * len(of_I))[:tokens]

    def _gathered(self, of_I: torch.Tensor, at_I: torch.Tensor, count: int) -> torch.Tensor:
        made: torch.Tensor = _Gathered.apply(of_I, at_I, count, self.group)  # type: ignore[no-untyped-call]
        return made


def _as_it_is(of_T: torch.Tensor) -> torch.Tensor:
    return of_T


class _Gathered(torch.autograd.Function):
    """The values of all ranks of a team, each at its place. Every rank computes the same from them, so the gradient of
    a rank's own values is a part of that of the whole: nothing is added."""

    @staticmethod
    def forward(ctx: Any, of_I: torch.Tensor, at_I: torch.Tensor, count: int, group: str) -> torch.Tensor:
        ctx.save_for_backward(at_I)
        whole = of_I.new_zeros(count, *of_I.shape[1:]).index_copy_(0, at_I, of_I)
        dist.all_reduce(whole, group=_GROUPS[group])  # a sum with zeros is exact
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad.index_select(0, *ctx.saved_tensors), None, None, None


# ---------------------------------------------------------------- attention: heads for tokens


class Exchanging(NamedTuple):
    """Attention over the tokens of all ranks of a team, given this rank's. Each rank computes a share of the heads."""

    attention: Packed
    rank: int
    ranks: int
    group: str

    def __call__(self, heads: Heads, scale: float, options: Options) -> torch.Tensor:
        tokens, query_heads = heads.query.shape[:2]
        if options.sinks is not None:
            options = options._replace(sinks=options.sinks.chunk(self.ranks)[self.rank])
        parts = [self._of_ranks(part) for part in heads]
        sizes = [part.shape[-1] for part in heads]
        own_PF = _exchange(torch.cat(parts, -1), self.group).flatten(0, 1)
        split = own_PF.split([part.shape[-1] for part in parts], -1)
        query, key, value = (part.unflatten(-1, (-1, size)) for part, size in zip(split, sizes, strict=True))
        out = self.attention(heads._replace(query=query, key=key, value=value), scale, options)
        back_IRF: torch.Tensor = _exchange(out.reshape(tokens, self.ranks, -1), self.group)
        return back_IRF.view(tokens, query_heads, -1)

    def _of_ranks(self, part_IHD: torch.Tensor) -> torch.Tensor:
        """Return [own tokens, ranks, features]: the heads of each rank, side by side. Adjacent query heads share a key
        head, so a rank's query heads find theirs among the repeated ones."""
        times = self.ranks // gcd(self.ranks, part_IHD.shape[1])
        repeated = part_IHD.repeat_interleave(times, 1) if times > 1 else part_IHD
        return repeated.reshape(len(part_IHD), self.ranks, -1)


@torch.library.custom_op("rillflow::exchange", mutates_args=())
def _exchange(parts_IRF: torch.Tensor, group: str) -> torch.Tensor:
    """Give part r of every token to rank r, and return for every own token and rank r the part that r gave. Because
    tokens belong to ranks in turn, the result is in the order of the pack if tokens and ranks become one axis. The
    exchange is its own inverse and its own gradient."""
    sent_RIF = parts_IRF.transpose(0, 1).contiguous()
    received_RIF = torch.empty_like(sent_RIF)
    dist.all_to_all_single(received_RIF, sent_RIF, group=_GROUPS[group])
    return received_RIF.transpose(0, 1).contiguous()


@_exchange.register_fake
def _(parts_IRF: torch.Tensor, group: str) -> torch.Tensor:
    return parts_IRF.new_empty(parts_IRF.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


def _differentiate(ctx: Any, grad_IRF: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.rillflow.exchange(grad_IRF, ctx.group), None


_exchange.register_autograd(_differentiate, setup_context=_keep)
