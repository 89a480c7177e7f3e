"""Functions that fill the rows of a batch: its source, scores of models, rewards, advantages.

A source yields the parts as the ledger serves them: episodes that others play (`fetch`), or that this trainer's own
workers play for this step (`generate`). A graph without `generate` never uses the worker's own engine. Both sources
record statistics of the rows as they were sampled, and apply the overlong filter: rows whose answer was cut are not
trained, and `answer_R` keeps their number of tokens.

`advantages` looks at each row alone, so parts are trained on as they arrive. `batch_advantages` sees all rows of all
ranks: it whitens, compares the rewards of single answers, or subtracts the distance from a reference before rewards are
compared. `gae` uses a critic's values and makes the returns that the critic learns.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from rillflow.config import CriticConfig, TrainerConfig
from rillflow.errors import ConfigError, GraphError
from rillflow.trainer.algorithms import ALGORITHMS, convention_of
from rillflow.trainer.algorithms import advantages as formulas
from rillflow.trainer.algorithms.advantages import Groups, soft_overlong
from rillflow.trainer.algorithms.losses.terms import KL
from rillflow.trainer.batches import Databuffer
from rillflow.trainer.graph.worker import Step
from rillflow.trainer.metrics import RowValues
from rillflow.trainer.parallel import Peers

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


log = logging.getLogger(__name__)


def advantage_function(config: TrainerConfig) -> str:
    """Return the name of the function that makes the advantages of a recipe's algorithm."""
    algorithm = ALGORITHMS[config.algorithm](config)
    if algorithm.advantage is None:
        return "gae"
    priced = config.kl is not None and config.kl.where == "reward"
    if priced and config.by_steps:
        raise ConfigError(
            "rewards of single answers are compared with each other, so they cannot include a KL distance",
            "set kl.where: loss, or leave trainer.step_rewards out",
        )
    whole = priced or algorithm.whiten is not None or config.by_steps
    return "batch_advantages" if whole else "advantages"


def advantages(step: Step, data: Databuffer) -> Mapping[str, Column]:
    """Give all tokens of a row the row's advantage."""
    return {"advantage_N": _of_rows(step, data)[data.row_N]}


def batch_advantages(step: Step, data: Databuffer) -> Mapping[str, Column]:
    if step.config.by_steps:
        value_T = _of_answers(step, data)
    elif "kl_N" in data and step.algorithm.to_go:
        row_T = rows_of(data)
        reward_T = formulas.outcome_rewards(data["reward_R"], row_T) - trained(data, "kl_N")
        value_T = formulas.returns_to_go(reward_T, row_T)
    elif "kl_N" in data:
        value_T = _of_rows(step, _with_kl_paid(step, data))[rows_of(data)]
    else:
        value_T = _of_rows(step, data)[rows_of(data)]
    if step.algorithm.whiten is not None:
        value_T = step.algorithm.whiten(value_T, peers=step.peers)
    return {"advantage_N": spread(data, value_T)}


def _of_rows(step: Step, data: Databuffer) -> Floats:
    if step.algorithm.advantage is None:
        raise GraphError(f"{step.config.algorithm} has no advantages of groups", "use the function gae instead")
    return step.algorithm.advantage(data.rows)


def _of_answers(step: Step, data: Databuffer) -> Floats:
    """Return advantages from rewards of single answers. `compared` finds the group of each row."""
    reward_T = trained(data, "step_reward_N")
    (rewarded,) = step.peers.total([float((~np.isnan(reward_T)).sum())])
    if not rewarded:
        log.warning("no answer of this batch has a reward of its own: the policy learns nothing from it")
    step.metrics["rewarded_answers"] = rewarded
    return formulas.step_advantages(
        reward_T,
        rows_of(data),
        np.arange(len(data)),
        convention_of(step.config),
        to_go=step.config.step_rewards == "to_go",
        compare=lambda score, row: compared(data, score, row, step.peers),
    )


def _with_kl_paid(step: Step, data: Databuffer) -> Databuffer:
    """Subtract the distance of all its tokens from a row's reward, and compare rows again (verl's convention)."""
    paid_R = np.bincount(data.row_N, data["kl_N"], minlength=len(data)).astype(np.float64)
    reward_R = data["reward_R"] - paid_R
    groups = compared(data, reward_R, np.arange(len(data)), step.peers)
    return data.adding({"reward_R": reward_R}).adding(statistics_columns(groups))


# ---------------------------------------------------------------- with a critic


def gae(step: Step, data: Databuffer) -> Mapping[str, Column]:
    """Make generalised advantages, whitened over the batch, and returns.

    The reward of a row is on its last trained token, or the rewards of its answers on theirs. If the recipe puts the
    KL distance into the reward, each token pays for its own. Tokens that are not trained (the words of a tool) are
    skipped.
    """
    critic = step.config.critic or CriticConfig()
    row_T = rows_of(data)
    value_T, return_T = formulas.gae(
        _token_rewards(step, data), trained(data, "value_N"), row_T, critic.gamma, critic.lam
    )
    if step.algorithm.whiten is not None:
        value_T = step.algorithm.whiten(value_T, peers=step.peers)
    return {"advantage_N": spread(data, value_T), "return_N": spread(data, return_T)}


def _token_rewards(step: Step, data: Databuffer) -> Floats:
    if step.config.by_steps:
        reward_T: Floats = np.nan_to_num(trained(data, "step_reward_N"), nan=0.0)
    else:
        reward_T = formulas.outcome_rewards(data["reward_R"], rows_of(data))
    return reward_T - trained(data, "kl_N") if "kl_N" in data else reward_T
