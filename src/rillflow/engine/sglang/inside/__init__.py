"""What runs inside SGLang's processes, in SGLang's own environment: this folder is on their PYTHONPATH, and so is the
one of what reads and writes weights inside vLLM, which is the same for both.

The modules here import nothing of Rillflow, and nothing of SGLang.
"""
