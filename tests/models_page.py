"""The table of docs/models.md, made by what `model_families` and `vllm_families` find.

python tests/models_page.py           every column but vLLM's, which stays as it is
python tests/models_page.py --vllm    vLLM's column alone, with the vLLM of .venv-vllm or VLLM_PYTHON
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from commands import Warm
from forked_ranks import run_ranks
from model_families import FAMILIES, PARTS, Outcome
from needs import VLLM_PYTHON
from vllm_families import serve

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
RANK = Path(__file__).parent / "unit" / "trainer" / "family_rank.py"
FSDP, VLLM = "FSDP", "vLLM"
COLUMNS = (*PARTS, FSDP, VLLM)
_TABLE = re.compile(r"(?s)(?<=<!-- table -->\n).*(?=<!-- end of table -->)")
_REASONS = re.compile(r"(?s)(?<=<!-- reasons -->\n).*(?=<!-- end of reasons -->)")
_REASON = re.compile(r"(?m)^- \*\*(.+?)\*\*, \w+: (.*) \(([^()]*)\)$")

_UNTRIED = Outcome("untried")

Found = dict[str, dict[str, Outcome]]  # by family and column


def told() -> Found:
    """Return the outcomes that the page has, with their reasons."""
    text = PAGE.read_text()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in _part(_TABLE, text)]
    words = {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}
    reasons = {
        (family, column): reason
        for column, reason, families in _REASON.findall("\n".join(_part(_REASONS, text)))
        for family in families.split(", ")
    }
    return {
        family: {column: Outcome(word, reasons.get((family, column), "")) for column, word in row.items()}
        for family, row in words.items()
    }


def _part(pattern: re.Pattern[str], text: str) -> list[str]:
    found = pattern.search(text)
    assert found is not None
    return found[0].splitlines()


def write(found: Found) -> None:
    """Write these outcomes; the page keeps all others."""
    before = told()
    rows = {family: before.get(family, {}) | found.get(family, {}) for family in FAMILIES}
    table = [f"| family | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    reasons: dict[str, list[str]] = {}
    for family, row in rows.items():
        outcomes = {column: row.get(column, _UNTRIED) for column in COLUMNS}
        table.append(f"| {family} | {' | '.join(outcome.word for outcome in outcomes.values())} |")
        for column, (word, reason) in outcomes.items():
            if reason:
                reasons.setdefault(f"**{column}**, {word}: {reason}", []).append(family)
    lines = [f"- {reason} ({', '.join(families)})" for reason, families in reasons.items()]
    text = _TABLE.sub(lambda _: "\n".join(table) + "\n", PAGE.read_text())
    PAGE.write_text(_REASONS.sub(lambda _: "\n".join(lines) + "\n", text))


def sharded(folder: Path, warm: Warm | None = None) -> Mapping[str, Outcome]:
    """Run all families on two ranks."""
    run_ranks(RANK, 2, folder, str(folder / "outcomes.json"), warm=warm)
    return {name: Outcome(*found) for name, found in json.loads((folder / "outcomes.json").read_text()).items()}


def served(folder: Path, families: Sequence[str]) -> Found:
    """Run families on vLLM, one after the other."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # see tests/engines/conftest.py
    return {family: {VLLM: asyncio.run(serve(family, folder / family, str(VLLM_PYTHON)))} for family in families}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", nargs="*", choices=FAMILIES, metavar="FAMILY")
    families = parser.parse_args().vllm
    with tempfile.TemporaryDirectory() as folder:
        if families is not None:
            found = served(Path(folder), families or list(FAMILIES))
        else:
            shards = sharded(Path(folder))
            found = {
                family: {part: run(family) for part, run in PARTS.items()} | {FSDP: shards[family]}
                for family in FAMILIES
            }
    write(found)
    sys.stdout.write(f"{PAGE} is written\n")


if __name__ == "__main__":
    main()
