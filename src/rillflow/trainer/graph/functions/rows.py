"""Functions that fill the rows of a batch: its source, scores of models, rewards before they become advantages.

A source yields the parts as the ledger serves them: episodes that others play (`fetch`), or that this trainer's own
workers play for this step (`generate`). A graph without `generate` never uses the worker's own engine. Both sources
record statistics of the rows as they were sampled, and apply the overlong filter: rows whose answer was cut are not
trained, and `answer_R` keeps their number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from rillflow.errors import GraphError
from rillflow.trainer.algorithms.advantages import Groups, soft_overlong
from rillflow.trainer.algorithms.losses.terms import KL
from rillflow.trainer.batches import Databuffer
from rillflow.trainer.graph.worker import Step
from rillflow.trainer.metrics import RowValues
from rillflow.trainer.parallel.peers import Peers

if TYPE_CHECKING:
    import numpy.typing as npt

    from rillflow.trainer.batches import Column, Floats, Ints


# ---------------------------------------------------------------- source and publication


def fetch(step: Step) -> Iterator[Databuffer]:
    return _recorded(step, step.fetch())


def generate(step: Step) -> Iterator[Databuffer]:
    return _recorded(step, step.generate())


def _recorded(step: Step, parts: Iterable[Databuffer]) -> Iterator[Databuffer]:
    seen = RowValues()
    for part in parts:
        seen.add(part.rows)
        rows = part.rows.masked(~part.rows.truncated_R) if step.config.overlong_filter else part.rows
        yield part.adding({"answer_R": part.rows.trained_R, "mask_N": rows.mask_N})
    step.metrics |= seen.values(step.peers)


def publish(step: Step) -> None:
    """Hand the new weights on."""
    step.publish()


# ---------------------------------------------------------------- scores of models, without gradient


def actor_logprobs(step: Step, data: Databuffer) -> Mapping[str, Column]:
    """Score under the weights before the batch's first update: the proximal policy."""
    return {"proximal_N": step.models["actor"].infer(data, step.check)}


def reference_logprobs(step: Step, data: Databuffer) -> Mapping[str, Column]:
    return {"reference_N": step.models["reference"].infer(data, step.check)}


def critic_values(step: Step, data: Databuffer) -> Mapping[str, Column]:
    """Score the token before each trained one: its value does not depend on the trained token."""
    return {"value_N": step.models["critic"].infer(data, step.check)}


# ---------------------------------------------------------------- rewards


def punish_overlong(step: Step, data: Databuffer) -> Mapping[str, Column]:
    """Apply DAPO's soft punishment, by the number of sampled tokens."""
    overlong = step.config.overlong
    if overlong is None:
        raise GraphError("punish_overlong needs trainer.overlong", "set trainer.overlong: {longest: …, margin: …}")
    return {"reward_R": data["reward_R"] + soft_overlong(data["answer_R"], overlong.longest, overlong.margin)}


def score_reward(step: Step, data: Databuffer) -> Mapping[str, Column]:
    """Add the score of a reward model, which ran in a stage, to the episode's reward."""
    return {"reward_R": data["reward_R"] + data["score_R"]}


def kl_reward(step: Step, data: Databuffer) -> Mapping[str, Column]:
    """Return each token's cost for its distance from the reference.

    The distance is that of the policy that sampled: the estimators hold for tokens of the policy they are used on.
    """
    kl = step.config.kl
    if kl is None:
        raise GraphError("kl_reward needs trainer.kl", "set trainer.kl: {where: reward, …}")
    sampled_T, reference_T = (torch.from_numpy(trained(data, name)) for name in ("old_N", "reference_N"))
    distance_T = KL[kl.estimator](sampled_T, reference_T).numpy()
    return {"kl_N": spread(data, kl.coefficient * distance_T)}


def group_statistics(step: Step, data: Databuffer) -> Mapping[str, Column]:
    """Recompute statistics of groups from the current rewards; the ledger's belong to the rewards as played.

    They cover the rows of a group that are in the batch, on all ranks.
    """
    return statistics_columns(compared(data, data["reward_R"], np.arange(len(data)), step.peers))


# ---------------------------------------------------------------- columns over tokens (N), arrays over trained ones (T)


def trained(data: Databuffer, name: str) -> Floats:
    """Return a column over tokens at the trained ones."""
    of_T: Floats = data[name][data["mask_N"]].astype(np.float64)
    return of_T


def rows_of(data: Databuffer) -> Ints:
    """Return the row of each trained token."""
    row_T: Ints = data.row_N[data["mask_N"]]
    return row_T


def spread(data: Databuffer, value_T: Floats) -> Column:
    """Return a column over all tokens, 0 where none is trained."""
    column_N = np.zeros(len(data["mask_N"]))
    column_N[data["mask_N"]] = value_T
    return column_N


def compared(data: Databuffer, score: Floats, row: Ints, peers: Peers) -> Groups:
    """Return the statistics of these scores, each of a row, over their groups on all ranks.

    Rows belong to one group if the ledger compares them with each other, whether a group is a prompt's, an agent's or a
    turn's; such rows have the same statistics.
    """
    names = ("member_R", "alike_R", "group_mean_R", "group_std_R", "group_size_R")
    mine = np.column_stack([*(data[name][row] for name in names), score]).astype("<f8")
    parts = [np.frombuffer(part, "<f8").reshape(-1, len(names) + 1) for part in peers.everyone(mine.tobytes())]
    everyones = np.concatenate(parts)
    group: npt.NDArray[np.int64] = np.unique(everyones[:, :-1], axis=0, return_inverse=True)[1].reshape(-1)
    groups = Groups.of(everyones[:, -1], group)
    before = sum(len(part) for part in parts[: peers.rank])
    own = slice(before, before + len(score))
    return Groups(groups.mean_R[own], groups.std_R[own], groups.size_R[own])


def statistics_columns(groups: Groups) -> dict[str, Column]:
    return {"group_mean_R": groups.mean_R, "group_std_R": groups.std_R, "group_size_R": groups.size_R}
