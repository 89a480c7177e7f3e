"""TRL's side of `bench.async_gpu`: `python async_gpu_trl.py FOLDER` reads FOLDER/job.json, writes FOLDER/trl.json.

GRPOTrainer with vLLM in its process (`colocate`), whose settings are ours wherever both have them.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rillflow.examples.addition import prompts, reward


class Clock(TrainerCallback):
    """When each step ended, and what its samples got."""

    def __init__(self) -> None:
        self.ended: list[float] = []
        self.reward: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self.ended.append(time.time())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **options: Any) -> None:
        if logs and "reward" in logs:
            self.reward.append(logs["reward"])


def right(completions: list[Any], total: list[int], **columns: Any) -> list[float]:
    return [reward({"sum": value}, turn[0]["content"]) for turn, value in zip(completions, total, strict=True)]


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    rows = [row["payload"] for row in prompts("train", job["steps"] * job["batch"] // job["group"], job["seed"])]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["question"]}], "total": row["sum"]} for row in rows]
    )
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=job["steps"],
        per_device_train_batch_size=job["batch"],
        gradient_accumulation_steps=1,
        num_generations=job["group"],
        max_completion_length=64,
        temperature=1.0,
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="grpo",
        bf16=True,
        gradient_checkpointing=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.25,
        vllm_max_model_length=192,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=job["seed"],
    )
    clock = Clock()
    trainer = GRPOTrainer(model=job["model"], reward_funcs=right, args=settings, train_dataset=data, callbacks=[clock])
    trainer.train()
    (folder / "trl.json").write_text(json.dumps({"ended": clock.ended, "reward": clock.reward}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
