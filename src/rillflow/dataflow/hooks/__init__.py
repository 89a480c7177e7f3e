"""The data algorithms of a run: curators, filters and a sampler, by name or as `module:Class`, each with its options.

Adding one is a file and a line in `registry`; `running.Hooks` is what the ledger talks to.
"""

from rillflow.dataflow.hooks.registry import CURATORS, FILTERS, SAMPLERS
from rillflow.dataflow.hooks.running import Hooks

__all__ = ["CURATORS", "FILTERS", "SAMPLERS", "Hooks"]
