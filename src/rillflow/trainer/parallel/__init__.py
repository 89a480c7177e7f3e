"""Ranks that train one policy together, as peers."""
