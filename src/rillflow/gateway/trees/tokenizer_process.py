"""Tokenises a very long text in a separate process.

The tokenizer releases the interpreter lock while it encodes, but its result holds a string for each token. Freeing the
result of a text of four megabytes blocks all threads for half a second. A process frees it by exiting. This file is
also the program of that process, so it imports only the tokenizer's library.
"""

from __future__ import annotations

import os
import subprocess
import sys
from array import array

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


if __name__ == "__main__":
    main()
