"""Rillflow: dataflow-oriented reinforcement learning for agentic language models."""

__version__ = "0.1.0"
