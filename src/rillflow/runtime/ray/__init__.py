"""A run whose workers are placed on a Ray cluster."""
