"""What runs inside the processes of servers, in their own environment: this folder is on their PYTHONPATH.

The modules here import nothing of Rillflow, and of a server only what all of its tried releases have (vLLM 0.25 and
0.32, SGLang 0.5.23).
"""
