"""The embedded engine against `transformers.generate` and, when its Python is given, vLLM's CPU build.

All sides get the same model, prompts, completion lengths and number of threads, sample at temperature 1 and record
the log-prob of every token. Groups of 8 sequences share a prompt of 40 tokens, as rollouts do. Unit: useful tokens
per second, prompts included in the time.

* equal: every completion has 48 tokens. No scheduling can help; this compares the steps themselves.
* mixed: long-tailed lengths from 8 to 128, mean about a quarter of the longest. `generate` runs its static batch to
  the longest completion, and the tokens past a sequence's own length are not counted.

`generate` gets its cheapest way: no end token to look for (so no processor forces the lengths), no top-k (its
default), `output_logits` keeping references to logits it computed anyway, and log-probs taken from those afterwards by
one logsumexp and one gather per step. vLLM runs in processes of its own, before the interleaved runs of the other two.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.common import Report, interleave, parser
from rillflow.engine.embedded import EmbeddedEngine
from rillflow.types import GenerateRequest, Sampling

GROUP, PROMPT, CONTEXT, VOCABULARY = 8, 40, 256, 1024
SIZES = (8, 64, 256)
GOALS = {"equal": 1.0, "mixed": 2.0}


class Work(NamedTuple):
    prompts: list[list[int]]
    lengths: list[int]


def make_model(device: str) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).to(device).eval()


def make_work(case: str, size: int, repeat: int) -> Work:
    """Prompts differ from repeat to repeat, so that nothing is left over from the one before."""
    rng = random.Random(f"{case} {size} {repeat}")
    shared = [[rng.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(size // GROUP)]
    prompts = [shared[index // GROUP] for index in range(size)]
    lengths = [48] * size if case == "equal" else mixed_lengths(size)
    rng.shuffle(lengths)
    return Work(prompts, lengths)


def mixed_lengths(size: int) -> list[int]:
    """Quantiles of an exponential from 8 to 128; the longest is always there, it is what a static batch waits for."""
    tail = [min(128, 8 + int(-22 * math.log(1 - (index + 0.5) / size))) for index in range(size)]
    return [*tail[:-1], 128]


async def _ours(engine: EmbeddedEngine, work: Work) -> float:
    async def one(index: int) -> int:
        sampling = Sampling(max_tokens=work.lengths[index], seed=index)
        request = GenerateRequest(id=str(index), tokens=work.prompts[index], sampling=sampling)
        return sum([len(chunk.logprobs) async for chunk in engine.generate(request)])

    began = time.perf_counter()
    counts = await asyncio.gather(*[one(index) for index in range(len(work.lengths))])
    seconds = time.perf_counter() - began
    assert list(counts) == work.lengths
    return sum(counts) / seconds


def _theirs(model: Any, work: Work) -> float:
    began = time.perf_counter()
    prompt = torch.tensor(work.prompts, device=model.device)
    longest = max(work.lengths)
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=longest,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = output.sequences[:, PROMPT:]
        for step, logits in enumerate(output.logits):
            logits.gather(1, new[:, step : step + 1])[:, 0] - logits.logsumexp(-1)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    assert new.shape[1] == longest
    return sum(work.lengths) / seconds


def compare(case: str, size: int, repeats: int, device: str) -> list[float]:
    """Median tokens per second of both, after one run of each to warm up."""
    model = make_model(device)
    with asyncio.Runner() as runner:
        engine = EmbeddedEngine(make_model(device), slots=size, context=CONTEXT)
        runner.run(engine.start())

        def ours(repeat: int) -> float:
            return runner.run(_ours(engine, make_work(case, size, repeat)))

        def theirs(repeat: int) -> float:
            return _theirs(model, make_work(case, size, repeat))

        for side in (ours, theirs):
            side(-1)
        medians = interleave([ours, theirs], repeats)
        runner.run(engine.close())
    return medians


def vllm_rates(python: str | None, threads: int, repeats: int) -> tuple[dict[str, float], str]:
    """Run `engine_vllm.py` under vLLM's own Python on the same saved model and work; rates, or the reason of a
    failure."""
    if python is None:
        return {}, "vLLM not given: --vllm-python PATH"
    with tempfile.TemporaryDirectory() as folder:
        make_model("cpu").save_pretrained(Path(folder) / "model")
        cases = {
            f"{case} {size}": [make_work(case, size, repeat) for repeat in range(-1, repeats)]
            for case in GOALS
            for size in SIZES
        }
        job = {"model": str(Path(folder) / "model"), "context": CONTEXT, "threads": threads, "cases": cases}
        (Path(folder) / "job.json").write_text(json.dumps(job))
        script = Path(__file__).with_name("engine_vllm.py")
        # Without this folder on its path: transformers would take `kernels.py` for a package of that name.
        command = [python, "-P", str(script), folder]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
        found = Path(folder) / "rates.json"
        rates = json.loads(found.read_text()) if found.exists() else {}
        named = [line for line in ran.stderr.splitlines() if "Error" in line]
        return rates, f"vLLM failed: {named[-1] if named else ran.returncode}" if ran.returncode else ""


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--threads", type=int, default=1, help="torch threads, the same for all sides (default 1)")
    options.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options.add_argument("--vllm-python", metavar="PATH", help="a Python with vLLM's CPU build installed")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    repeats = 3 if arguments.quick else 7
    report = Report("engine")
    rates, reason = vllm_rates(arguments.vllm_python, arguments.threads, repeats)
    for case, goal in GOALS.items():
        for size in SIZES:
            ours, theirs = compare(case, size, repeats, arguments.device)
            name = f"{case}, {size} sequences"
            report.add(f"{name}, transformers", ours, theirs, unit="tokens/s", goal=goal)
            rate = rates.get(f"{case} {size}")
            report.add(f"{name}, vLLM", ours, rate, unit="tokens/s", reason=reason if rate is None else "")
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
