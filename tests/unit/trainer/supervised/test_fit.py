"""Supervised runs: batches of rows, resume, exports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lessons import fit_recipe
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rillflow.config.supervised import FitRecipe
from rillflow.contracts import PromptSource
from rillflow.dataflow.sources import open_source
from rillflow.errors import ConfigError, DataError
from rillflow.trainer.parallel import Alone
from rillflow.trainer.supervised.fit import Journal, Progress, StaticBatches, balanced, run_fit
from rillflow.trainer.supervised.reward_model import RewardModel
from soak import repetitions


class Cut(Exception):
    """As good as a kill: nothing is written any more."""


def opened(recipe: FitRecipe) -> tuple[PromptSource, PromptSource | None]:
    held = recipe.data.heldout
    return (
        open_source(recipe.data.train, seed=0, shuffle=False),
        None if held is None else open_source(held, seed=0, shuffle=False),
    )


def fitted(recipe: FitRecipe, folder: Path, report: Callable[[Progress], None] = lambda _: None) -> bool:
    folder.mkdir(exist_ok=True)
    return run_fit(recipe, folder, *opened(recipe), report=report)


def lines(folder: Path) -> list[dict[str, Any]]:
    """Without what differs between two runs of the same: times."""
    timed = ("seconds", "time", "mfu")
    return [
        {name: value for name, value in line.items() if not name.endswith(timed)}
        for line in Journal(folder / "metrics.jsonl").read()
    ]


@pytest.fixture
def _deterministic_again() -> Any:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic_again")
@pytest.mark.parametrize("task", ["sft", "reward"])
def test_a_run_that_was_cut_ends_as_if_it_had_not_been(task: str, tmp_path: Path) -> None:
    recipe = fit_recipe(
        task,
        trainer={"steps": 5, "checkpoint_every": 2},
        runtime={"deterministic": True},
        evaluate_every=2,
    )

    def cut(progress: Progress) -> None:
        if progress.step == 3:
            raise Cut

    assert fitted(recipe, tmp_path / "whole")
    with pytest.raises(Cut):
        fitted(recipe, tmp_path / "cut", cut)
    assert lines(tmp_path / "cut")[-1]["step"] == 3
    assert fitted(recipe, tmp_path / "cut")
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "cut")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_journal_has_every_step_once_and_the_evaluations(tmp_path: Path) -> None:
    recipe = fit_recipe("sft", trainer={"steps": 3}, evaluate_every=2)
    assert fitted(recipe, tmp_path)
    told = [(line["step"], line.get("event")) for line in lines(tmp_path)]
    assert told == [(0, "evaluation"), (1, None), (2, None), (2, "evaluation"), (3, None), (3, "evaluation")]


def test_epochs_end_a_run(tmp_path: Path) -> None:
    recipe = fit_recipe("sft", 12, data={"epochs": 2, "heldout": None}, trainer={"batch_groups": 5})
    assert fitted(recipe, tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_trained_policy_is_a_plain_folder(tmp_path: Path) -> None:
    assert fitted(fit_recipe("sft", trainer={"steps": 2}), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    assert model.config.architectures == ["Qwen3ForCausalLM"]


def test_a_reward_model_scores_as_transformers_does(tmp_path: Path) -> None:
    assert fitted(fit_recipe("reward", trainer={"steps": 2}), tmp_path)
    folder = tmp_path / "model"
    rows = [
        {"prompt": "How many?", "answer": "17"},
        {"messages": [{"role": "user", "content": "How many cups?"}], "answer": "It is 17."},
    ]
    ours = RewardModel.load(str(folder)).score(rows)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = [*rows[1]["messages"], {"role": "assistant", "content": "It is 17."}]
    texts = [
        [*tokenizer.encode("How many?"), *tokenizer.encode("17"), tokenizer.eos_token_id],
        tokenizer.encode(tokenizer.apply_chat_template(said, tokenize=False)),
    ]
    with torch.no_grad():
        expected = [theirs(input_ids=torch.tensor([ids])).logits.item() for ids in texts]
    assert ours == pytest.approx(expected, abs=1e-5)
    assert RewardModel.load(str(folder)).score([]) == []


def test_a_process_reward_model_scores_steps(tmp_path: Path) -> None:
    recipe = fit_recipe("process_reward", trainer={"steps": 2}, separator=" ;", loss="bce")
    assert fitted(recipe, tmp_path)
    model = RewardModel.load(str(tmp_path / "model"), micro_tokens=16)
    assert model.facts.separator == " ;"
    rows = [
        {"prompt": "q", "steps": [{"text": "a"}, {"text": "b"}]},
        {"prompt": "q", "steps": [{"text": "a"}]},
    ]
    two, one = model.score_steps(rows)
    assert len(two) == 2
    assert two[0] == pytest.approx(one[0], abs=1e-5)  # a step's score does not depend on what comes later
    assert all(0 < score < 1 for score in two)


def test_a_policy_is_no_reward_model() -> None:
    with pytest.raises(ConfigError, match="not a reward model"):
        RewardModel.load("tiny")


def test_half_a_line_is_no_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl", now=lambda: 5.0)
    for step in (1, 2, 3):
        journal.add(step, {"loss": 1.0 / step})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 4')
    journal.take_back(2)
    journal.add(3, {"loss": 0.0})
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written] == [1, 2, 3]
    assert written[0]["time"] == 5.0


class Rank(Alone):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


sets = st.tuples(st.integers(1, 60), st.integers(1, 17), st.integers(0, 2**40))


@settings(max_examples=repetitions(20, 60), deadline=None)
@given(of=sets, ranks=st.integers(1, 9), seed=st.integers(0, 9))
def test_parts_of_all_ranks_are_the_batch_whatever_their_number(
    of: tuple[int, int, int], ranks: int, seed: int
) -> None:
    count, size, _ = of
    lengths = np.random.default_rng(seed).integers(1, 500, count).tolist()
    alone = StaticBatches(*of, lengths=lengths)
    several = [StaticBatches(*of, Rank(rank, ranks), lengths) for rank in range(ranks)]
    for step in range(2 * alone.batches_per_epoch + 1):
        parts = [one.take(step) for one in several]
        assert sorted(np.concatenate(parts).tolist()) == sorted(alone.take(step).tolist())
        tokens = [sum(lengths[row] for row in part) for part in parts]
        assert max(tokens) - min(tokens) <= max(lengths[row] for row in alone.batch(step))
        assert 1 <= len(alone.batch(step)) <= size


@settings(max_examples=repetitions(20, 60), deadline=None)
@given(of=sets)
def test_every_row_comes_once_an_epoch(of: tuple[int, int, int]) -> None:
    loader = StaticBatches(*of)
    for epoch in range(2):
        steps = range(epoch * loader.batches_per_epoch, (epoch + 1) * loader.batches_per_epoch)
        assert {loader.epoch(step) for step in steps} == {epoch}
        rows = np.concatenate([loader.batch(step) for step in steps])
        assert sorted(rows.tolist()) == list(range(of[0]))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    loader = StaticBatches(1000, 1000, 3)
    assert loader.batch(0).tolist() != loader.batch(1).tolist()
    assert loader.batch(0).tolist() == StaticBatches(1000, 1000, 3).batch(0).tolist()
    assert loader.batch(0).tolist() != StaticBatches(1000, 1000, 4).batch(0).tolist()


@pytest.mark.parametrize(("count", "size", "lengths"), [(0, 4, None), (4, 0, None), (4, 2, [1, 2])])
def test_impossible_sets_are_refused(count: int, size: int, lengths: list[int] | None) -> None:
    with pytest.raises(DataError):
        StaticBatches(count, size, 0, lengths=lengths)


def test_more_ranks_than_rows_leave_some_without() -> None:
    assert sorted(balanced(np.array([5, 5]), 4).tolist()) == [0, 1]
    assert [len(StaticBatches(2, 2, 0, Rank(rank, 4)).take(0)) for rank in range(4)] == [1, 1, 0, 0]
