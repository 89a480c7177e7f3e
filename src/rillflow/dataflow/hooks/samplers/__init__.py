"""Samplers pick which ready groups make the next batch. One small class per file."""
