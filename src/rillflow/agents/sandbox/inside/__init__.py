"""The code that runs inside the sandbox. It imports only the standard library and this folder.

It holds no secrets: a candidate may read and change all of it in its own process, and its answers are judged by
processes that it cannot reach.
"""
