"""Texts of tokens, one for each."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from rillflow.config import load_recipe
from rillflow.errors import DataError
from rillflow.observe.trajectories import token_texts
from rillflow.runtime.folder import RunFolder
from rillflow.weights.model_folder import model_folder


def test_tokens_add_up_to_the_text_and_none_has_half_a_character(tmp_path: Path) -> None:
    text = "<|im_start|>user\nHow many gnøms? 😀<|im_end|>"
    tokens = Tokenizer.from_file(str(model_folder("tiny") / "tokenizer.json")).encode(text).ids
    folder = RunFolder.create(load_recipe("quickstart"), tmp_path)
    texts = token_texts(folder.root, "agent", tokens)
    assert len(texts) == len(tokens)
    assert "".join(texts) == text
    assert "�" not in "".join(texts)
    with pytest.raises(DataError, match="no policy"):
        token_texts(folder.root, "nobody", tokens)
