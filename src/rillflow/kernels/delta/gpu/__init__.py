"""Deltas of tensors on a CUDA device, written by Triton kernels: the same format as on the host, and the same numbers.

They are for publishers: a trainer's weights stay on its GPU, and only the coded changes leave it. Servers decode them
by torch alone (`engine.servers.inside.rillflow_delta`).
"""

from rillflow.kernels.delta.gpu.encode import encode_gpu, encode_many
from rillflow.kernels.delta.gpu.fingerprint import fingerprint_gpu, fingerprints_gpu

__all__ = ["encode_gpu", "encode_many", "fingerprint_gpu", "fingerprints_gpu"]
