"""Whole steps as the oracles compute them: from rewards, log-probs and values of a batch to losses and gradients.

Runs in their environment, beside `oracle_process.py`. Nothing of Rillflow is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from trl.rewards import get_soft_overlong_punishment
from verl.trainer.ppo import core_algos as verl
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

Found = Iterator[tuple[str, Any]]
TOKEN, ROW, SUM, NORM = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
BETA = 0.1


def actor(low: float = 0.2, high: float = 0.2, dual: float = 3.0) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=low, clip_ratio_high=high,
        clip_ratio_c=dual,
    )  # fmt: skip


class Steps:
    """`reward` of tokens may be shaped; `old` is what the clip is around."""

    def __init__(self, b: dict[str, torch.Tensor]) -> None:
        self.b = b
        self.mask, self.old, self.reward = b["mask"], b["old"], b["token_reward"]
        self.index = b["group"].numpy()
        self.new = b["new"].clone().requires_grad_()

    def advantage(self, name: str, reward: torch.Tensor | None = None) -> torch.Tensor:
        token = self.reward if reward is None else reward
        by_name: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
            "grpo": lambda: verl.compute_grpo_outcome_advantage(token, self.mask, self.index),
            "dr_grpo": lambda: verl.compute_grpo_outcome_advantage(
                token, self.mask, self.index, norm_adv_by_std_in_grpo=False
            ),
            "rloo": lambda: verl.compute_rloo_outcome_advantage(token, self.mask, self.index),
            "reinforce_plus_plus": lambda: verl.compute_reinforce_plus_plus_outcome_advantage(
                token.clone(), self.mask, config=SimpleNamespace(gamma=1.0)
            ),
            "baseline": lambda: verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
                token, self.mask, self.index
            ),
        }
        return by_name[name]()[0]

    def policy(
        self,
        advantage: torch.Tensor,
        how: str,
        config: ActorConfig,
        *,
        name: str = "vanilla",
        weights: torch.Tensor | None = None,
        old: torch.Tensor | None = None,
    ) -> torch.Tensor:
        centre = self.old if old is None else old
        loss: torch.Tensor = verl.get_policy_loss_fn(name)(
            centre, self.new, advantage, self.mask, how, config, weights
        )[0]
        return loss

    def graded(self, name: str, loss: torch.Tensor, leaf: torch.Tensor | None = None) -> Found:
        yield f"whole {name}/value", loss.detach()
        yield f"whole {name}/gradient", torch.autograd.grad(loss, self.new if leaf is None else leaf)[0]

    def priced(self, kind: str) -> torch.Tensor:
        """Rewards of tokens less their distance from the reference, as verl's trainer applies it."""
        return self.reward - BETA * verl.kl_penalty(self.old, self.b["reference"], kind) * self.mask


def algorithms(steps: Steps) -> Found:
    grpo, rloo = steps.advantage("grpo"), steps.advantage("rloo")
    yield from steps.graded("grpo", steps.policy(grpo, ROW, actor()))
    yield from steps.graded("dr_grpo", steps.policy(steps.advantage("dr_grpo"), NORM, actor()))
    yield from steps.graded("dapo", steps.policy(grpo, TOKEN, actor(0.2, 0.28, 10.0)))
    yield from steps.graded("gspo", steps.policy(grpo, ROW, actor(3e-4, 4e-4), name="gspo"))
    yield from steps.graded("cispo", steps.policy(grpo, TOKEN, actor(1.0, 0.2), name="cispo"))
    yield from steps.graded("sapo", steps.policy(grpo, ROW, actor(), name="sapo"))
    yield from steps.graded("rloo", steps.policy(rloo, TOKEN, actor()))
    for name, advantage in (("reinforce_plus_plus",) * 2, ("reinforce_plus_plus_baseline", "baseline")):
        yield from steps.graded(name, steps.policy(steps.advantage(advantage), TOKEN, actor()))
    own = compute_rollout_correction_weights((steps.new - steps.old).detach(), steps.mask, "token", 2.0)[0]
    reinforce = verl.compute_policy_loss_reinforce(steps.old, steps.new, rloo, steps.mask, SUM, actor(), own)[0]
    yield from steps.graded("reinforce", reinforce)
    away = (steps.new.detach() - steps.old).clamp(-20, 20).exp()
    capped = torch.where(away <= 5.0, away, torch.zeros_like(away))
    plain = actor(dual=1e9)
    loss = steps.policy(grpo, TOKEN, plain, weights=capped, old=steps.new.detach())
    yield from steps.graded("decoupled_ppo", loss)


def terms(steps: Steps) -> Found:
    b, grpo = steps.b, steps.advantage("grpo")
    for kind in ("k1", "k2", "k3"):
        distance = verl.agg_loss(verl.kl_penalty(steps.new, b["reference"], kind), steps.mask, ROW)
        yield from steps.graded(f"grpo {kind} loss", steps.policy(grpo, ROW, actor()) + BETA * distance)
        priced = steps.priced(kind)
        yield from steps.graded(f"grpo {kind} reward", steps.policy(steps.advantage("grpo", priced), ROW, actor()))
        to_go = steps.advantage("reinforce_plus_plus", priced)
        yield from steps.graded(f"reinforce_plus_plus {kind} reward", steps.policy(to_go, TOKEN, actor()))
    away = steps.old - b["behaviour"]
    tis = compute_rollout_correction_weights(away, steps.mask, "token", 2.0)[0]
    yield from steps.graded("grpo tis", steps.policy(grpo, ROW, actor(), weights=tis))
    yield from steps.graded("dapo tis", steps.policy(grpo, TOKEN, actor(0.2, 0.28, 10.0), weights=tis))
    punish = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=6)
    punished = punish([[0] * int(length) for length in steps.mask.sum(1)])
    last = torch.zeros_like(steps.mask)
    for row, flags in enumerate(steps.mask.bool()):
        if flags.any():
            last[row, int(flags.nonzero()[-1])] = 1.0
    shaped = steps.reward + last * torch.tensor(punished, dtype=torch.float64)[:, None]
    loss = steps.policy(steps.advantage("grpo", shaped), TOKEN, actor(0.2, 0.28, 10.0))
    yield from steps.graded("dapo overlong", loss)


def ppo(steps: Steps) -> Found:
    b = steps.b
    for name, reward in (("ppo", steps.reward), ("ppo k1 reward", steps.priced("k1"))):
        advantage, returns = verl.compute_gae_advantage_return(reward, b["old_value"], steps.mask, 0.97, 0.9)
        yield from steps.graded(name, steps.policy(advantage, TOKEN, actor()))
        value = b["value"].clone().requires_grad_()
        loss = verl.compute_value_loss(value, returns, b["old_value"], steps.mask, 0.5, TOKEN)[0]
        yield from steps.graded(f"{name} critic", loss, value)


def whole_steps(b: dict[str, torch.Tensor]) -> Found:
    steps = Steps(b)
    for make in (algorithms, terms, ppo):
        yield from make(steps)
