"""Weights & Biases. Each policy and the held-out rewards have their own step axis, because they advance at their own
pace; a resumed run has the same id, and offline each start writes another folder of that id."""

from __future__ import annotations

from collections.abc import Sequence

from rillflow.config.observe import WandbConfig
from rillflow.observe.follower import Outcome
from rillflow.observe.trackers.base import Point, Tracked

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
