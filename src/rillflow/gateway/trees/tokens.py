"""The tokenizer of one policy, for any thread. A very long text is tokenised in a separate process.

The tokenizer releases the interpreter lock while it encodes, but its result holds a string for each token. Freeing the
result of a text of four megabytes blocks all threads for half a second. A process frees it by exiting. This file is
also the program of that process, so it imports only the standard library and the tokenizer's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import Any

SECONDS = 300.0  # for one text; four megabytes take 8 s on a busy core
_LENGTH = 8


def encode_apart(tokenizer: str, text: str) -> array[int]:
    """Return the ids of `text` without added special tokens. `tokenizer` is the JSON of a fast tokenizer."""
    written = tokenizer.encode()
    sent = len(written).to_bytes(_LENGTH, "little") + written + text.encode()
    command = [sys.executable, "-P", __file__]
    done = subprocess.run(command, input=sent, capture_output=True, timeout=SECONDS, check=False)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ChildProcessError(f"the process that tokenises a long text failed ({done.returncode}): {last[:500]}")
    ids = array("i")
    ids.frombytes(done.stdout)
    return ids


def main() -> None:
    from tokenizers import Tokenizer

    os.nice(10)
    sent = sys.stdin.buffer.read()
    at = _LENGTH + int.from_bytes(sent[:_LENGTH], "little")
    tokenizer = Tokenizer.from_str(sent[_LENGTH:at].decode())
    (encoded,) = tokenizer.encode_batch_fast([sent[at:].decode()], add_special_tokens=False)
    sys.stdout.buffer.write(array("i", encoded.ids).tobytes())
    sys.stdout.flush()
    os._exit(0)  # without freeing the result piece by piece


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


if __name__ == "__main__":
    main()
