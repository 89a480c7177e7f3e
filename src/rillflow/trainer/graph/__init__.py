"""A trainer's step as a graph of nodes: the names that a user's own node needs."""

from rillflow.trainer.batches import Databuffer
from rillflow.trainer.graph.nodes import function
from rillflow.trainer.graph.worker import Step

__all__ = ["Databuffer", "Step", "function"]
