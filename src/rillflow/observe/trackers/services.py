"""Weights & Biases, and MLflow.

In Weights & Biases each policy and the held-out rewards have their own step axis, because they advance at their own
pace; a resumed run has the same id, and offline each start writes another folder of that id. In MLflow points carry
their own time, so that a server keeps one that is sent again only once. The recipe is written as parameters when the
run is made; a server does not let them change later.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rillflow.config.runs import MlflowConfig, WandbConfig
from rillflow.observe.follower import Outcome
from rillflow.observe.trackers.feed import Point, Tracked, flat

# ---------------------------------------------------------------- Weights & Biases


UPLOAD = 20.0  # seconds for what is still to be uploaded at the end; the rest stays on disk for `wandb sync`


class Wandb:
    def __init__(self, settings: WandbConfig, run: Tracked) -> None:
        import wandb  # an extra, and seconds to import

        self._id = run.key
        online = settings.mode == "online"
        if online and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("W&B has no API key: set WANDB_API_KEY, or observe.trackers.wandb.mode=offline")
        folder = run.folder / "trackers"
        folder.mkdir(exist_ok=True)
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name or run.name,
            tags=settings.tags,
            mode=settings.mode,
            id=self._id,
            resume="allow" if online else None,
            dir=folder,
            config=dict(run.recipe),
            allow_val_change=True,  # a resumed run may have more steps
            settings=wandb.Settings(console="off", silent=True, finish_timeout=UPLOAD),
        )
        self._defined: set[str] = set()

    @property
    def ids(self) -> dict[str, str]:
        return {"id": self._id}

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            axis = point.prefix + point.axis
            for name in {axis, *point.named} - self._defined:
                self._run.define_metric(name, **({"hidden": True} if name == axis else {"step_metric": axis}))
                self._defined.add(name)
            self._run.log({axis: point.step, **point.named})

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=0 if outcome == "finished" else 1)


# ---------------------------------------------------------------- MLflow


# The limits of a server.
_METRICS, _PARAMETERS, _KEY, _VALUE = 1000, 100, 250, 6000
_REFUSED = re.compile(r"[^\w\-. :/]")  # in a name
_ENDS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class Mlflow:
    def __init__(self, settings: MlflowConfig, run: Tracked) -> None:
        from mlflow import MlflowClient  # an extra, and seconds to import
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = MlflowClient(settings.tracking_uri)
        if "id" in run.ids:
            self._id = run.ids["id"]
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._create(settings, run)

    def _create(self, settings: MlflowConfig, run: Tracked) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(settings.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(settings.experiment)
        made = self._client.create_run(experiment, tags=settings.tags, run_name=settings.name or run.name)
        texts = {_key(name): value[:_VALUE] for name, value in flat(run.recipe).items()}
        for some in _batches([Param(name, value) for name, value in texts.items()], _PARAMETERS):
            self._client.log_batch(made.info.run_id, params=some)
        return str(made.info.run_id)

    @property
    def ids(self) -> dict[str, str]:
        return {"id": self._id}

    def write(self, points: Sequence[Point]) -> None:
        metrics = [
            self._metric(_key(name), value, int(point.time * 1000), point.step)
            for point in points
            for name, value in point.named.items()
        ]
        for some in _batches(metrics, _METRICS):
            self._client.log_batch(self._id, metrics=some)

    def close(self, outcome: Outcome) -> None:
        self._client.set_terminated(self._id, _ENDS[outcome])


def _key(name: str) -> str:
    return _REFUSED.sub("_", name)[:_KEY]


def _batches(items: list[Any], most: int) -> list[list[Any]]:
    return [list(items[first : first + most]) for first in range(0, len(items), most)]
