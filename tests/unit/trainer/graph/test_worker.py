"""A worker's steps, weights and state, and the probe of its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from loop_world import Crash, Ledger, crash_at, start
from trainer_helpers import VOCAB, in_parts, learner, random_rows, small_model
from transformers import Phi3Config, Phi3ForCausalLM

from peer_threads import as_peers
from rillflow.cli.app import _FOR_GOOD
from rillflow.config import LoraConfig, PolicyConfig, load_recipe
from rillflow.errors import ConfigError, GraphError, LeaseLost
from rillflow.trainer import lora
from rillflow.trainer.graph import Databuffer, Step, function
from rillflow.trainer.graph.worker import Worker
from rillflow.trainer.parallel import Alone, Peers
from rillflow.trainer.roles import Roles, build_worker
from rillflow.types import Probe
from rillflow.weights import FolderStore
from rillflow.weights.probe import BF16, FP32, ProbeMismatch, check, prompts

PPO: dict[str, Any] = {"algorithm": "ppo", "kl": {"where": "reward"}, "truncate": 2.0}


def state(worker: Worker) -> dict[str, torch.Tensor]:
    held = worker.masters() | {f"moments/{name}": tensor for name, tensor in worker.moments().items()}
    return {name: tensor.clone() for name, tensor in held.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_step_trains_publishes_and_counts() -> None:
    worker = learner()
    before = {name: tensor.clone() for name, tensor in worker.masters().items()}
    published: list[bool] = []

    def publish() -> None:
        published.append(not same(before, worker.weights(torch.float32)))

    metrics = worker.step([random_rows(0)], publish=publish)
    assert published == [True]  # once, and with the new weights
    assert worker.steps == 1
    assert metrics["samples"] == 12
    assert {"loss", "reward_mean", "node_fetch_seconds", "node_train_actor_seconds"} <= metrics.keys()


def fails_at(count: int) -> Callable[[], None]:
    left = [count]

    def check() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise LeaseLost("taken away")

    return check


@pytest.mark.parametrize("settings", [{}, PPO], ids=["grpo", "ppo"])
def test_an_abandoned_step_changes_nothing(settings: dict[str, Any]) -> None:
    worker, other = learner(micro_tokens=20, **settings), learner(micro_tokens=20, **settings)
    worker.step([random_rows(0)])
    other.step([random_rows(0)])
    before = state(worker)
    asked = 0
    while True:
        try:
            worker.step([random_rows(1)], fails_at(asked))
            break
        except LeaseLost:
            assert same(state(worker), before), f"after {asked} checks"
            assert worker.steps == 1
            asked += 1
    assert asked > 4
    # An abandoned step leaves no gradients and no counts.
    other.step([random_rows(1)])
    assert same(state(worker), state(other))


def test_a_damaged_part_abandons_the_step() -> None:
    worker = learner(**PPO)
    before = state(worker)

    def parts() -> Any:
        yield in_parts(0, (4, 8))[0]
        raise LeaseLost("taken away")

    with pytest.raises(LeaseLost):
        worker.step(parts())
    assert same(state(worker), before)


@pytest.mark.parametrize("settings", [{}, PPO | {"updates": 2, "epochs": 2, "warmup_steps": 6}], ids=["grpo", "ppo"])
def test_a_restored_worker_goes_on_bit_for_bit(settings: dict[str, Any]) -> None:
    worker, restored = learner(**settings, batch_groups=3), learner(**settings, batch_groups=3)
    for seed in range(2):
        worker.step([random_rows(seed)])
    restored.restore(worker.masters(), worker.moments(), worker.steps)
    assert restored.steps == 2
    one, other = worker.step([random_rows(2)]), restored.step([random_rows(2)])
    assert same(state(worker), state(restored))
    assert one["lr"] == other["lr"]
    assert one["loss"] == other["loss"]


def test_tensors_of_the_critic_carry_its_name() -> None:
    worker = learner(**PPO)
    worker.step([random_rows(0)])
    names = [name for name in worker.masters() if name.startswith("critic/")]
    assert "critic/score.weight" in names
    assert "critic/exp_avg/score.weight" in worker.moments()
    assert not any(name.startswith("critic/") for name in worker.weights(torch.float32))


def test_only_the_critic_learns_while_it_warms_up() -> None:
    worker = learner(algorithm="ppo", critic={"warmup_batches": 1})
    before = state(worker)
    worker.step([random_rows(0)])
    after = state(worker)
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved
    assert all("critic/" in name for name in moved)
    worker.step([random_rows(1)])
    assert not torch.equal(worker.masters()["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


@function("doubled", role="reward", kind="compute", needs=["reward_R"], gives=["reward_R"])
def doubled(step: Step, data: Databuffer) -> dict[str, Any]:
    return {"reward_R": 2 * data["reward_R"] + 1}


def test_a_node_of_ones_own_is_one_line_and_groups_are_compared_anew() -> None:
    """GRPO does not mind rewards twice as high, if the statistics of their groups are too."""
    plain, own = learner(), learner(nodes=[f"{__file__}:doubled"])
    metrics = plain.step([random_rows(0)]), own.step([random_rows(0)])
    assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"], rel=1e-4)
    assert "node_doubled_seconds" in metrics[1]
    assert "node_group_statistics_seconds" in metrics[1]


@function("noted", role="reward", kind="compute", needs=["reward_R"], gives=["reward_R"])
def noted(step: Step, data: Databuffer) -> dict[str, Any]:
    step.metrics |= {"lowest": data["reward_R"].astype("f4").min(), "best": torch.tensor(2.5), "rows": len(data)}  # type: ignore[dict-item]
    return {"reward_R": data["reward_R"]}


@function("told", role="reward", kind="compute", needs=["reward_R"], gives=["reward_R"])
def told(step: Step, data: Databuffer) -> dict[str, Any]:
    step.metrics["mood"] = "good"  # type: ignore[assignment]
    return {"reward_R": data["reward_R"]}


def test_metrics_are_plain_numbers_whatever_nodes_note() -> None:
    """A batch is committed with them: what cannot travel must not be found out then."""
    metrics = learner(nodes=[f"{__file__}:noted"]).step([random_rows(0)])
    assert {type(metrics[name]) for name in ("lowest", "best", "rows")} == {float}
    assert (metrics["best"], metrics["rows"]) == (2.5, 12)
    with pytest.raises(GraphError, match="metric mood is of type str"):
        learner(nodes=[f"{__file__}:told"]).step([random_rows(0)])


def test_a_graph_of_ones_own_runs_as_written() -> None:
    written = [
        {"role": "actor", "kind": "fetch"},
        "actor_logprobs",
        {"id": "mine", "function": "advantages", "needs": ["fetch"]},
        "train_actor",
        "publish",
    ]
    metrics = learner(graph=written).step([random_rows(0)])
    assert {"node_mine_seconds", "node_actor_logprobs_seconds"} <= metrics.keys()


@function("samples_here", role="actor", kind="fetch", gives=["answer_R"])
def samples_here(step: Step) -> Any:
    return step.generate()


def test_a_source_that_fetches_cannot_ask_for_samples() -> None:
    graph = [f"{__file__}:samples_here", "advantages", "train_actor", "publish"]
    worker = learner(graph=graph)
    assert not worker.generates
    with pytest.raises(GraphError, match="node samples_here of kind fetch"):
        worker.step([random_rows(0)])


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["runtime.mode=colocated", "trainer.algorithm=ppo", "trainer.kl.where=reward"],
        ["trainer.lora.rank=4", "trainer.kl.coefficient=0.1"],
    ],
    ids=["grpo", "ppo", "lora"],
)
def test_workers_are_built_from_recipes(overrides: list[str]) -> None:
    worker = build_worker(load_recipe("quickstart", overrides), "agent", Alone())
    metrics = worker.step([random_rows(0)])
    assert metrics["skipped"] == 0.0
    assert metrics["grad_norm"] > 0
    assert (worker.adapter() is not None) == ("trainer.lora.rank=4" in overrides)
    assert worker.generates == ("runtime.mode=colocated" in overrides)
    if "trainer.kl.coefficient=0.1" in overrides:
        assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)  # the reference is the policy itself, adapters off


def test_a_model_that_cannot_be_built_is_refused_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor starts a trainer again that ends by any other error."""

    def no_head(model: object, *_: object) -> None:
        raise AttributeError("'Odd' object has no attribute 'lm_head'")

    monkeypatch.setattr(Roles, "learners", no_head)
    with pytest.raises(ConfigError, match="the trainer cannot build tiny: AttributeError: 'Odd' object") as seen:
        build_worker(load_recipe("quickstart"), "agent", Alone())
    assert isinstance(seen.value, _FOR_GOOD)


def test_rows_that_would_change_the_rotary_embedding_of_others_are_refused(tmp_path: Path) -> None:
    """Beyond 64 tokens of the longest row, the library gives all rows of a batch the long factors."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    }
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    tokens = {"vocab_size": 97, "pad_token_id": 0, "original_max_position_embeddings": 64}
    Phi3ForCausalLM(Phi3Config(rope_parameters=rope, **size, **tokens)).save_pretrained(tmp_path)
    model = f"policies.agent.model={tmp_path}"
    build_worker(load_recipe("quickstart", [model, "policies.agent.engine.context=64"]), "agent", Alone())
    with pytest.raises(ConfigError, match="Phi3Config with 65 tokens: a row of more than 64 changes"):
        build_worker(load_recipe("quickstart", [model, "policies.agent.engine.context=65"]), "agent", Alone())


def test_functions_may_lie_beside_the_recipe(tmp_path: Path) -> None:
    source = "from rillflow.trainer.graph import function\n\n\n@function('mine', role='reward', kind='compute', "
    source += "needs=['reward_R'], gives=['reward_R'])\ndef mine(step, data, factor=1.0):\n"
    source += "    return {'reward_R': factor * data['reward_R']}\n"
    (tmp_path / "mine.py").write_text(source)
    (tmp_path / "mine.yaml").write_text(
        "extends: quickstart\ntrainer:\n  nodes: [mine.py:mine, {id: again, function: mine.py:mine, "
        "options: {factor: 0.5}}]\n"
    )
    worker = build_worker(load_recipe(str(tmp_path / "mine.yaml")), "agent", Alone())
    metrics = worker.step([random_rows(0)])
    assert {"node_mine_seconds", "node_again_seconds"} <= metrics.keys()
    assert np.isfinite(metrics["loss"])


def test_every_step_draws_from_the_recipes_seed_and_its_own_number(tmp_path: Path) -> None:
    """Mini-batches are drawn by `step.order`."""
    source = "from rillflow.trainer.graph import function\n\n\n@function('told', role='reward', kind='compute', "
    source += "needs=['reward_R'], gives=['reward_R'])\ndef told(step, data):\n"
    source += "    step.metrics['seed'], step.metrics['number'] = step.order\n    return {'reward_R': data['reward_R']}"
    (tmp_path / "told.py").write_text(source)
    recipe = load_recipe("quickstart", ["seed=7", f"trainer.nodes=[{tmp_path / 'told.py'}:told]"])
    worker = build_worker(recipe, "agent", Alone())
    steps = [worker.step([random_rows(number)]) for number in range(2)]
    assert [(metrics["seed"], metrics["number"]) for metrics in steps] == [(7, 0), (7, 1)]


@pytest.mark.parametrize("settings", [{}, PPO, {"updates": 3, "epochs": 2}], ids=["grpo", "ppo", "mini-batches"])
def test_two_ranks_do_what_one_does(settings: dict[str, Any]) -> None:
    """Their shares cut through groups, whose rewards a node has changed."""
    options = {**settings, "nodes": [f"{__file__}:doubled"], "batch_groups": 3}
    alone = learner(**options)
    expected = [alone.step([random_rows(seed)]) for seed in range(2)]

    def work(peers: Peers) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        worker = learner(peers=peers, **options)
        metrics = [worker.step([in_parts(seed, (6, 6))[peers.rank]]) for seed in range(2)]
        return metrics, worker.masters()

    for metrics, masters in as_peers(2, work, seconds=60):
        for one, two in zip(expected, metrics, strict=True):
            assert one.keys() == two.keys()
            for name in ("loss", "grad_norm", "reward_mean", "advantage_std", "approx_kl", "entropy"):
                assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
        for name, tensor in alone.masters().items():
            torch.testing.assert_close(masters[name], tensor, rtol=1e-4, atol=1e-5)


def test_ranks_with_different_recipes_refuse_to_begin() -> None:
    def work(peers: Peers) -> None:
        learner(peers=peers, nodes=[f"{__file__}:doubled"] if peers.rank else [])

    with pytest.raises(GraphError, match="step graph of ranks 1 differs from that of rank 0"):
        as_peers(2, work)


def policy(**settings: Any) -> PolicyConfig:
    return PolicyConfig.model_validate({"model": "tiny", **settings})


@torch.no_grad()
def scored(weights: dict[str, torch.Tensor]) -> list[list[float]]:
    """Return the log-probs of a plain model that has only the published weights."""
    model = small_model(seed=99).to(weights["model.norm.weight"].dtype)
    model.load_state_dict(weights)
    ids_RT = torch.tensor(prompts(VOCAB, 512))
    logprob_RTV = model(ids_RT).logits[:, :-1].float().log_softmax(-1)
    values: list[list[float]] = logprob_RTV.gather(-1, ids_RT[:, 1:, None])[:, :, 0].tolist()
    return values


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 falls back, slowly
@pytest.mark.parametrize(
    ("dtype", "published", "adapted"),
    [("fp32", "fp32", False), ("fp32", "bf16", True), ("bf16", "bf16", False), ("bf16", "bf16", True)],
)
def test_a_probe_is_what_the_published_weights_say(dtype: str, published: str, adapted: bool) -> None:
    model, options = small_model(), {}
    if adapted:
        options["lora"] = LoraConfig(rank=4, alpha=6.0)
        lora.wrap(model.to(torch.bfloat16 if dtype == "bf16" else torch.float32), options["lora"])
    worker = learner(model, dtype=dtype, lr=0.05, **options)
    probe = worker.prober(policy(engine={"dtype": published}, trainer={"dtype": dtype}))
    wanted = torch.bfloat16 if published == "bf16" else torch.float32
    first = probe()
    assert first is not None
    before = scored(worker.weights(wanted))
    check(0, first, before)
    assert first.tolerance == (FP32 if dtype == published == "fp32" else BF16)
    worker.step([random_rows(0)])
    second = probe()
    assert second is not None
    check(1, second, scored(worker.weights(wanted)))
    with pytest.raises(ProbeMismatch):
        check(1, second, before)


def test_trees_and_small_micro_batches_change_nothing_in_a_probe() -> None:
    plain, parts = learner().prober(policy())(), learner(trees=True, micro_tokens=40).prober(policy())()
    assert plain is not None
    assert parts is not None
    for one, other in zip(plain.logprobs, parts.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_recipe_can_do_without_probes() -> None:
    assert learner().prober(policy(weights={"probe": "off"}))() is None


def test_weights_that_give_no_numbers_have_no_probe() -> None:
    worker = learner()
    with torch.no_grad():
        worker._models["actor"].model.get_input_embeddings().weight.fill_(torch.nan)
    assert worker.prober(policy())() is None


def numbered() -> Any:
    """Probes that differ from call to call."""
    made: list[Probe] = []

    def probe() -> Probe:
        made.append(Probe(prompts=[[1, 2]], logprobs=[[-float(len(made))]], tolerance=0.5))
        return made[-1]

    return probe


def published(folder: Path) -> list[float | None]:
    store = FolderStore(folder / "w")
    probes = [store.manifest(version).probe for version in store.versions()]
    return [None if probe is None else probe.logprobs[0][0] for probe in probes]


@pytest.mark.parametrize("deltas", [False, True])
def test_every_version_is_published_with_the_probe_of_its_weights(tmp_path: Path, deltas: bool) -> None:
    start(tmp_path, Ledger(batches=3), deltas=deltas, probe=numbered())
    assert published(tmp_path) == [0.0, -1.0, -2.0, -3.0]


def test_a_trainer_that_begins_again_gives_its_version_a_probe(tmp_path: Path) -> None:
    """Made by the present trainer, whose recipe may have another tolerance."""
    ledger = Ledger(batches=3)
    ledger.before = crash_at("commit b2 3")
    with pytest.raises(Crash):
        start(tmp_path, ledger)
    assert published(tmp_path) == [None] * 3
    ledger.before = lambda event: None
    start(tmp_path, ledger, probe=numbered())
    assert published(tmp_path) == [None, None, 0.0, -1.0]


def test_a_manifest_without_a_probe_can_still_be_read() -> None:
    from rillflow.weights.manifest import VersionManifest

    old = {"files": {}, "version": 1, "parent": 0, "created": 1.0, "tensors": {}, "aliases": {}}
    assert msgspec.json.decode(msgspec.json.encode(old), type=VersionManifest).probe is None
