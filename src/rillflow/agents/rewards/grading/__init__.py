"""Grading that may hang or eat memory, in processes of its own."""
