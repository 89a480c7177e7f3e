"""Several ledgers of one run: which prompts each of them has, and what names say whose they are.

A prompt belongs to exactly one ledger, by the hash of its id. Names of groups, tasks, attempts, samples and batches say
which ledger made them, so that news of them finds the way back without a table. The names of the first ledger, number
0, are those of a run that has only one.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

_MARK = re.compile(r"l(\d+)-")


def owner_of(prompt: str, ledgers: int) -> int:
    """Return the number of the ledger that a prompt belongs to, the same on every machine."""
    if ledgers == 1:
        return 0
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "little") % ledgers


def mark_of(ledger: int) -> str:
    """Return what the names that a ledger makes begin with."""
    return f"l{ledger}-" if ledger else ""


def ledger_of(name: str) -> int:
    """Return the number of the ledger that made a name."""
    found = _MARK.match(name)
    return int(found[1]) if found else 0


def process_of(ledger: int) -> str:
    """Return the name of the process that serves a ledger."""
    return f"dataflow-{ledger}" if ledger else "dataflow"


def folder_of(run: Path, ledger: int) -> Path:
    """Return where a run keeps the files of a ledger: the first one's are in the run's own folder."""
    return run / "ledgers" / str(ledger) if ledger else run
