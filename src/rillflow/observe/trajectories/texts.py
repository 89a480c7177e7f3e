"""Texts of tokens, by a policy's own tokenizer, for people to read: never to be tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from rillflow.errors import DataError
from rillflow.weights.model_folder import model_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FILE = "tokenizer.json"


def token_texts(run: str | Path, policy: str, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds to those before it. A token that ends inside a character adds nothing, and
    the one that completes it adds the whole character. DataError where the tokenizer is not on this machine."""
    from tokenizers.decoders import DecodeStream

    tokenizer, stream = _tokenizer(_model(Path(run), policy)), DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in tokens]


def _model(run: Path, policy: str) -> str:
    try:
        recipe = yaml.safe_load((run / "recipe.yaml").read_text())
        return str(recipe["policies"][policy]["model"])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise DataError(f"{run} has no policy {policy!r:.80}", "its recipe.yaml names the policies") from error


@lru_cache(8)
def _tokenizer(model: str) -> Tokenizer:
    from tokenizers import Tokenizer

    path = model_folder(model) / _FILE
    if not path.is_file():
        raise DataError(f"the tokenizer of {model} is not on this machine", f"{path} does not exist")
    return Tokenizer.from_file(str(path))
