"""Sessions, their rewards and their log."""
