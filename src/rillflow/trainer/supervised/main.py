"""One rank of `rillflow fit`: reads the rows, trains, exports the model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from rillflow.config.supervised import FitRecipe
from rillflow.contracts import PromptSource
from rillflow.trainer.parallel.address import Place
from rillflow.trainer.parallel.rendezvous import connect, device_of
from rillflow.trainer.process import prepare_torch, stops_on_signal
from rillflow.trainer.supervised.assembly import assemble
from rillflow.trainer.supervised.examples import Examples, read_examples
from rillflow.trainer.supervised.export import export
from rillflow.trainer.supervised.fit import Fit, Progress
from rillflow.trainer.supervised.texts import Writer

log = logging.getLogger(__name__)

MODEL = "model"  # the folder of the finished model, in the run's


def run_fit(
    recipe: FitRecipe,
    folder: Path,
    train: PromptSource,
    heldout: PromptSource | None,
    *,
    place: Place | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> bool:
    """Train to the end and export the model; False when a signal came before. Started again, it goes on from its last
    checkpoint. Of several ranks each runs this at its own `place`."""
    stop = threading.Event()
    place = place or Place()
    device = device_of(recipe.trainer.device, place.rank)
    with stops_on_signal(stop), connect(place, device) as peers:
        prepare_torch(recipe.seed, recipe.runtime.threads, deterministic=recipe.runtime.deterministic)
        trained = assemble(recipe, peers, device)
        writer = Writer.load(recipe.model)
        longest = recipe.data.longest or int(getattr(trained.model.config, "max_position_embeddings", 1 << 30))
        fit = Fit(
            recipe,
            folder,
            trained,
            peers,
            examples=_read(train, recipe.data.train.origin, recipe, writer, longest),
            heldout=None if heldout is None else _read(heldout, "data.heldout", recipe, writer, longest),
            stop=stop.is_set,
            report=report,
        )
        if not fit.run():
            return False
        export(recipe, trained, folder / MODEL, peers)
    return True


def _read(source: PromptSource, origin: str, recipe: FitRecipe, writer: Writer, longest: int) -> Examples:
    examples = read_examples(source, origin, recipe, writer, longest)
    if examples.left_out:
        log.warning("%s: %d rows have more than %d tokens: left out", origin, examples.left_out, longest)
    return examples
