"""The simulation of `bench.scale`, where the answer is known without it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bench
from bench import scale_page
from bench.scale_costs import Costs, Curve, LedgerCosts, PartCosts, call_and_each, recorded
from bench.scale_model import Simulation
from bench.scale_queues import Clock, Engine, Server
from bench.scale_world import MODELS, Device, Work, World, by_host, centralised, world_of

NO_PARTS = PartCosts(**dict.fromkeys(PartCosts.__dataclass_fields__, 0.0))
EQUAL = Work(turns=2, mean_tokens=100.0, sigma=0.0, most_tokens=1e9, given_tokens=0, tool_seconds=0.0)
LONG_TAILED = replace(EQUAL, sigma=1.0, tool_seconds=0.5)


def costs(**ledger: float) -> Costs:
    """Nothing costs anything but what is given."""
    named: dict[str, Any] = {
        name: Curve((1.0,), (ledger.get(name, 0.0),)) for name in LedgerCosts.__dataclass_fields__ if name != "sync"
    }
    return Costs(LedgerCosts(**named, sync=0.0), NO_PARTS)


def world(**changes: Any) -> World:
    made = World(nodes=4, ranks=2, groups=8, device=Device(0.01, 0.0, 1e9), work=EQUAL, slots=16)
    return replace(made, **changes)


# ---------------------------------------------------------------- what it is made of


def test_a_curve_is_straight_on_logarithmic_scales_and_goes_on_so() -> None:
    curve = Curve((10, 1000), (1.0, 100.0))
    assert curve.at(1) == 1.0
    assert curve.at(100) == pytest.approx(10.0)
    assert curve.at(10_000) == pytest.approx(1000.0)
    assert Curve((10, 1000), (5.0, 1.0)).at(10_000) == 1.0


def test_what_a_call_costs_is_told_apart_from_its_items() -> None:
    assert call_and_each((1, 3.0), (11, 13.0)) == (2.0, 1.0)


def test_costs_survive_json() -> None:
    made = costs(lease_call=0.5)
    assert Costs.load(made.dump()) == made
    assert made.flat() == made


def test_a_server_takes_one_job_after_the_other() -> None:
    server = Server()
    assert [server.serve(at, 2.0) for at in (0.0, 1.0, 10.0)] == [2.0, 4.0, 12.0]
    assert server.busy == 6.0


def test_an_engine_shares_its_time() -> None:
    """Alone a token takes 1 s, of two 2 s: three tokens alone, then two sequences with one and four left."""
    engine = Engine([0.0, 1.0, 2.0])
    engine.add(0.0, 4.0, 1, "first")
    engine.add(3.0, 4.0, 2, "second")
    assert engine.next_end() == 5.0
    assert engine.ended(5.0) == ["first"]
    assert engine.next_end() == 8.0
    engine.pause(5.0, 10.0)
    assert engine.next_end() == 18.0
    assert engine.ended(18.0) == ["second"]
    assert engine.tokens == pytest.approx(8.0)


def test_events_come_in_the_order_of_their_times() -> None:
    clock, seen = Clock(), []
    for time in (2.0, 1.0, 1.0):
        clock.at(time, lambda what: seen.append((clock.now, what)), len(seen) + time)
    assert clock.run(10.0) is False
    assert [time for time, _ in seen] == [1.0, 1.0, 2.0]


# ---------------------------------------------------------------- whole runs


def test_where_engines_are_the_limit_they_decode_all_the_time() -> None:
    outcome = Simulation(world(work=LONG_TAILED), costs()).run(30, 10)
    tokens = 4 * 16 / 0.01
    tools = 2 * 0.5 / (100 * 0.01)  # of the time of an episode's tokens: one pause between two turns
    assert outcome.rate == pytest.approx(tokens / 100 / (1 + tools / 2), rel=0.1)
    assert outcome.bottleneck == "rollout GPUs"
    assert outcome.wait > 0.5
    assert outcome.decision.branch == "grow"


def test_where_the_trainer_is_the_limit_it_never_waits() -> None:
    outcome = Simulation(world(device=Device(0.01, 0.0, 500.0)), costs()).run(20, 10)
    assert outcome.rate == pytest.approx(2 * 500.0 / 100, rel=0.02)
    assert outcome.wait < 0.02
    assert outcome.bottleneck == "training GPUs"


def test_where_the_ledger_is_the_limit_it_takes_what_its_cost_says() -> None:
    """Completions of a node that come together travel together: what each of them costs is the bound."""
    outcome = Simulation(world(nodes=16, groups=32), costs(complete_each=0.05)).run(10, 5)
    assert outcome.rate == pytest.approx(1 / 0.05, rel=0.05)
    assert outcome.bottleneck == "ledger"
    assert outcome.busy["ledger"] > 0.95


def test_nothing_beyond_the_bound_is_trained_and_admission_keeps_the_window() -> None:
    run = Simulation(world(work=LONG_TAILED, staleness=1, device=Device(0.01, 0.0, 5000.0)), costs())
    outcome = run.run(40, 5)
    assert max(run._stale) <= 1
    assert run._outstanding <= run.world.window
    assert outcome.expired > 0


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    runs = [Simulation(world(work=LONG_TAILED), costs(), seed).run(10, 5) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0].rate != runs[2].rate


def test_nodes_that_wait_for_tasks_cost_the_ledger_something() -> None:
    """A slow trainer: most nodes have nothing to play, and ask."""
    slow, asked = Device(0.01, 0.0, 2500.0), costs(nothing=0.001)
    busy = [Simulation(world(nodes=n, device=slow), asked).run(10, 5).busy["ledger"] for n in (8, 32)]
    assert busy[1] > 2 * busy[0]


def test_one_controller_is_held_up_by_the_bytes_that_pass_through_it() -> None:
    heavy = replace(costs(), parts=replace(NO_PARTS, put_byte=8e-6, get_byte=8e-6))
    ours, theirs = world(units=8), centralised(world())
    assert Simulation(theirs, heavy).run(10, 5).rate < 0.7 * Simulation(ours, heavy).run(10, 5).rate


def test_a_node_for_a_host_decodes_as_its_engines_do() -> None:
    """Eight engines behind one node: an eighth of the questions, the same tokens."""
    many = world(nodes=16, device=Device(0.01, 0.001, 1e9), groups=16)
    one_each, hosts = (Simulation(made, costs()).run(8, 4) for made in (many, by_host(many)))
    assert hosts.rate == pytest.approx(one_each.rate, rel=0.1)


def test_a_run_on_gpus_has_all_of_them_at_work() -> None:
    model = MODELS["32B"]
    made = world_of(64, model, NO_PARTS, 40)
    assert made.nodes * model.engine_gpus + made.ranks == 64
    assert by_host(made).capacity * by_host(made).nodes == made.capacity * made.nodes


def test_a_run_that_gets_nowhere_in_its_time_has_a_rate_all_the_same() -> None:
    outcome = Simulation(world(), costs(complete_each=10.0)).run(20, 10, most_seconds=100.0)
    assert outcome.steps == 0
    assert outcome.rate == 0.0
    assert outcome.bottleneck == "ledger"


def test_results_that_the_simulation_takes_from_other_benches_are_recorded() -> None:
    asked = [
        match.groups()
        for file in Path(bench.__file__).parent.glob("scale_*.py")
        for match in re.finditer(r'recorded\("([^"]+)", "([^"]+)"\)', file.read_text())
    ]
    assert len(asked) >= 4
    assert all(recorded(*name) > 0.0 for name in asked)


def test_a_result_that_is_not_recorded_is_named() -> None:
    with pytest.raises(SystemExit, match="has no result '9b: tokens a second'"):
        recorded("trainer-h200", "9b: tokens a second")


def test_the_page_has_the_figures_of_the_record() -> None:
    page = scale_page.PAGE.read_text()
    assert all(f"<!-- scale: {name} -->" in page for name in scale_page.BLOCKS)
    record = json.loads(scale_page.RECORD.read_text())
    assert scale_page.filled(page, record) == page, "run `python -m bench.scale_page`"
