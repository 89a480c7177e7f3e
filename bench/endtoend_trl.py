"""TRL's side of `bench.endtoend`: `python -m bench.endtoend_trl FOLDER` reads FOLDER/job.json, writes
FOLDER/trl.json.

GRPOTrainer, whose settings are ours wherever both have them. Equal lengths and tools go through its own generation
(tools through `environment_factory`); limits that differ from prompt to prompt through `rollout_func`, in which
`generate` stops each row at its own.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, StoppingCriteria, StoppingCriteriaList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_schema

from bench import endtoend_task as task
from rillflow.examples import stockroom


class Clock(TrainerCallback):
    """When training began, when each step ended, and what its samples got."""

    def __init__(self) -> None:
        self.begun = 0.0
        self.ended: list[float] = []
        self.reward: list[float] = []
        self.length: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self.begun = time.time()

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self.ended.append(time.time())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **options: Any) -> None:
        if logs and "reward" in logs:
            self.reward.append(logs["reward"])
            self.length.append(logs["completions/mean_length"])


class Limits(StoppingCriteria):
    """Each row ends at its own length."""

    def __init__(self, prompt: int, limits: list[int]) -> None:
        self.ends = torch.tensor([prompt + limit for limit in limits])

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        return self.ends <= input_ids.shape[1]


def limited(limits: dict[str, int]) -> Any:
    """A `rollout_func` that stops each row at the limit of its question."""

    def roll_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        given = tokenizer.apply_chat_template(
            prompts,
            add_generation_prompt=True,
            padding=True,
            padding_side="left",
            return_tensors="pt",
            return_dict=True,
        )
        width = given["input_ids"].shape[1]
        ends = [limits[prompt[-1]["content"]] for prompt in prompts]
        with torch.inference_mode():
            made = trainer.model.generate(
                **given,
                generation_config=trainer.generation_config,
                max_new_tokens=max(ends),
                stopping_criteria=StoppingCriteriaList([Limits(width, ends)]),
            )
        last = tokenizer.eos_token_id
        rows = [cut(row[width : width + end].tolist(), last) for row, end in zip(made, ends, strict=True)]
        asked = [row[mask.bool()].tolist() for row, mask in zip(*given.values(), strict=True)]
        return {"prompt_ids": asked, "completion_ids": rows, "logprobs": None}

    return roll_out


def cut(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end) + 1] if end in ids else ids


class Stockroom:
    """The tool, with the stock of the question that is asked."""

    def reset(self, **row: Any) -> None:
        self._payload = json.loads(row["payload"])

    def count(self, box: str, item: str) -> str:
        """
        Count the pieces of one item in one box.

        Args:
            box: which box
            item: which item
        """
        return stockroom.count(self._payload, {"box": box, "item": item})


def rewards(case: str) -> Any:
    score = stockroom.reward if case == "tools" else task.reward

    def score_all(completions: list[Any], payload: list[str], **columns: Any) -> list[float]:
        pairs = zip(payload, completions, strict=True)
        return [score(json.loads(given), _answer(messages)) for given, messages in pairs]

    return score_all


def _answer(messages: list[Any]) -> str | None:
    """Return the policy's last message, without tool calls and tool results."""
    last = messages[-1]
    return None if last["role"] != "assistant" or last.get("tool_calls") else last.get("content")


def settings(job: dict[str, Any], folder: Path) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=job["steps"],
        per_device_train_batch_size=job["trl"]["rows"],
        gradient_accumulation_steps=job["batch"] // job["trl"]["rows"],
        num_generations=task.GROUP,
        max_completion_length=job["tokens"],
        temperature=1.0,
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        adam_epsilon=job["eps"],
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="grpo",
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        use_transformers_continuous_batching=job["trl"].get("continuous", False),
        max_tool_calling_iterations=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=job["seed"],
    )


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(job["trl"]["threads"])
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    chats = [[{"role": "user", "content": row["question"]}] for row in rows]
    data = Dataset.from_list([{"prompt": c, "payload": json.dumps(r)} for c, r in zip(chats, rows, strict=True)])
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    tokenizer.response_schema = qwen3_schema if job["case"] == "tools" else None
    own: dict[str, Any] = {}
    if job["case"] == "tails":
        own["rollout_func"] = limited({row["question"]: row["limit"] for row in rows})
    if job["case"] == "tools":
        own["environment_factory"] = Stockroom
    clock = Clock()
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=rewards(job["case"]),
        args=settings(job, folder),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[clock],
        **own,
    )
    trainer.train()
    trainer.save_model(str(folder / "theirs"))
    found = {"begun": clock.begun, "ended": clock.ended, "reward": clock.reward, "length": clock.length}
    (folder / "trl.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
