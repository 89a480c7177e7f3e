"""The vLLM side of `bench.engine`, run under vLLM's own Python: `python engine_vllm.py FOLDER`.

Reads FOLDER/job.json (model, context, threads, cases of prompts and lengths; the first of each case warms up), writes
FOLDER/rates.json: the median tokens per second of each case. Offline `LLM.generate`, prefix caching on (its default),
completion lengths forced by `min_tokens` and `ignore_eos`, the log-prob of the sampled token recorded. Requests have no
seeds of their own: vLLM's CPU build fails on them, and without them it samples the whole batch at once.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any


def rate(llm: Any, work: list[Any]) -> float:
    from vllm import SamplingParams

    prompts, lengths = work
    settings = [
        SamplingParams(temperature=1.0, max_tokens=n, min_tokens=n, ignore_eos=True, logprobs=0, detokenize=False)
        for n in lengths
    ]
    began = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], settings, use_tqdm=False)
    seconds = time.perf_counter() - began
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    if counts != lengths:
        raise RuntimeError(f"asked for {sum(lengths)} tokens, got {sum(counts)}")
    return sum(counts) / seconds


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    os.environ["OMP_NUM_THREADS"] = str(job["threads"])
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM

    llm = LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=job["context"],
        max_num_seqs=256,
    )
    rates = {}
    for name, works in job["cases"].items():
        rate(llm, works[0])
        rates[name] = statistics.median(rate(llm, work) for work in works[1:])
        (folder / "rates.json").write_text(json.dumps(rates))  # after each case: a later one may fail


if __name__ == "__main__":
    main(Path(sys.argv[1]))
