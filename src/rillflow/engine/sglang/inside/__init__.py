"""What runs inside SGLang's processes, in SGLang's own environment: this folder is on their PYTHONPATH, beside that of
what reads and writes weights inside every kind of server.

The modules here import nothing of Rillflow, and nothing of SGLang.
"""
