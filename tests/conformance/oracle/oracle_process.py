"""Runs in the oracles' own virtual environment: what verl and TRL make of the batches in one .npz, values and
gradients, into another. Nothing of Rillflow is imported here.

    python oracle_process.py IN.npz OUT.npz
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

warnings.simplefilter("ignore")

from oracle_whole import whole_steps  # noqa: E402
from trl import GRPOTrainer  # noqa: E402
from trl.rewards import get_soft_overlong_punishment  # noqa: E402
from trl.trainer.utils import nanstd  # noqa: E402
from verl.trainer.ppo import core_algos as verl  # noqa: E402
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

Found = Iterator[tuple[str, Any]]
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
LOW, HIGH, DUAL, BOUND = 0.2, 0.28, 3.0, 2.0


def actor(low: float = LOW, high: float = HIGH, dual: float = 1e9) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=low, clip_ratio_high=high,
        clip_ratio_c=dual,
    )  # fmt: skip


def graded(name: str, loss: torch.Tensor, leaf: torch.Tensor) -> Found:
    yield f"{name}/value", loss.detach()
    yield f"{name}/gradient", torch.autograd.grad(loss, leaf)[0]


def weights(log_ratio: torch.Tensor, mask: torch.Tensor, level: str, bound: float = BOUND) -> torch.Tensor:
    return compute_rollout_correction_weights(log_ratio, mask, level, bound)[0]


# ---------------------------------------------------------------- verl


def verl_losses(b: dict[str, torch.Tensor]) -> Found:
    new, old, mask, advantage = b["new"].requires_grad_(), b["old"], b["mask"], b["advantage"]

    def policy(name: str, how: str, config: ActorConfig, is_weights: torch.Tensor | None = None) -> torch.Tensor:
        loss: torch.Tensor = verl.get_policy_loss_fn(name)(old, new, advantage, mask, how, config, is_weights)[0]
        return loss

    for how in AGGREGATIONS:
        yield from graded(f"verl vanilla {how}", policy("vanilla", how, actor(dual=DUAL)), new)
        yield from graded(f"verl gspo {how}", policy("gspo", how, actor(0.05, 0.08)), new)
        yield from graded(f"verl cispo {how}", policy("cispo", how, actor()), new)
    counted = verl.get_policy_loss_fn("vanilla")(old, new, advantage, mask, "token-mean", actor())[1]
    yield "verl vanilla clipped/value", torch.tensor(counted["actor/pg_clipfrac"], dtype=torch.float64)
    yield from graded("verl vanilla no dual", policy("vanilla", "token-mean", actor()), new)
    yield from graded("verl sapo", policy("sapo", "seq-mean-token-mean", actor()), new)
    away = old - b["behaviour"]
    for level in ("token", "sequence"):
        tis = weights(away, mask, level)
        yield from graded(f"verl tis {level}", policy("vanilla", "token-mean", actor(dual=DUAL), tis), new)
        own = weights((new - old).detach(), mask, level)
        loss = verl.compute_policy_loss_reinforce(old, new, advantage, mask, "seq-mean-token-sum", actor(), own)[0]
        yield from graded(f"verl reinforce {level}", loss, new)
    free = weights(away, mask, "token", 1e30)
    yield from graded("verl decoupled", policy("vanilla", "token-mean", actor(), free), new)
    yield from verl_others(b, new)


def verl_others(b: dict[str, torch.Tensor], new: torch.Tensor) -> Found:
    for kind in ("k1", "k2", "k3"):
        kl = verl.kl_penalty(new, b["reference"], kind)
        yield from graded(f"verl {kind}", verl.agg_loss(kl, b["mask"], "token-mean"), new)
    value = b["value"].clone().requires_grad_()
    for how in ("token-mean", "seq-mean-token-mean"):
        loss = verl.compute_value_loss(value, b["return"], b["old_value"], b["mask"], 0.5, how)[0]
        yield from graded(f"verl value {how}", loss, value)
    logits = b["logits"].clone().requires_grad_()
    yield from graded("verl entropy", verl.compute_entropy_loss(logits, b["mask"], "seq-mean-token-mean"), logits)


def verl_advantages(b: dict[str, torch.Tensor]) -> Found:
    token, mask, index = b["token_reward"], b["mask"], b["group"].numpy()
    for gamma, lam in ((1.0, 1.0), (0.97, 0.9)):
        advantage, returns = verl.compute_gae_advantage_return(token, b["old_value"], mask, gamma, lam)
        yield f"verl gae {gamma}/value", advantage
        yield f"verl gae {gamma} returns/value", returns
        config = SimpleNamespace(gamma=gamma)
        yield (
            f"verl reinforce_plus_plus {gamma}/value",
            verl.compute_reinforce_plus_plus_outcome_advantage(token.clone(), mask, config=config)[0],
        )
    group = verl.compute_grpo_outcome_advantage
    yield "verl advantage grpo/value", group(token, mask, index)[0]
    yield "verl advantage dr_grpo/value", group(token, mask, index, norm_adv_by_std_in_grpo=False)[0]
    yield "verl advantage rloo/value", verl.compute_rloo_outcome_advantage(token, mask, index)[0]
    baseline = verl.compute_reinforce_plus_plus_baseline_outcome_advantage
    yield "verl reinforce_plus_plus_baseline/value", baseline(token, mask, index)[0]


# ---------------------------------------------------------------- TRL


def stub(b: dict[str, torch.Tensor], new: torch.Tensor, entropy: torch.Tensor, **settings: Any) -> SimpleNamespace:
    """The attributes of a trainer that `_compute_loss` reads."""
    args = {"use_bias_correction_kl": False, "delta": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    arguments = SimpleNamespace(steps_per_generation=1, **args | settings.pop("args", {}))
    one = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    return SimpleNamespace(
        **{
            "_get_per_token_logps_and_entropies": lambda *_, **__: (new, entropy, None),
            "args": arguments, "accelerator": one, "model": SimpleNamespace(training=False),
            "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
            "importance_sampling_level": "token", "beta": 0.0, "epsilon_low": LOW, "epsilon_high": HIGH,
            "use_vllm": False, "vllm_importance_sampling_correction": True, "current_gradient_accumulation_steps": 1,
            "max_completion_length": b["mask"].shape[1], "_entropy_bonus_enabled": False,
            "use_adaptive_entropy": False, "_metrics": defaultdict(lambda: defaultdict(list)),
        }
        | settings
    )  # fmt: skip


def trl_inputs(b: dict[str, torch.Tensor], advantage: torch.Tensor) -> dict[str, torch.Tensor]:
    mask = b["mask"]
    ids = torch.zeros_like(mask, dtype=torch.long)
    return {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, "completion_mask": mask,
        "advantages": advantage, "old_per_token_logps": b["old"], "ref_per_token_logps": b["reference"],
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": weights(b["old"] - b["behaviour"], mask, "token"),
    }  # fmt: skip


def trl_losses(b: dict[str, torch.Tensor]) -> Found:
    inputs = trl_inputs(b, b["advantage"])
    new, entropy = b["new"].clone().requires_grad_(), b["entropy"].clone().requires_grad_()

    def loss(kind: str, **settings: Any) -> torch.Tensor:
        found: torch.Tensor = GRPOTrainer._compute_loss(stub(b, new, entropy, loss_type=kind, **settings), None, inputs)
        return found

    for kind in ("grpo", "bnpo", "dapo", "dr_grpo", "sapo"):
        yield from graded(f"trl {kind}", loss(kind), new)
    yield from graded("trl grpo delta", loss("grpo", args={"delta": DUAL}), new)
    yield from graded("trl cispo", loss("cispo", epsilon_high=1.5), new)
    sequence = {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.08}
    yield from graded("trl tis", loss("dapo", use_vllm=True), new)
    yield from graded("trl kl", loss("dapo", beta=0.1), new)
    bonus = loss("dapo", _entropy_bonus_enabled=True, entropy_coef=0.05)
    yield from graded("trl entropy", bonus, entropy)
    inputs["advantages"] = b["row_advantage"][:, 0]
    yield from graded("trl gspo", loss("grpo", **sequence), new)
    yield from graded("trl luspo", loss("luspo", **sequence), new)


def trl_steps(b: dict[str, torch.Tensor]) -> Found:
    """From the rewards of a batch to the loss, by TRL's own advantages, std and `_compute_loss`, with its defaults."""
    score, group = b["token_reward"].sum(1), b["group"]
    centred, std = torch.zeros_like(score), torch.zeros_like(score)
    for number in group.unique():
        mine = group == number
        centred[mine] = score[mine] - score[mine].mean()
        if mine.sum() > 1:
            std[mine] = nanstd(score[mine][None], dim=1)
    new = b["new"].clone().requires_grad_()
    for kind, high, advantage in (
        ("grpo", 0.2, centred / (std + 1e-4)), ("dapo", 0.28, centred / (std + 1e-4)), ("dr_grpo", 0.2, centred),
    ):  # fmt: skip
        trainer = stub(b, new, b["entropy"], loss_type=kind, epsilon_low=0.2, epsilon_high=high)
        yield from graded(f"whole trl {kind}", GRPOTrainer._compute_loss(trainer, None, trl_inputs(b, advantage)), new)


def trl_advantages(b: dict[str, torch.Tensor]) -> Found:
    """TRL takes them inside of a method that generates: its formula, with its own std, on groups of one size."""
    score = b["even_score"]  # [prompts, generations]
    lone = score.shape[1] == 1
    std = torch.zeros_like(score[:, :1]) if lone else nanstd(score, dim=1)[:, None]
    centred = score - score.mean(1, keepdim=True)
    yield "trl advantage grpo/value", centred / (std + 1e-4)
    yield "trl advantage dr_grpo/value", centred
    others = score if lone else (score.sum(1, keepdim=True) - score) / (score.shape[1] - 1)
    yield "trl advantage rloo/value", score - others
    punish = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=8)
    yield "trl soft overlong/value", torch.tensor(punish([[0] * length for length in range(26)]), dtype=torch.float64)


def main(source: str, target: str) -> None:
    torch.set_num_threads(1)
    found: dict[str, np.ndarray] = {}
    with np.load(source) as arrays:
        for seed in sorted({name.split("/")[0] for name in arrays}):
            batch = {n.split("/")[1]: torch.from_numpy(arrays[n]) for n in arrays if n.startswith(f"{seed}/")}
            for make in (verl_losses, verl_advantages, trl_losses, trl_advantages, trl_steps, whole_steps):
                copies = {name: tensor.clone() for name, tensor in batch.items()}
                for name, value in make(copies):
                    assert f"{seed}/{name}" not in found, name
                    found[f"{seed}/{name}"] = value.detach().numpy()
    np.savez(target, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
