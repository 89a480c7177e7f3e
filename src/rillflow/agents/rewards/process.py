"""A process reward model at work beside the episodes: how good each step towards an answer is.

It reads the folder that `rillflow fit` (task process_reward) leaves, and gives the very numbers that
`trainer.supervised.reward_model.RewardModel.score_steps` gives; a test compares them. One model serves a process, and
rows that come while it computes share the next forward pass. A model that fails or takes too long is a RewardError:
no reward, never 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from rillflow.errors import ConfigError, RewardError
from rillflow.gateway.trees.messages import Message, message
from rillflow.gateway.trees.render import Renderer
from rillflow.weights.model_folder import process_facts_of
from rillflow.weights.models import load_scalar_model, load_tokenizer, pick_device

MOST_WAITING = 4096  # rows
_BATCH_TOKENS = 16_384  # of one forward pass, padding counted


@dataclass(frozen=True, slots=True)
class _Row:
    """Tokens and the places at which steps end."""

    tokens: list[int]
    ends: list[int]
    done: asyncio.Future[list[float]]


class ProcessReward:
    """Use `shared`. `score` belongs to one event loop; the forward passes run in a thread of their own."""

    def __init__(self, folder: str, *, device: str = "auto") -> None:
        self._device = pick_device(device)
        self._facts = process_facts_of(folder)
        model, new = load_scalar_model(folder, "fp32", self._device)
        self._model: Any = model
        self._tokenizer: Any = load_tokenizer(folder)
        if new:
            raise ConfigError(f"{folder} has no head that scores", "make one: `rillflow fit` with task process_reward")
        self._longest = int(self._model.config.max_position_embeddings)
        self._thread = ThreadPoolExecutor(1, "process-reward")
        self._waiting: list[_Row] = []
        self._draining: asyncio.Task[None] | None = None

    @staticmethod
    @cache
    def shared(folder: str) -> ProcessReward:
        """Loaded when it is asked for first."""
        return ProcessReward(str(Path(folder).expanduser()))

    async def score(self, rows: Sequence[Mapping[str, Any]], seconds: float) -> list[list[float]]:
        """For each row how good each of its `steps` is, on the scale of the labels. A row has its question as text
        (`prompt`) or as `messages`, and its steps likewise (`text`, `messages`)."""
        if len(self._waiting) + len(rows) > MOST_WAITING:
            raise RewardError(f"{len(self._waiting)} rows wait for the process reward model", "lower rollout.episodes")
        loop = asyncio.get_running_loop()
        mine = [self._encode(row, loop.create_future()) for row in rows]
        self._waiting += mine
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._drain(), name="process-reward")
        try:
            async with asyncio.timeout(seconds):
                return [await row.done for row in mine]
        except TimeoutError:
            raise RewardError(
                f"the process reward model took longer than {seconds:.3g} s", "raise options.process_reward.seconds"
            ) from None

    def _encode(self, row: Mapping[str, Any], done: asyncio.Future[list[float]]) -> _Row:
        begun, *pieces = self._conversation(row) if "messages" in row else self._texts(row)
        tokens, ends = self._ids(begun, opening="messages" not in row), list[int]()
        for piece in pieces:
            tokens = tokens + self._ids(piece)
            ends.append(len(tokens) - 1)
        if len(tokens) > self._longest:
            raise RewardError(
                f"an episode has {len(tokens)} tokens and the process reward model reads {self._longest}",
                "lower options.max_steps or options.longest, or train a model that reads more",
            )
        return _Row(tokens, ends, done)

    def _texts(self, row: Mapping[str, Any]) -> list[str]:
        return [row["prompt"], *(f"{step['text']}{self._facts.separator}" for step in row["steps"])]

    def _conversation(self, row: Mapping[str, Any]) -> list[str]:
        """Return what the chat template writes for the question, and for each step behind it."""
        told = _messages(row)
        texts = [self._renderer.text(told, None, prompt=False)]
        for step in row["steps"]:
            told = told + _messages(step)
            texts.append(self._renderer.text(told, None, prompt=False))
        return [texts[0], *(later[len(text) :] for text, later in pairwise(texts))]

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self._tokenizer)

    def _ids(self, text: str, *, opening: bool = False) -> list[int]:
        ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        bos = self._tokenizer.bos_token_id
        adds = opening and bos is not None and self._tokenizer.encode("", add_special_tokens=True)[:1] == [bos]
        return [bos, *ids] if adds and not text.startswith(self._tokenizer.bos_token) else ids

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        while group := self._next_group():
            try:
                scores = await loop.run_in_executor(self._thread, self._forward, group)
            except Exception as error:
                for row in group:
                    if not row.done.done():
                        row.done.set_exception(RewardError(f"the process reward model failed: {error}"))
                continue
            for row, found in zip(group, scores, strict=True):
                if not row.done.done():
                    row.done.set_result(found)

    def _next_group(self) -> list[_Row]:
        self._waiting = [row for row in self._waiting if not row.done.done()]  # the callers of the others have gone
        longest = count = 0
        for row in self._waiting:
            longest = max(longest, len(row.tokens))
            if count and longest * (count + 1) > _BATCH_TOKENS:
                break
            count += 1
        group, self._waiting = self._waiting[:count], self._waiting[count:]
        return group

    def _forward(self, rows: Sequence[_Row]) -> list[list[float]]:
        """Rows are padded on the right, where a causal model does not see it."""
        longest = max(len(row.tokens) for row in rows)
        ids = torch.zeros((len(rows), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : len(row.tokens)] = torch.tensor(row.tokens)
            mask[place, : len(row.tokens)] = 1
        with torch.inference_mode():
            states = self._model.base_model(
                input_ids=ids.to(self._device), attention_mask=mask.to(self._device), use_cache=False
            ).last_hidden_state
            score_BT = self._model.score(states).squeeze(-1).float()
            if self._facts.loss == "bce":
                score_BT = score_BT.sigmoid()
        return [score_BT[place, row.ends].tolist() for place, row in enumerate(rows)]


def _messages(said: Mapping[str, Any]) -> list[Message]:
    return [message(one["role"], one["content"]) for one in said["messages"]]
