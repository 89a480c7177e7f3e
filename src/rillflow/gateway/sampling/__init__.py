"""Engines as one source of tokens: the pool, the fleet behind it, and who may sample now."""
