"""The toy tasks of the quickstart, the tutorial and the CPU recipes.

Each module holds one task: its prompts, its reward, its workflows where it has its own, and demonstrations for
supervised training. The product never imports this package; recipes name its functions. The same arguments of a
generator always give the same rows, and the splits `train` and `heldout` share no question.
"""
