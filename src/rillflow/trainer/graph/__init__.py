"""A trainer's step as a graph of nodes: what a user needs to add one."""

from rillflow.trainer.graph.databuffer import Databuffer
from rillflow.trainer.graph.registry import function
from rillflow.trainer.graph.step import Step

__all__ = ["Databuffer", "Step", "function"]
