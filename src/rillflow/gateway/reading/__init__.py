"""Sampled ids to what the agent sees: text, stop strings, reasoning, tool calls."""
