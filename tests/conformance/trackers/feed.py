"""Runs in the trackers' environment: feed the trackers of a run folder, once for each file of lines.

    python feed.py RUN FILE…

Each file is appended to the run's `metrics.jsonl`, as a run and then its resumes would do. Prints, as JSON, what a
person would have been told, and what the MLflow server has of the run then.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rillflow.observe.trackers import Trackers
from rillflow.runtime.folder import RunFolder


def main() -> None:
    folder = RunFolder.open(sys.argv[1])
    news: list[str] = []
    for number, file in enumerate(sys.argv[2:], 1):
        with open(folder.metrics, "a") as metrics:
            metrics.write(Path(file).read_text())
        trackers = Trackers(folder)
        trackers.start()
        news += trackers.close("finished" if number == len(sys.argv[2:]) else "stopped", 120.0)
    print(json.dumps({"news": news, "mlflow": of_mlflow(folder)}))


def of_mlflow(folder: RunFolder) -> dict[str, Any]:
    from mlflow import MlflowClient

    settings = folder.recipe.observe.trackers.mlflow
    assert settings is not None
    client = MlflowClient(settings.tracking_uri)
    experiment = client.get_experiment_by_name(settings.experiment)
    runs = client.search_runs([experiment.experiment_id])
    run = runs[0]
    history = {
        name: [(found.step, found.value, found.timestamp) for found in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    about = {"name": run.info.run_name, "status": run.info.status, "tags": run.data.tags, "params": run.data.params}
    return {"runs": len(runs), "history": history, **about}


if __name__ == "__main__":
    main()
