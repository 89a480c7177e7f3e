"""The families of models against the parts of the product: docs/models.md has the table that this makes.

    python tests/unit/trainer/test_model_families.py

writes the columns of `model_families.PARTS` and of FSDP into the page.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from commands import Warm
from forked_ranks import run_ranks
from model_families import FAMILIES, PARTS, Outcome

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
RANK = Path(__file__).with_name("family_rank.py")
FSDP = "FSDP"
COLUMNS = (*PARTS, FSDP)
_TABLE = re.compile(r"(?s)(?<=<!-- table -->\n).*(?=<!-- end of table -->)")
_REASONS = re.compile(r"(?s)(?<=<!-- reasons -->\n).*(?=<!-- end of reasons -->)")


def told() -> dict[str, dict[str, str]]:
    """Return the words of the page, by family and column."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    head, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_tells_what_each_part_does(family: str) -> None:
    assert {part: told()[family][part] for part in PARTS} == {part: run(family).word for part, run in PARTS.items()}


def test_the_page_has_every_family() -> None:
    assert list(told()) == list(FAMILIES)


@pytest.mark.slow
def test_the_page_tells_what_sharding_does(warm: Warm, tmp_path: Path) -> None:
    assert {family: row[FSDP] for family, row in told().items()} == {
        family: outcome.word for family, outcome in sharded(tmp_path, warm).items()
    }


def sharded(folder: Path, warm: Warm | None = None) -> dict[str, Outcome]:
    """Run all families on two ranks."""
    run_ranks(RANK, 2, folder, str(folder / "outcomes.json"), warm=warm)
    return {name: Outcome(*found) for name, found in json.loads((folder / "outcomes.json").read_text()).items()}


def write(found: dict[str, dict[str, Outcome]]) -> None:
    table = [f"| family | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    reasons: dict[str, list[str]] = {}
    for family, row in found.items():
        table.append(f"| {family} | {' | '.join(row[column].word for column in COLUMNS)} |")
        for column, outcome in row.items():
            if outcome.reason:
                reasons.setdefault(f"**{column}**, {outcome.word}: {outcome.reason}", []).append(family)
    lines = [f"- {reason} ({', '.join(families)})" for reason, families in reasons.items()]
    text = _TABLE.sub(lambda _: "\n".join(table) + "\n", PAGE.read_text())
    PAGE.write_text(_REASONS.sub(lambda _: "\n".join(lines) + "\n", text))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        shards = sharded(Path(folder))
    rows = {family: {part: run(family) for part, run in PARTS.items()} for family in FAMILIES}
    write({family: row | {FSDP: shards[family]} for family, row in rows.items()})
    sys.stdout.write(f"{PAGE} is written\n")
