"""vLLM as a part of `model_families`: a family on a real server, with the weights of three versions one after another.

Weights come as in a run: published by a trainer's store, pulled, written in place and proven by their probe.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from drawn_from import Setting, drawn_from
from model_families import VOCABULARY, Outcome, build, refused
from rillflow.config.policy import EngineConfig, ServerConfig
from rillflow.engine.servers.vllm import VllmEngine
from rillflow.engine.servers.weights import model_facts
from rillflow.errors import ConfigError, EngineLost
from rillflow.types import GenerateRequest, Probe, Sampling
from rillflow.weights.probe import FP32, prompts
from rillflow.weights.pull import Puller
from rillflow.weights.refresh import Refresher
from rillflow.weights.store import FolderStore
from rillflow.weights.transport.sources import FolderSource

CONTEXT = 64
# Temperature, top_p and top_k. The last draws from another distribution than the model's own.
SETTINGS: list[Setting] = [(0.0, 1.0, 0), (1.0, 1.0, 0), (1.3, 1.0, 20)]


async def serve(family: str, folder: Path, python: str) -> Outcome:
    """Start a server for the family, and compare log-probs of each version with the model's own forward pass."""
    first, second = (build(family, wide=True, seed=seed) for seed in (0, 1))
    first.save_pretrained(folder / "model")
    server = ServerConfig(python=python)
    settings = EngineConfig(kind="vllm", slots=8, context=CONTEXT, device="cpu", server=server)
    engine = VllmEngine(model_facts(str(folder / "model"), "fp32"), settings, logs=folder)
    try:
        await engine.start()
    except (ConfigError, EngineLost) as error:
        return refused(error)
    try:
        store = FolderStore(folder / "weights", deltas=True)
        refresher = Refresher("p", engine, Puller(FolderSource(folder / "weights")), doubts=True)
        for version, model in enumerate((first, second, _nudged(second))):
            store.publish(model.state_dict(), version, version - 1 if version else None, _probe(model))
            await refresher.refresh()
            if version == 0 and "is not served" in refresher.trouble:
                return Outcome("refused", _refusal(refresher.trouble))
            assert (engine.version, engine.proven) == (version, True), refresher.trouble
            await asyncio.gather(*(_compare(engine, model, how) for how in SETTINGS))
        assert [transfer.kind for transfer in refresher.transfers.last] == ["full", "delta"]
    finally:
        await engine.close()
    return Outcome("exact")


def _refusal(trouble: str) -> str:
    """Return why a version is not served, without the measured numbers."""
    return trouble.partition("not loaded: ")[2].partition(": its log-probs")[0]


def _nudged(model: PreTrainedModel) -> PreTrainedModel:
    """Change a few weights of each tensor."""
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        flat = parameter.data.view(-1)
        index_K = torch.randperm(len(flat), generator=generator)[: 1 + len(flat) // 50]
        flat[index_K] += 0.2 * torch.randn(len(index_K), generator=generator)
    return model


@torch.no_grad()
def _probe(model: PreTrainedModel) -> Probe:
    asked = prompts(VOCABULARY, CONTEXT)
    ids_RT = torch.tensor(asked)
    logprob_RTV = model(input_ids=ids_RT, use_cache=False).logits[:, :-1].log_softmax(-1)
    logprobs = logprob_RTV.gather(-1, ids_RT[:, 1:, None])[:, :, 0].tolist()
    return Probe(prompts=asked, logprobs=logprobs, tolerance=FP32)


async def _compare(engine: VllmEngine, model: PreTrainedModel, how: Setting) -> None:
    """Ask for two answers that grow past the window, and compare both log-probs of all their tokens."""
    rng = np.random.default_rng(1)
    temperature, top_p, top_k = how
    sampling = Sampling(max_tokens=12, temperature=temperature, top_p=top_p, top_k=top_k)
    for length in (13, 5):
        prompt = rng.integers(3, VOCABULARY, length).tolist()
        request = GenerateRequest(id="r", tokens=prompt, sampling=sampling)
        chunks = [chunk async for chunk in engine.generate(request)]
        tokens = [token for chunk in chunks for token in chunk.tokens]
        with torch.no_grad():
            ids_T = torch.tensor([*prompt, *tokens])
            logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, length - 1 : -1]
        for kind, logprob_TV in (
            ("logprobs", drawn_from(logits_TV, *how)),
            ("raw_logprobs", logits_TV.log_softmax(-1)),
        ):
            found_T = torch.tensor([value for chunk in chunks for value in getattr(chunk, kind)])
            own_T = logprob_TV.gather(1, ids_T[length:, None])[:, 0]
            torch.testing.assert_close(found_T, own_T, rtol=5e-5, atol=2e-4, msg=partial("{} {}: {}".format, how, kind))
