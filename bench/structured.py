"""What a schema costs the embedded engine: tokens per second with one and without, at the same lengths.

Every answer has 64 tokens after a prompt of 40. Under the schema it is a list of at least 64 words, so that the length
ends it; without it, no stop token is sampled. The peer of each row is the same engine without a grammar: a ratio of 1
is a grammar that costs nothing. `first` is the time to compile the schema, once, with the tokenizer's tree.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from bench.common import Report, parser
from rillflow.engine.embedded import EmbeddedEngine
from rillflow.gateway.grammars import of_schema
from rillflow.types import GenerateRequest, Grammar, Sampling
from rillflow.weights.models import load_policy_model, load_tokenizer, pick_device

LENGTH, PROMPT = 64, 40
SCHEMA = {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": LENGTH}


async def _answer(engine: EmbeddedEngine, tokens: list[int], seed: int, grammar: Grammar | None) -> int:
    sampling = Sampling(max_tokens=LENGTH, seed=seed, grammar=grammar)
    request = GenerateRequest(id=str(seed), tokens=tokens, sampling=sampling)
    return sum([len(chunk.tokens) async for chunk in engine.generate(request)])


async def _rate(engine: EmbeddedEngine, tokens: list[int], count: int, grammar: Grammar | None) -> float:
    began = time.perf_counter()
    made = await asyncio.gather(*(_answer(engine, tokens, seed, grammar) for seed in range(count)))
    if made != [LENGTH] * count:
        raise RuntimeError(f"answers of {sorted(set(made))} tokens, not {LENGTH}")
    return sum(made) / (time.perf_counter() - began)


async def _run(arguments: Any, report: Report) -> None:
    name = arguments.model
    model = load_policy_model(name, "fp32", pick_device(arguments.device))
    tokenizer = load_tokenizer(name)
    tokens = tokenizer.encode("A list of words: " * PROMPT, add_special_tokens=False)[:PROMPT]
    grammar = of_schema(SCHEMA, "schema")
    engine = EmbeddedEngine(model, slots=max(arguments.rows), context=256, tokenizer=partial(load_tokenizer, name))
    await engine.start()
    try:
        began = time.perf_counter()
        await _rate(engine, tokens, 1, grammar)
        first = time.perf_counter() - began
        again = LENGTH / await _rate(engine, tokens, 1, grammar)
        report.add("first use of a schema", first - again, None, unit="s", reason="paid once, in a thread")
        for rows in arguments.rows:
            ours, peer = [], []
            for _ in range(2 if arguments.quick else 5):
                peer.append(await _rate(engine, tokens, rows, None))
                ours.append(await _rate(engine, tokens, rows, grammar))
            report.add(f"{rows} rows", sorted(ours)[len(ours) // 2], sorted(peer)[len(peer) // 2], unit="tokens/s")
    finally:
        await engine.close()


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--model", default="tiny")
    made.add_argument("--device", default="cpu")
    made.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    arguments = made.parse_args()
    report = Report("structured")
    asyncio.run(_run(arguments, report))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
