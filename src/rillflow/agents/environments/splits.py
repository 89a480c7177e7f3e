"""Splits of generated prompts: for training, and held out. It imports nothing, so that peers of a bench can use it."""

from __future__ import annotations

SPLITS = ("train", "heldout")


def check_split(split: str) -> None:
    """Raise ValueError unless `split` is `train` or `heldout`."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}, expected one of {', '.join(SPLITS)}")


def held_out(row: int, column: int) -> bool:
    """Return whether a pair is held out: a Latin square, a quarter of every row and of every column."""
    return (row + column) % 4 == 0
