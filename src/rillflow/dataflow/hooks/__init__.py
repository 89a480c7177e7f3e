"""The data algorithms of a run: curators, filters and a sampler, by name or as `module:Class`, each with its options.

To add one, write a class and name it in `build`. The ledger calls `running.Hooks`.
"""

from rillflow.dataflow.hooks.build import CURATORS, FILTERS, SAMPLERS
from rillflow.dataflow.hooks.running import Hooks

__all__ = ["CURATORS", "FILTERS", "SAMPLERS", "Hooks"]
