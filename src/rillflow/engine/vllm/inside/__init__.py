"""What runs inside vLLM's processes, in vLLM's own environment: this folder is on their PYTHONPATH.

The modules here import nothing of Rillflow, and of vLLM only what both of the tried releases (0.25, 0.32) have.
"""
