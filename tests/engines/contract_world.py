"""A real server, the weights of every version that it was given, and what its answers are compared with."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch

from conftest import build_model
from rillflow.config.policy import EngineConfig, ServerConfig
from rillflow.contracts import Change, Patch
from rillflow.engine.servers import ServerEngine
from rillflow.types import Chunk, GenerateRequest, Probe, Sampling
from rillflow.weights.fingerprint import fingerprint
from rillflow.weights.probe import FP32, prompts

CONTEXT = 320
ASKED = prompts(734, CONTEXT)


@torch.no_grad()
def probe_of(model: Any) -> Probe:
    ids_RT = torch.tensor(ASKED)
    logprob_RTV = model(ids_RT).logits[:, :-1].log_softmax(-1)
    logprobs = logprob_RTV.gather(-1, ids_RT[:, 1:, None])[:, :, 0].tolist()
    return Probe(prompts=ASKED, logprobs=logprobs, tolerance=FP32)


class World(ABC):
    """A server, and the weights of every version that it was given. Each of them had to prove right.

    `arguments` give the server defaults that would change the distribution. No answer may show them.
    """

    kind: str
    arguments: ClassVar[list[str]]
    on_update: ClassVar[Literal["refill", "keep"]] = "refill"

    def __init__(self, folder: Path, python: str, *, tied: bool) -> None:
        self.folder = folder
        self.tied = tied
        self.model = build_model(folder / "model", tied=tied, seed=1)
        server = ServerConfig(python=python, arguments=self.arguments, decodes_deltas=True)  # also on a CPU
        self.settings = EngineConfig(
            kind=self.kind, slots=32, context=CONTEXT, device="cpu", server=server, on_update=self.on_update
        )
        self.engine: Any = self.make(self.settings)
        self.models = {0: copy.deepcopy(self.model)}
        self.version = 0

    @abstractmethod
    def make(self, settings: EngineConfig) -> ServerEngine: ...

    async def start(self) -> None:
        await self.engine.start()
        self.engine.doubt()
        await self.engine.prove(probe_of(self.model))

    @abstractmethod
    async def write(self, paths: list[str]) -> None:
        """Changes of weights go into the server past the engine."""

    @abstractmethod
    def running(self) -> ServerConfig:
        """How the server is named to an engine that did not start it."""

    def changed(self, share: float) -> Patch:
        """Change that share of the model's weights; what changes."""
        generator = torch.Generator().manual_seed(self.version)
        changes, fingerprints = {}, {}
        for name, parameter in self.model.named_parameters():
            flat = parameter.data.view(-1)
            index_K = torch.randperm(len(flat), generator=generator)[: max(1, int(len(flat) * share))].sort().values
            flat[index_K] += torch.randn(len(index_K), generator=generator) * 0.1
            changes[name] = Change(None if share == 1.0 else index_K, flat[index_K].clone())
            fingerprints[name] = fingerprint(parameter.data)
        return Patch(self.version, changes, fingerprints)

    def _next(self) -> int:
        self.version += 1
        self.models[self.version] = copy.deepcopy(self.model)
        return self.version

    async def load(self) -> None:
        self.changed(1.0)
        await self.engine.load(self.model.state_dict(), self._next(), probe_of(self.model))

    async def patch(self, share: float = 0.02) -> None:
        patch = self.changed(share)
        await self.engine.patch(patch, self._next(), probe_of(self.model))

    async def reload(self) -> None:
        await self.engine.load(self.model.state_dict(), self.version, probe_of(self.model))


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 734, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(tokens: list[int], **sampling: Any) -> GenerateRequest:
    return GenerateRequest(id="r", tokens=tokens, sampling=Sampling(**({"max_tokens": 20} | sampling)))


async def ask(engine: ServerEngine, tokens: list[int], **sampling: Any) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request(tokens, **sampling))]


def tokens(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


def logprobs(chunks: list[Chunk], kind: str = "logprobs") -> list[float]:
    return [value for chunk in chunks for value in getattr(chunk, kind)]


def versions(chunks: list[Chunk]) -> list[int]:
    return [chunk.version for chunk in chunks for _ in chunk.tokens]


@torch.no_grad()
def logits(model: Any, asked: list[int], answer: list[int]) -> torch.Tensor:
    return model(torch.tensor([asked + answer])).logits[0, len(asked) - 1 : -1]


def plain(model: Any, asked: list[int], answer: list[int], temperature: float = 1.0) -> list[float]:
    rows = (logits(model, asked, answer) / temperature).log_softmax(-1)
    return rows.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()


def check(world: World, asked: list[int], chunks: list[Chunk]) -> None:
    """Every token's log-prob is that of the version it claims."""
    answer, found, claimed = tokens(chunks), logprobs(chunks), versions(chunks)
    for version in set(claimed):
        expected = plain(world.models[version], asked, answer)
        mine = [place for place, other in enumerate(claimed) if other == version]
        assert [found[place] for place in mine] == pytest.approx([expected[place] for place in mine], abs=2e-4)


# Tied embeddings matter for weights, not after the logits: such tests use one server only.
untied = pytest.mark.parametrize("world", ["untied"], indirect=True)
