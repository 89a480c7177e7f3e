"""The names that a recipe may use for the data algorithms that come with Rillflow."""

from __future__ import annotations

from rillflow.contracts import Curator, Filter, Sampler
from rillflow.dataflow.hooks.curators.curriculum import Curriculum
from rillflow.dataflow.hooks.curators.greso import Greso
from rillflow.dataflow.hooks.curators.mixing import Mixing
from rillflow.dataflow.hooks.curators.solved import Solved
from rillflow.dataflow.hooks.filters.length_band import LengthBand
from rillflow.dataflow.hooks.filters.overlong import Overlong
from rillflow.dataflow.hooks.filters.staleness import Staleness
from rillflow.dataflow.hooks.filters.zero_variance import ZeroVariance
from rillflow.dataflow.hooks.samplers.earliest_deadline import EarliestDeadline
from rillflow.dataflow.hooks.samplers.fifo import Fifo
from rillflow.dataflow.hooks.samplers.replay import Replay

CURATORS: dict[str, type[Curator]] = {
    "curriculum": Curriculum,
    "greso": Greso,
    "mixing": Mixing,
    "solved": Solved,
}
FILTERS: dict[str, type[Filter]] = {
    "length_band": LengthBand,
    "overlong": Overlong,
    "staleness": Staleness,
    "zero_advantage": ZeroVariance,
    "zero_variance": ZeroVariance,
}
SAMPLERS: dict[str, type[Sampler]] = {
    "earliest_deadline": EarliestDeadline,
    "fifo": Fifo,
    "replay": Replay,
}
