"""Filters decide whether a complete group is trained on. One small class per file."""
