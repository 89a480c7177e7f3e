"""What runs inside the processes of every kind of server, in its own environment: this folder is on their PYTHONPATH.

The modules here import nothing of Rillflow, and of a server only what all of its tried releases have.
"""
