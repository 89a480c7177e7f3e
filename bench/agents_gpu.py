"""Small agents learn on one GPU: sums of reasoning-gym, a search agent on 2Wiki, AgentFlow's planner, or a text game.

Each case is its shipped recipe, run by the command that a user types, with vLLM and the trainer on one GPU. It
reports the reward of the first and the last steps, and the mean reward of held-out prompts before and after.

    python -m bench.agents_gpu --model smollm2-135m-instruct.gguf --case reasoning --json -
    python -m bench.agents_gpu --model … --case search --data FOLDER      # FOLDER/qa/2wiki_*.jsonl, as $RILLFLOW_DATA
    python -m bench.agents_gpu --model … --case planner                   # look-ups and sums by tools (tally)
    python -m bench.agents_gpu --model … --case game                      # needs textworld-express and Java

`search` and `planner` begin with a supervised warm start (`search_warm_gpu`, `agentflow_tally_warm_gpu`). Where
reasoning-gym is not installed, its prompts are read from FOLDER/reasoning, which `--prepare FOLDER` writes where it is.
`--engine embedded --steps 2` tries a case on a CPU, with next to nothing of it. All commands of a case share `--limit`:
when it is used up they are stopped as by Ctrl-C, and the results so far are reported.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.common import Report, parser
from rillflow.config import load_recipe
from rillflow.config.load import read_raw
from rillflow.dataflow.sources import open_source
from rillflow.observe.metrics import Metrics, read_metrics
from rillflow.weights.models import model_from_gguf

CASES = {
    "reasoning": "reasoning_gpu",
    "search": "search_agent_gpu",
    "planner": "agentflow_tally_gpu",
    "game": "text_game_gpu",
}
WARM = {"search": "search_warm_gpu", "planner": "agentflow_tally_warm_gpu"}
WINDOW = 10  # steps over which the reward is averaged, at both ends
INTERRUPTED = 130  # the exit code of a run that was stopped
STOPPING = 60.0  # seconds that a stopped run gets to end its processes
REWARD = Path(__file__).with_name("agents_gpu_reward.py")


def prepare(folder: Path) -> None:
    """Write the prompts of the reasoning case as files, for a machine without reasoning-gym."""
    target = folder / "reasoning"
    target.mkdir(parents=True, exist_ok=True)
    data = load_recipe(CASES["reasoning"]).data
    for split, (config,) in (("train", data.prompts), ("heldout", data.heldout)):
        source = open_source(config, seed=0, shuffle=False)
        rows = [source.at(index) for index in range(source.length)]
        lines = [
            json.dumps({"id": row.id, "question": row.payload["question"], "answer": row.payload["answer"]})
            for row in rows
        ]
        (target / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def overrides(arguments: argparse.Namespace, model: str) -> list[str]:
    """The overrides of the recipe for this machine."""
    agent = "policies.agent"
    changed = [
        f"{agent}.model={model}",
        f"seed={arguments.seed}",
        f"trainer.steps={arguments.steps}",
        f"trainer.checkpoint_every={arguments.steps}",
        "observe.trackers.tensorboard=false",
        "observe.plot=false",
        "runtime.start_timeout=600",
    ]
    if arguments.lr is not None:
        changed.append(f"trainer.lr={arguments.lr}")
    if arguments.case == "reasoning" and importlib.util.find_spec("reasoning_gym") is None:
        changed += [f"reward={REWARD}:reward", *_prepared(arguments.data)]
    if arguments.engine == "vllm":
        server = f"{agent}.engine.server"
        changed += [f"{server}.python={arguments.python}", f"{server}.memory=0.3"]
        changed += [f"{server}.arguments={json.dumps(arguments.server)}"] if arguments.server else []
        changed += ["trainer.dtype=bf16", "trainer.micro_tokens=32768", f"rollout.nodes={arguments.nodes}"]
        changed += ["rollout.engines=1", "rollout.episodes=128", "rollout.refresh_every=0.05"]
        return changed
    context = 512 if arguments.model == "tiny" else 2048
    changed.append(f"{agent}.engine={{kind: embedded, dtype: fp32, device: cpu, slots: 8, context: {context}}}")
    changed += ["trainer.batch_groups=2", "dataflow.group_size=2", "rollout.episodes=8", "dataflow.filters=[]"]
    changed += ["rollout.episode_timeout=600", "runtime.threads=0", f"{agent}.sampling.max_tokens=8"]
    return changed


def _prepared(data: str | None) -> list[str]:
    if data is None:
        raise SystemExit("reasoning-gym is not installed: give --data FOLDER that --prepare wrote elsewhere")
    files = {split: Path(data).resolve() / "reasoning" / f"{split}.jsonl" for split in ("train", "heldout")}
    return [f"data.prompts=[{{path: {files['train']}}}]", f"data.heldout=[{{path: {files['heldout']}}}]"]


def rillflow(arguments: argparse.Namespace, deadline: float, runs: Path, *words: str) -> Path:
    """A command, with its words where ours go, to its end or the deadline; its run's logs are shown if it fails.

    What it gives is the run's folder. `runs` may have those of earlier attempts in it (`--keep`).
    """
    environment = os.environ | ({"RILLFLOW_DATA": str(Path(arguments.data).resolve())} if arguments.data else {})
    command = [sys.executable, "-m", "rillflow", *words, "--runs", str(runs)]
    before = set(runs.glob("*"))
    with subprocess.Popen(command, stdout=sys.stderr, env=environment) as process:
        code = ended(process, deadline)
    made = sorted(set(runs.glob("*")) - before)
    if code not in (0, INTERRUPTED) or not made:
        for log in sorted(log for run in made for log in run.glob("logs/*")):
            sys.stderr.write(f"--- {log.name}\n{log.read_text()[-3000:]}\n")
        raise SystemExit(f"rillflow {words[0]} {words[1]} ended with {code}")
    return made[-1]


def ended(process: subprocess.Popen[Any], deadline: float) -> int:
    """Return its exit code. A process that still runs at the deadline is asked to stop, then killed."""
    try:
        return process.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(STOPPING)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def warm(arguments: argparse.Namespace, deadline: float, recipe: str, model: str, folder: Path) -> str:
    """The model of the supervised start."""
    changed = [f"model={model}"]
    if arguments.engine == "vllm":
        changed.append("trainer.dtype=bf16")
    else:
        changed += ["trainer.steps=1", "trainer.batch_groups=1", "data.train.arguments.count=8"]
    made = rillflow(arguments, deadline, folder / "warm", "fit", recipe, *changed) / "model"
    if not made.is_dir():
        raise SystemExit(f"the supervised start did not end within --limit {arguments.limit:g}")
    return str(made)


def play(arguments: argparse.Namespace, deadline: float, model: str, folder: Path) -> Metrics:
    if arguments.case in WARM:
        model = warm(arguments, deadline, WARM[arguments.case], model, folder)
    changed = overrides(arguments, model)
    if arguments.engine == "embedded":
        data = read_raw(CASES[arguments.case])["data"]
        for key, few in (("prompts", 64), ("heldout", 4)):
            changed.append(f"data.{key}{'.0' if isinstance(data[key], list) else ''}.limit={few}")
    run = rillflow(arguments, deadline, folder / "runs", "run", CASES[arguments.case], *changed)
    return read_metrics(run / "metrics.jsonl", "agent")


def tell(report: Report, case: str, metrics: Metrics, seconds: float) -> None:
    """Return the available results: a run that was stopped may have no step, or no evaluation after the first."""
    steps = metrics.of("agent")
    rewards = [step["reward_mean"] for step in steps]
    rows: list[tuple[str, float, str]] = [
        (f"reward, {which} {len(some)} steps", statistics.mean(some), "reward")
        for which, some in (("first", rewards[:WINDOW]), ("last", rewards[-WINDOW:]))
        if some
    ]
    rows += [("held-out before", done["reward"], "reward") for done in metrics.evaluations[:1]]
    for done in metrics.evaluations[1:][-1:]:
        rows.append((f"held-out after {done['version']} versions", done["reward"], "reward"))
    rows += [("steps", float(len(steps)), ""), ("seconds of everything", seconds, "s")]
    for name, value, unit in rows:
        report.add(f"{case}: {name}", value, None, unit=unit, reason="ours alone")
    for step, reward in zip(steps, rewards, strict=True):
        report.add(f"{case}: reward of step {step['step']}", reward, None, unit="reward", reason="the curve")


def read_arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--model", default="tiny", help="a GGUF file or a Hugging Face folder")
    made.add_argument("--case", choices=tuple(CASES), default="reasoning")
    made.add_argument("--engine", choices=("vllm", "embedded"), default="vllm")
    made.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    made.add_argument("--steps", type=int, default=120)
    made.add_argument("--lr", type=float, help="default: the recipe's")
    made.add_argument("--seed", type=int, default=7)
    made.add_argument("--nodes", type=int, default=4)
    made.add_argument("--server", action="append", default=[], help="a further argument of the vLLM server")
    made.add_argument("--data", metavar="FOLDER", help="where the data sets are")
    made.add_argument("--prepare", metavar="FOLDER", help="write the prompts of the reasoning case there, and end")
    made.add_argument("--limit", type=float, default=540.0, help="seconds that all commands may take")
    made.add_argument("--keep", metavar="FOLDER", help="keep what is written in this folder")
    return made.parse_args()


def main() -> None:
    arguments = read_arguments()
    deadline = time.monotonic() + arguments.limit
    if arguments.prepare:
        prepare(Path(arguments.prepare))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model: Any = arguments.model
        if model != "tiny":
            path = Path(model).resolve()
            model = str(model_from_gguf(path, folder / "models") if path.suffix == ".gguf" else path)
        begun = time.monotonic()
        metrics = play(arguments, deadline, model, folder)
        report = Report("agents_gpu")
        tell(report, arguments.case, metrics, time.monotonic() - begun)
        report.finish(arguments.json)


if __name__ == "__main__":
    main()
