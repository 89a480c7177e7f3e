"""Compile the kernels of the CPU, so that processes which start together find their machine code instead of compiling.

python -m scripts.compile_kernels
"""

from __future__ import annotations

import torch

from rillflow.kernels.decode import compile_now
from rillflow.trainer.fused import compile_ahead
from rillflow.weights.delta import Ahead

CPU = torch.device("cpu")


def main() -> None:
    compile_now()
    compile_ahead().join()
    for dtype in (torch.bfloat16, torch.float32):
        Ahead(dtype, CPU, reads=True).wait(600)


if __name__ == "__main__":
    main()
