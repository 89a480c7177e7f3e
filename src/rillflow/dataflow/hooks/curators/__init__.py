"""Curators decide which prompts are played. One small class per file."""
