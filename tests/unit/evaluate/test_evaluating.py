"""`rillflow eval` with a real engine and a real gateway: its episodes, its files, and that it continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rillflow
from rillflow.cli.main import app
from rillflow.config import load_recipe
from rillflow.evaluate.records import RecordFile
from rillflow.runtime.folder import RunFolder
from rillflow.weights import FolderStore
from rillflow.weights.models import export_model, load_policy_model, pick_device

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somewhere empty, with three questions of our own for GSM8K's."""
    from arithmetic import write_rows

    write_rows(tmp_path / "data", 3)
    monkeypatch.setenv("RILLFLOW_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


def call(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["eval", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def report(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "report.json").read_text())
    return found


QUICK = ("--samples", "2", "--max-tokens", "8", "engine.slots=4")


def test_the_same_seed_gives_the_same_answers_and_another_seed_others() -> None:
    for out, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        call("tiny", "--on", "gsm8k", *QUICK, "--seed", seed, "--out", out)
    prints = [report(out)["benchmarks"]["gsm8k"]["fingerprint"] for out in "abc"]
    assert prints[0] == prints[1]
    assert prints[0] != prints[2]
    found = report("a")["benchmarks"]["gsm8k"]
    assert (found["questions"], found["samples"], found["rewarded"], found["no_reward"]) == (3, 6, 6, {})
    assert found["mean_tokens"] > 0


def test_more_samples_and_questions_are_added_to_what_is_there() -> None:
    call("tiny", "--on", "gsm8k", *QUICK, "--limit", "2", "--out", "a")
    before = (Path("a") / "records" / "gsm8k.jsonl").read_bytes()
    call("tiny", "--on", "gsm8k", *QUICK, "--samples", "3", "--out", "a")
    after = (Path("a") / "records" / "gsm8k.jsonl").read_bytes()
    assert after.startswith(before)
    assert len(after.splitlines()) == 9
    call("tiny", "--on", "gsm8k", *QUICK, "--samples", "3", "--out", "whole")
    assert report("a")["benchmarks"]["gsm8k"]["fingerprint"] == report("whole")["benchmarks"]["gsm8k"]["fingerprint"]


def test_records_of_other_settings_are_never_mixed() -> None:
    call("tiny", "--on", "gsm8k", *QUICK, "--out", "a")
    assert "temperature differ" in call("tiny", "--on", "gsm8k", *QUICK, "--temperature", "0.5", "--out", "a", code=2)


def test_answers_are_graded_by_the_benchmark_and_vote() -> None:
    call(
        "tiny",
        "--on",
        "gsm8k",
        "--samples",
        "16",
        "--workflow",
        f"{HERE / 'arithmetic.py'}:right_at_first",
        "--out",
        "a",
    )
    found = report("a")["benchmarks"]["gsm8k"]
    file = RecordFile(Path("a") / "records" / "gsm8k.jsonl")
    records = file.of([(str(n), sample) for n in (1, 2, 3) for sample in range(16)])
    file.close()
    assert [one.reward for one in records] == [float(one.seed % 2) for one in records]
    assert {one.vote for one in records if one.id == "1"} == {"2", "3"}
    assert 0.0 < found["average"]["value"] < 1.0
    assert found["passed"]["16"]["value"] == 1.0
    low, high = found["average"]["bootstrap"]["low"], found["average"]["bootstrap"]["high"]
    assert low <= found["average"]["value"] <= high
    kept = rillflow.trajectories("a")
    assert (len(kept), len(rillflow.trajectories("a", reward=(1.0, None)))) == (
        48,
        sum(one.reward == 1 for one in records),
    )
    one = kept.infos(limit=1)[0]
    assert (one.kept, one.lane, one.source, one.node) == ("evaluation", "evaluation", "gsm8k", "evaluation")
    said = CliRunner().invoke(app, ["show", "a", one.id, "--tokens", "logprob"])
    assert said.exit_code == 0, said.output
    assert "assistant" in said.output


def test_a_workflow_that_fails_is_no_zero() -> None:
    failing = ("--workflow", f"{HERE / 'arithmetic.py'}:fails", "--out", "a")
    said = call("tiny", "--on", "gsm8k", *QUICK, *failing, code=1)
    assert "gsm8k has no score: every sample failed" in said
    found = report("a")["benchmarks"]["gsm8k"]
    assert (found["rewarded"], found["no_reward"], found["average"]) == (0, {"workflow_error": 6}, None)
    assert "no such luck" in (Path("a") / "records" / "gsm8k.jsonl").read_text()
    failed = list(rillflow.trajectories("a", status="failed"))
    assert len(failed) == 6
    assert "no such luck" in failed[0].error
    assert "in fails" in failed[0].error


def test_where_all_fails_it_stops_and_says_why() -> None:
    arguments = ("--workflow", f"{HERE / 'arithmetic.py'}:fails", "dataflow.max_failures=3", "--out", "a")
    said = call("tiny", "--on", "gsm8k", *QUICK, *arguments, code=2)
    assert "the first 3 episodes of gsm8k all failed" in said
    assert "no such luck" in said


GENEROUS = """
import json, os, urllib.request

bearer = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), bearer, method="POST")
    return urllib.request.urlopen(request, timeout=20).read()


asked = [{"role": "user", "content": "hello"}]
post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"model": "agent", "messages": asked, "max_tokens": 4})
post(os.environ["RILLFLOW_REWARD_URL"], {"value": 0.5})
"""


def test_an_agent_rewards_itself_only_where_the_recipe_lets_it(tmp_path: Path) -> None:
    """As in a run; with a workflow of the command line the benchmark decides."""
    (tmp_path / "generous.py").write_text(GENEROUS)
    raw = "extends: command_agent\nname: own\ncommand: python generous.py\nreward: null\nrewards: agent\n"
    (tmp_path / "own.yaml").write_text(raw)
    (tmp_path / "strict.yaml").write_text("extends: own.yaml\nreward: math\nrewards: recipe\n")
    call("tiny", "--on", "gsm8k", "--recipe", "own.yaml", *QUICK, "--limit", "1", "--out", "a")
    assert report("a")["benchmarks"]["gsm8k"]["average"]["value"] == 0.5
    call("tiny", "--on", "gsm8k", "--recipe", "strict.yaml", *QUICK, "--limit", "1", "--out", "b", code=1)
    assert "403" in (tmp_path / "b" / "records" / "gsm8k.jsonl").read_text()
    graded = ("--workflow", f"{HERE / 'arithmetic.py'}:right_at_first", "--out", "c")
    call("tiny", "--on", "gsm8k", "--recipe", "own.yaml", *QUICK, *graded)


def run_folder(runs: Path, recipe: str) -> RunFolder:
    folder = RunFolder.create(load_recipe(recipe), runs)
    for policy in folder.recipe.policies:
        store = FolderStore(folder.weights(policy))
        tensors = load_policy_model("tiny", "fp32", pick_device("cpu")).state_dict()
        for version in (0, 3):
            store.publish(tensors, version, store.head())
    return folder


def test_a_run_is_scored_by_its_own_workflow_on_what_it_holds_out(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "runs", "quickstart")
    said = call(str(folder.root), "--samples", "1", "--limit", "3", "--out", "a")
    assert "version 3 of agent (the latest)" in said
    (found,) = report("a")["benchmarks"].values()
    assert (found["questions"], found["rewarded"]) == (3, 3)
    assert report("a")["workflow"] == "rillflow.examples.stockroom:play"


def test_two_policies_play_together_and_the_first_has_the_trajectorys_reward(tmp_path: Path) -> None:
    raw = "extends: two_policies\nname: pair\nworkflow: arithmetic.py:rewards_itself\nreward: null\n"
    raw += "policies: {solver: {model: tiny}, checker: {model: tiny}}\n"
    (tmp_path / "arithmetic.py").write_text((HERE / "arithmetic.py").read_text())
    (tmp_path / "pair.yaml").write_text(raw)
    folder = run_folder(tmp_path / "runs", str(tmp_path / "pair.yaml"))
    call(str(folder.root), "--on", "gsm8k", *QUICK, "--out", "a")
    found = report("a")["benchmarks"]["gsm8k"]
    assert found["average"]["value"] == 0.25
    file = RecordFile(Path("a") / "records" / "gsm8k.jsonl")
    (record,) = file.of([("1", 0)])
    file.close()
    assert record.rewards == {"solver": 0.25, "checker": 1.0}
    assert record.calls == 2


def test_a_model_folder_is_a_checkpoint(tmp_path: Path) -> None:
    export_model(load_policy_model("tiny", "fp32", pick_device("cpu")).state_dict(), "tiny", tmp_path / "model")
    call("model", "--on", "gsm8k", *QUICK, "--out", "a", "--exact")
    assert report("a")["exact"] is True
    assert report("a")["benchmarks"]["gsm8k"]["rewarded"] == 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tiny", "--on", "gsm8"), "did you mean 'gsm8k'"),
        (("tiny", "--on", "gsm8k,gsm8k"), "named twice"),
        (("tiny",), "holds no prompts out"),
        (("nowhere", "--on", "gsm8k"), "model folder nowhere does not exist"),
        (("none.gguf", "--on", "gsm8k"), "none.gguf does not exist"),
        (("tiny", "--on", "gsm8k", "--engine", "magic"), "unknown engine 'magic'"),
        (("tiny", "--on", "gsm8k", "engine.slot=3"), "did you mean 'slots'"),
    ],
)
def test_what_cannot_work_is_told_before_anything_is_played(arguments: tuple[str, ...], said: str) -> None:
    assert said in call(*arguments, code=2)
