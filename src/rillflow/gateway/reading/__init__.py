"""Reads sampled text: reasoning, tool calls, stop strings."""
