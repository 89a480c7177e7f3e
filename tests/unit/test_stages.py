"""Stages: invalid ones are refused before a run, and their columns are those that the trainer would have computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rillflow.config import Recipe, load_recipe
from rillflow.errors import ConfigError, GraphError
from rillflow.stages import build_stage, check_stages
from rillflow.trainer.batches import GIVES, Databuffer, make_rows, staged_columns
from rillflow.trainer.graph.builtin import chain_of
from rillflow.trainer.parallel import Alone
from rillflow.trainer.roles import Roles
from rillflow.types import BatchSample, Row
from rillflow.weights.model_folder import model_folder
from rillflow.weights.models import load_tokenizer

KL = "trainer.kl={coefficient: 0.01}"
OWN = """
class Novelty:
    gives = ("novelty_R",)

    def __init__(self, recipe, policy, *, scale=1.0):
        self.scale = scale

    def columns(self, data):
        return {"novelty_R": [self.scale * n for n in data["length_R"]]}


class Silent:
    def __init__(self, recipe, policy): ...


class Late(Novelty):
    def columns(self, data):
        return {"novelty_R": data["old_N"]}
"""
NODE = """
from rillflow.trainer.graph import function


@function("add_novelty", role="reward", kind="compute", needs=["reward_R", "novelty_R"], gives=["reward_R"])
def add_novelty(step, data):
    return {"reward_R": data["reward_R"] + data["novelty_R"]}
"""


def recipe(*overrides: str) -> Recipe:
    return load_recipe("quickstart", overrides)


def stages(text: str) -> str:
    return f"policies.agent.stages={text}"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(OWN)
    (folder / "node.py").write_text(NODE)
    return folder


def sampled(rows: int = 6, seed: int = 0) -> Databuffer:
    """Rows of random tokens of the tiny policy, some with two answers, at two temperatures."""
    rng = np.random.default_rng(seed)
    samples, payload = [], []
    for place in range(rows):
        length = int(rng.integers(8, 24))
        mask = np.zeros(length, "u1")
        mask[2:4] = 1
        mask[length - 3 :] = 1
        payload.append(
            {
                "tokens": rng.integers(5, 200, length).astype("<i4"),
                "mask": mask,
                "logprobs": np.where(mask, -1.0, 0.0).astype("<f4"),
                "raw_logprobs": np.zeros(length, "<f4"),
                "temperatures": np.full(length, 1.0 if place % 2 else 0.7, "<f4"),
                "versions": np.where(mask, 0, -1).astype("<i4"),
            }
        )
        samples.append(
            BatchSample(
                id=f"s{place}", row=Row(unit="u", segment=0, offset=place, length=1), tokens=length,
                trained=int(mask.sum()), reward=0.0, group="g", group_mean=0.0, group_std=1.0, group_size=rows,
                staleness=0, truncated=False, member=0,
            )
        )  # fmt: skip
    return Databuffer(make_rows(samples, payload))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([stages("{r: {kind: referense}}")], "stage r has the unknown kind 'referense'"),
        ([stages("{r: {kind: reference}}")], "stage r writes reference_N, but the recipe has no KL"),
        ([KL, stages("{a: {kind: reference}, b: {kind: reference}}")], "stages a and b both write reference_N"),
        ([KL, stages("{r: {kind: reference, model: tiny}}")], "stage r has no option 'model'"),
        ([stages("{s: {kind: reward_model}}")], "stage s needs `model`"),
        ([stages("{s: {kind: reward_model, model: tiny, options: {wieght: 2}}}")], "stage s has no option 'wieght'"),
        (
            [stages("{s: {kind: reward_model, model: tiny}}"), "trainer.step_rewards=own"],
            "stage s scores samples, but step_rewards=own reads rewards of answers",
        ),
        (
            [KL, stages("{r: {kind: reference}}"), "trainer.nodes=[reference_logprobs]"],
            "stage r writes reference_N, and node reference_logprobs makes it too",
        ),
    ],
)
def test_a_stage_that_cannot_work_is_refused_by_name(overrides: list[str], said: str) -> None:
    with pytest.raises((ConfigError, GraphError)) as caught:
        check_stages(recipe(*overrides))
    assert said in caught.value.message
    assert caught.value.hint


def test_a_class_of_the_users(own: Path) -> None:
    named = stages(f"{{n: {{kind: '{own / 'own.py'}:Novelty', options: {{scale: 2.0}}}}}}")
    with pytest.raises(GraphError, match="stage n writes novelty_R, which no node of the step graph reads"):
        check_stages(recipe(named))
    read = recipe(named, f"trainer.nodes=['{own / 'node.py'}:add_novelty']")
    check_stages(read)
    data = sampled()
    made = build_stage(read, "agent", "n").columns(data)
    assert made["novelty_R"].tolist() == (2.0 * data["length_R"]).tolist()
    with pytest.raises(ConfigError, match="does not declare which columns it writes"):
        check_stages(recipe(stages(f"{{n: {{kind: '{own / 'own.py'}:Silent'}}}}")))
    late = recipe(stages(f"{{n: {{kind: '{own / 'own.py'}:Late'}}}}"))
    with pytest.raises(GraphError, match="column novelty_R has shape"):
        build_stage(late, "agent", "n").columns(data)


def test_the_trainer_leaves_to_stages_what_they_write() -> None:
    both = recipe(KL, stages("{r: {kind: reference}, s: {kind: reward_model, model: tiny}}")).policies["agent"]
    staged = staged_columns(both.stages)
    assert staged == {"reference_N": "r", "score_R": "s"}
    nodes = [node.id for node in chain_of(both.trainer, staged=staged).nodes]
    assert nodes == ["fetch", "score_reward", "group_statistics", "advantages", "train_actor", "publish"]
    assert "reference_logprobs" in [node.id for node in chain_of(both.trainer).nodes]
    assert {column for columns in GIVES.values() for column in columns} == set(staged)


# ---------------------------------------------------------------- the numbers


def test_reference_logprobs_are_the_trainers_own() -> None:
    read = recipe(KL, stages("{r: {kind: reference}}"), "trainer.attention=sdpa")
    own = Roles(read.policies["agent"], Alone(), torch.device("cpu"), read.seed, in_order=False).reference()
    stage, data = build_stage(read, "agent", "r"), sampled()
    together = stage.columns(data)["reference_N"]
    np.testing.assert_array_equal(together, own.infer(data))
    assert (together[data["mask_N"]] < 0).all()
    # Leased in other groups, rows are packed otherwise: equal up to rounding.
    apart = [stage.columns(data.taking(np.arange(first, first + 2)))["reference_N"] for first in (0, 2, 4)]
    np.testing.assert_allclose(np.concatenate(apart), together, atol=1e-5)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model of the tiny policy's shape and tokenizer, with a random head."""
    folder = tmp_path_factory.mktemp("scorer")
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(str(model_folder("tiny")), num_labels=1)
    torch.nn.init.normal_(model.get_parameter("score.weight"))
    model.save_pretrained(folder)
    load_tokenizer("tiny").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("over", "of"), [("last", lambda a: a[-1]), ("mean", np.mean), ("min", np.min)])
def test_scores_of_a_reward_model(scorer: Path, over: str, of) -> None:
    options = f"{{weight: 0.5, over: {over}}}"
    read = recipe(stages(f"{{s: {{kind: reward_model, model: '{scorer}', options: {options}}}}}"))
    data = sampled()
    scores = build_stage(read, "agent", "s").columns(data)["score_R"]
    model = AutoModelForSequenceClassification.from_pretrained(str(scorer), num_labels=1).eval()
    for row, (start, length) in enumerate(zip(data.rows.start_R, data.rows.length_R, strict=True)):
        ids = torch.from_numpy(data["tokens_N"][start : start + length].astype(np.int64))[None]
        with torch.no_grad():
            value_L = model.score(model.base_model(input_ids=ids).last_hidden_state)[0, :, 0].numpy()
        ends = [3, int(length) - 1]  # of its two answers
        assert scores[row] == pytest.approx(0.5 * of(value_L[ends]), abs=1e-5)


def test_a_reward_model_of_another_tokenizer_is_refused(scorer: Path, tmp_path: Path) -> None:
    for file in scorer.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = load_tokenizer("tiny")
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(tmp_path)
    read = recipe(stages(f"{{s: {{kind: reward_model, model: '{tmp_path}'}}}}"))
    with pytest.raises(ConfigError, match="has another tokenizer than the policy"):
        build_stage(read, "agent", "s")
