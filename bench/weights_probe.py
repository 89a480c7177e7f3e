"""What it costs that weights prove themselves: the probe's seconds, on both sides, beside those of an update.

A version's probe costs the trainer one small forward, and each engine one small prefill after its update. Measured are
the trainer's probe; the engine's update without a probe, whole and as a patch of 1 % of the weights; and the probe
alone, which is what it adds while no token is sampled. The last rows say how far the engine's log-probs are from the
trainer's, as a share of their spread, with the tolerance as the limit, and how far those of a version are from the
next one's, where every weight has moved by a 500th of its tensor's standard deviation.

The model is a small random one, or any that `--model` names (a folder, a .gguf file); the engine is the embedded one,
or vLLM's or SGLang's, of the Python that `--python` names.

`python -m bench.weights_probe [--model FOLDER] [--engine vllm --python PYTHON] [--dtype bf16] [--quick] [--json FILE]`
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.common import Report, parser
from rillflow.config import PolicyConfig
from rillflow.contracts import Change, Engine, Patch
from rillflow.engine.build import build_engine
from rillflow.trainer.graph.worker import Prober
from rillflow.trainer.learner import Learner
from rillflow.trainer.parallel import Alone
from rillflow.trainer.roles import Roles
from rillflow.types import Probe
from rillflow.weights import probe as probing
from rillflow.weights.fingerprint import fingerprint
from rillflow.weights.models import DTYPES, SUFFIX, model_from_gguf, pick_device

Weights = dict[str, torch.Tensor]
STEP = 1 / 500  # of a tensor's standard deviation, by which a version differs from the one before
SHARE = 0.01  # of the weights, in a patch


def random_model(folder: Path, quick: bool) -> str:
    torch.manual_seed(0)
    width, layers = (128, 4) if quick else (512, 8)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def model_of(given: str | None, folder: Path, quick: bool) -> str:
    if given is None:
        return random_model(folder, quick)
    return str(model_from_gguf(Path(given))) if given.endswith(SUFFIX) else given


class Trainer:
    """A policy's model as its trainer has it, without batches: versions are made of noise."""

    def __init__(self, settings: PolicyConfig) -> None:
        device = pick_device(settings.trainer.device)
        self.actor: Learner = Roles(settings, Alone(), device, 0, False).actor()
        self.probe = Prober(self.actor, settings)
        self._dtype = DTYPES[settings.engine.dtype]
        self._noise = torch.Generator().manual_seed(1)

    def weights(self) -> Weights:
        """Return copies of the weights. Names of one tensor share its copy: the model ties them."""
        assert self.actor.optimizer is not None
        given = self.actor.optimizer.weights(self._dtype)
        copies = {tensor.data_ptr(): tensor.cpu().clone() for tensor in given.values()}
        return {name: copies[tensor.data_ptr()] for name, tensor in given.items()}

    def step(self) -> None:
        optimizer = self.actor.optimizer
        assert optimizer is not None
        moved = {}
        for name, tensor in optimizer.masters().items():
            noise = torch.randn(tensor.shape, generator=self._noise).to(tensor.device)
            moved[name] = tensor + STEP * float(tensor.std(correction=0)) * noise
        optimizer.restore(moved, optimizer.moments(), optimizer.steps)


def patch_of(weights: Weights) -> Patch:
    """A share of all weights, which stay what they are: it is written and verified like any other."""
    changes, sums = {}, {}
    for name, tensor in weights.items():
        index_K = torch.arange(0, tensor.numel(), int(1 / SHARE))
        changes[name] = Change(index_K, tensor.view(-1)[index_K])
        sums[name] = fingerprint(tensor)
    return Patch(0, changes, sums)


async def seconds(step: Callable[[], Awaitable[None]], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        await step()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


class Cost:
    """One engine that is given one version again and again."""

    def __init__(self, engine: Engine, weights: Weights, probe: Probe) -> None:
        self._engine, self._weights, self._probe = engine, weights, probe
        self._patch = patch_of(weights)

    async def load(self) -> None:
        await self._engine.load(self._weights, self._engine.version + 1)

    async def patch(self) -> None:
        version = self._engine.version
        await self._engine.patch(self._patch._replace(base=version), version + 1)

    async def prove(self) -> None:
        await self._engine.prove(self._probe)


async def scores(engine: Any, probe: Probe) -> list[list[float]]:
    """The engine's own log-probs, however it makes them."""
    if hasattr(engine, "scores"):
        found: list[list[float]] = await engine.scores(probe.prompts, engine.version)
        return found
    own: list[list[float]] = engine._core.scores(probe.prompts)
    return own


async def measure(settings: PolicyConfig, report: Report, repeats: int) -> None:
    trainer, engine = Trainer(settings), build_engine(settings, exact=False)
    await engine.start()
    try:
        first = trainer.probe()
        trainer.step()
        second, weights = trainer.probe(), trainer.weights()
        assert first is not None
        assert second is not None
        made = [_timed(trainer.probe) for _ in range(repeats)]
        cost = Cost(engine, weights, second)
        for step in (cost.load, cost.patch):  # the first time of everything takes longer
            await step()
        # Not refused here: how far they are apart is what this is to tell.
        apart = probing.distance(second, await scores(engine, second))
        whole, patch = await seconds(cost.load, repeats), await seconds(cost.patch, repeats)
        proof = await seconds(cost.prove, repeats) if apart <= second.tolerance else float("nan")
        size = sum(tensor.nbytes for tensor in weights.values()) / 1e6
        why = f"{size:.0f} MB"
        report.add("trainer: probe", statistics.median(made), None, unit="s", reason=why)
        report.add("engine: probe", proof, None, unit="s", reason=why)
        report.add("engine: whole update without it", whole, None, unit="s", reason=why)
        report.add("engine: patch of 1 % without it", patch, None, unit="s", reason=why)
        report.add("probe's share of a whole update", proof / (whole + proof), None, unit="", reason=why)
        report.add("probe's share of a patch", proof / (patch + proof), None, unit="", reason=why)
        report.add("engine's log-probs apart", apart, None, unit="of spread", limit=second.tolerance)
        between = probing.distance(second, first.logprobs)
        report.add("two versions' log-probs apart", between, None, unit="of spread", reason="beside it")
    finally:
        await engine.close()


def _timed(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--model", help="a folder or file that a recipe could name; default: a small random one")
    arguments.add_argument("--engine", choices=["embedded", "vllm", "sglang"], default="embedded")
    arguments.add_argument("--python", default="python3", help="the interpreter that has vLLM or SGLang")
    arguments.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of trainer and engine")
    arguments.add_argument("--device", default="auto")
    given = arguments.parse_args()
    report = Report("weights_probe")
    with tempfile.TemporaryDirectory() as folder:
        engine: dict[str, Any] = {"kind": given.engine, "dtype": given.dtype, "device": given.device}
        if given.engine != "embedded":
            engine["server"] = {"python": given.python}
        settings = PolicyConfig.model_validate(
            {
                "model": model_of(given.model, Path(folder), given.quick),
                "engine": engine,
                "trainer": {"dtype": given.dtype, "device": given.device},
            }
        )
        asyncio.run(measure(settings, report, 3 if given.quick else 9))
    report.finish(given.json)


if __name__ == "__main__":
    main()
