"""The generated pages of the documentation are those that the code makes."""

from __future__ import annotations

import pytest

from rillflow.errors import KINDS, RillflowError
from scripts.reference_pages import DOCS, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run `python -m scripts.reference_pages`"


def test_every_error_says_what_to_do() -> None:
    assert all(kind.advice for kind in KINDS.values() if kind is not RillflowError)
