"""Advisories: the problems of a run with their numbers and what to do next, derived from the files of the run.

`FactReader` reads a run folder (and a live service's answers), `advise` applies the rules to the facts: pure, the
same facts always give the same advisories. Problems come first, then warnings; hints for tuning are given to healthy
runs only.
"""

from rillflow.observe.advisories.advisory import Advisory, Facts
from rillflow.observe.advisories.fact_reader import FactReader
from rillflow.observe.advisories.rules import advise

__all__ = ["Advisory", "FactReader", "Facts", "advise"]
