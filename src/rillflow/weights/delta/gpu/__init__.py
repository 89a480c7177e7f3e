"""Deltas of tensors on a CUDA device, by kernels: the same format and the same checks as on the host."""

from rillflow.weights.delta.gpu.decode import apply_gpu_, apply_many_, decode_gpu, decode_many
from rillflow.weights.delta.gpu.encode import encode_gpu, encode_many
from rillflow.weights.delta.gpu.fingerprint import fingerprint_gpu, fingerprints_gpu

__all__ = [
    "apply_gpu_",
    "apply_many_",
    "decode_gpu",
    "decode_many",
    "encode_gpu",
    "encode_many",
    "fingerprint_gpu",
    "fingerprints_gpu",
]
