"""Encodes and decodes with the tokenizer of one policy, for any thread."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from rillflow.gateway.trees.tokenizer_process import encode_apart

_APART = 256 << 10  # most characters that are tokenised in this process
_MANY_IDS = 4096


class Tokens:
    """The tokenizer of one policy."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._written = ""  # the tokenizer as JSON, once it is needed
        self._longest = max((len(token) for token in tokenizer.get_vocab()), default=1)
        # Only here: this call sets the tokenizer up, which must not happen while another thread encodes.
        opened = list(tokenizer.encode("", add_special_tokens=True))[:1]
        self._opening = opened if opened == [tokenizer.bos_token_id] else []

    def encode(self, text: str) -> list[int]:
        if self._backend is not None:
            # This method of encoding releases the interpreter lock.
            return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def ids(self, text: str) -> array[int]:
        """Encode a text of any length."""
        if self._backend is None or len(text) <= _APART:
            return array("i", self.encode(text))
        if not self._written:
            self._written = self._backend.to_str()
        return encode_apart(self._written, text)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids. Special tokens become text, because tool-call markers are often special."""
        if self._backend is not None and len(ids) > _MANY_IDS:  # as slow, but it releases the interpreter lock
            return str(self._backend.decode_batch([ids], skip_special_tokens=False)[0])
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=False))
        return str(
            self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        )

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens. Under a grammar, no text can become one of them."""
        return frozenset(self._tokenizer.all_special_ids)

    def pieces(self, text: str) -> list[tuple[int | None, str]]:
        """Split a text into its added tokens, with their ids, and the text between them."""
        added = self._tokenizer.get_added_vocab()
        markers = "|".join(re.escape(marker) for marker in sorted(added, key=len, reverse=True))
        parts = re.split(f"({markers})", text) if markers else [text]
        return [(added.get(part), part) for part in parts if part]

    def opening(self, text: str) -> list[int]:
        """Return the ids that the tokenizer puts before a text, unless the text already begins with them."""
        return self._opening if self._opening and not text.startswith(self._tokenizer.bos_token) else []

    def characters_of(self, tokens: int) -> int:
        """Return an upper bound of the characters of a text with `tokens` tokens.

        It is twice the length of the longest token for each, because some tokenizers drop a part of a text.
        """
        return tokens * 2 * self._longest

    @property
    def vocabulary(self) -> int:
        """The number of ids that the tokenizer knows."""
        return len(self._tokenizer)
