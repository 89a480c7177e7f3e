"""TRL's side of `bench.trainer_gpu`: `python trainer_gpu_trl.py JOB.json OUT.json` times steps of its SFTTrainer.

A supervised step has a model's forward and backward pass and an optimizer's, as a step of reinforcement learning has,
and a cheaper loss. TRL packs rows without padding, checkpoints activations where the case does, and has Liger's kernels
where they are installed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ended: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ended.append(time.perf_counter())


def main(job: dict[str, Any]) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    liger = on_gpu and importlib.util.find_spec("liger_kernel") is not None
    config = Qwen3Config(tie_word_embeddings=True, **job["shape"], max_position_embeddings=job["pack"])
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = Qwen3ForCausalLM(config)
    if on_gpu and job["lora"]:
        model = model.to(torch.bfloat16)
    settings = SFTConfig(
        output_dir=job["folder"],
        max_steps=job["steps"],
        per_device_train_batch_size=1,
        gradient_accumulation_steps=job["packs"],
        max_length=job["pack"],
        packing=True,
        gradient_checkpointing=job["recompute"],
        use_liger_kernel=liger,
        bf16=on_gpu,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        dataloader_num_workers=0,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<end>": 0, "<pad>": 1})), eos_token="<end>", pad_token="<pad>"
    )
    rows = torch.Generator().manual_seed(0)
    data = Dataset.from_list(
        [
            {"input_ids": torch.randint(2, config.vocab_size, (length,), generator=rows).tolist()}
            for length in job["lengths"]
        ]
    )
    clock = Clock()
    peft = LoraConfig(r=job["lora"], target_modules="all-linear") if job["lora"] else None
    trainer = SFTTrainer(
        model=model, args=settings, train_dataset=data, processing_class=tokenizer, peft_config=peft, callbacks=[clock]
    )
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    tokens = sum(len(row["input_ids"]) for row in trainer.train_dataset) / len(trainer.train_dataset) * job["packs"]
    return {"ended": clock.ended, "tokens": tokens, "peak": peak, "liger": liger}


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as temporary:
        Path(sys.argv[2]).write_text(json.dumps(main({**given, "folder": temporary})))
