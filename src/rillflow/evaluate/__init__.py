"""Benchmarks and the avg@k protocol: episodes played as a rollout node plays them, and what they come to."""
