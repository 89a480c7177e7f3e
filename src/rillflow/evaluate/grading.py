"""The reward of a benchmark's own answers, for evaluations and for recipes whose prompts are of several benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rillflow.agents.rewards.calling import Given, call
from rillflow.agents.rewards.registry import Reward, load_reward
from rillflow.config import RewardConfig
from rillflow.dataflow.sources.benchmarks import GYM, benchmark
from rillflow.errors import RewardError

KEY = "benchmark"


async def reward(payload: Mapping[str, Any], answer: Any) -> float:
    """Return the score of the answer by the benchmark that the payload names. RewardError if it names none."""
    name = payload.get(KEY) or (GYM if "source_dataset" in payload else None)
    if not isinstance(name, str):
        raise RewardError("the prompt names no benchmark", "give `data.*.benchmark`, or name another reward")
    return float(await call(_loaded(name), Given(dict(payload), answer)))


@lru_cache
def _loaded(name: str) -> Reward:
    found = benchmark(name)
    return load_reward([RewardConfig(name=found.reward, options=dict(found.options))])
