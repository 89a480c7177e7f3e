"""Deltas of tensors on a CUDA device, written by Triton kernels: the same format as on the host, and the same numbers.

They are for publishers: a trainer's weights stay on its GPU, and only the coded changes leave it. A version of SmolLM2
takes its trainer 0.05 s on an H200 (`bench/results/async_gpu-h200.json`), beside steps of 0.42 s. Servers decode them
by torch alone (`engine.servers.inside.rillflow_delta`).
"""

from rillflow.kernels.delta.gpu.encode import encode_gpu, encode_many
from rillflow.kernels.delta.gpu.fingerprint import fingerprint_gpu, fingerprints_gpu

__all__ = ["encode_gpu", "encode_many", "fingerprint_gpu", "fingerprints_gpu"]
