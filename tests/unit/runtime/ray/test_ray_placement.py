"""The resources that a run requests for each of its workers, and how those are started on a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from rillflow.cli.run import Where
from rillflow.config import load_recipe
from rillflow.errors import ConfigError, RunError
from rillflow.resources.placement import Placed, plan, services
from rillflow.resources.ray_cluster import Offers, connect, sampling_gpus, training_gpus, wants_of
from rillflow.resources.workers import initial_workers
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.ray_gang import Place
from rillflow.runtime.ray_run import RayRun

HERE = Place("10.0.0.7", "10.0.0.5:4711")
SERVED = "runtime.weights_server=true"


def run_of(tmp_path: Path, *overrides: str, offers: Offers) -> RayRun:
    folder = RunFolder.create(load_recipe("quickstart", [SERVED, *overrides]), tmp_path)
    folder.publish_endpoint("dataflow", "http://10.0.0.5:8000")
    run = RayRun(folder, lambda status: None)
    run._offers = offers
    return run


def planned(run: RayRun) -> dict[str, Placed]:
    return plan(run._recipe, initial_workers(run._recipe)).processes


def test_workers_ask_for_the_tags_that_they_use() -> None:
    tagged = Offers(({"CPU": 8, "rollout": 4}, {"CPU": 8, "train": 2}))
    assert wants_of(("rollout",), tagged, 1) == {"rollout": 1}
    assert wants_of(("train", "rollout"), tagged, 1) == {"train": 1, "rollout": 1}
    assert str(tagged) == "CPU 8, rollout 4; CPU 8, train 2"


def test_without_tags_they_ask_for_a_processor_and_with_gpus_for_those() -> None:
    assert wants_of(("rollout",), Offers(({"CPU": 8},)), 1) == {"CPU": 1}
    assert wants_of(("train",), Offers(({"CPU": 8, "GPU": 4},)), 1) == {"CPU": 1, "GPU": 1}
    assert wants_of(("train",), Offers(({"train": 8, "GPU": 4},)), 0) == {"train": 1}


def test_gpus_are_what_the_recipe_s_engines_and_trainers_take() -> None:
    assert (sampling_gpus(load_recipe("quickstart")), training_gpus(load_recipe("quickstart"), "agent")) == (1, 1)
    on_cpu = load_recipe("quickstart", ["policies.agent.engine.device=cpu", "policies.agent.trainer.device=cpu"])
    assert (sampling_gpus(on_cpu), training_gpus(on_cpu, "agent")) == (0, 0)
    spread = load_recipe("quickstart", ["policies.agent.engine={kind: vllm, server: {tensor_parallel: 4}}"])
    assert sampling_gpus(spread) == 4
    elsewhere = load_recipe("quickstart", ["policies.agent.engine={kind: vllm, server: {url: 'http://10.0.0.9:8000'}}"])
    assert sampling_gpus(elsewhere) == 0


def test_nodes_join_by_url_and_the_token_is_in_no_argument(tmp_path: Path) -> None:
    run = run_of(tmp_path, offers=Offers(({"rollout": 1},)))
    member = run._joining(planned(run)["rollout-0"])
    words = member.arguments(HERE)
    assert words[:5] == ["rollout", "--join", "http://10.0.0.5:8000", "--name", "rollout-0"]
    assert words[words.index("--host") + 1] == "10.0.0.7"
    assert run._folder.token not in words
    assert member.wants == {"rollout": 1}
    assert member.log == run._folder.log("rollout-0")


def test_with_engine_processes_the_nodes_only_play(tmp_path: Path) -> None:
    run = run_of(tmp_path, "rollout.engines=1", offers=Offers(({"rollout": 1},)))
    assert run._joining(planned(run)["rollout-0"]).wants == {"CPU": 1}
    assert run._joining(Placed("engine-0", "engine", ("--name", "engine-0"))).wants == {"rollout": 1}


def test_a_stage_joins_by_url_and_takes_the_trainers_device(tmp_path: Path) -> None:
    stages = "policies.agent.stages={ref: {kind: reference}}"
    run = run_of(tmp_path, stages, offers=Offers(({"CPU": 8, "GPU": 1},)))
    (stage,) = [process for process in services(run._recipe) if process.role == "stage"]
    member = run._joining(stage)
    words = ["stage", "--join", "http://10.0.0.5:8000", "ref", "--policy", "agent", "--name", "stage-agent-ref-0"]
    assert member.arguments(HERE) == words
    assert member.wants == {"CPU": 1, "GPU": 1}


def test_ranks_meet_where_rank_zero_is(tmp_path: Path) -> None:
    run = run_of(tmp_path, "trainer.ranks=2", "runtime.mode=multiplexed", offers=Offers(({"train": 2},)))
    trainer = planned(run)["trainer-agent"]
    members = [run._rank(trainer, rank) for rank in (0, 1)]
    assert [member.name for member in members] == ["trainer-agent", "trainer-agent-rank1"]
    assert all(member.wants == {"train": 1, "rollout": 1} for member in members)
    words = ["trainer", str(run._folder.root), "--policy", "agent", "--ranks", "2"]
    assert members[1].arguments(HERE) == [*words, "--rank", "1", "--rendezvous", "10.0.0.5:4711"]


def test_one_rank_needs_nobody_to_meet(tmp_path: Path) -> None:
    run = run_of(tmp_path, offers=Offers(()))
    member = run._rank(planned(run)["trainer-agent"], 0)
    assert member.arguments(HERE) == ["trainer", str(run._folder.root), "--policy", "agent"]


def test_a_run_that_serves_no_weights_is_refused(tmp_path: Path) -> None:
    folder = RunFolder.create(load_recipe("quickstart"), tmp_path)
    with pytest.raises(RunError, match="serves none"):
        RayRun(folder, lambda status: None)
    assert SERVED in Where("ray").overrides


def test_an_address_without_ray_is_refused() -> None:
    with pytest.raises(ConfigError, match="of a Ray cluster"):
        Where("local", "10.0.0.5:6379")


@pytest.mark.needs("ray")
def test_a_client_s_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="on no node of its cluster"):
        connect("ray://10.0.0.5:10001", "test")
