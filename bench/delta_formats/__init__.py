"""Other systems' formats for the difference of two versions, reimplemented from their publications, bit-exact.

A version is a matrix of bits for each tensor (unsigned integers of the weights' width; a vector is one column wide).
Headers are as small as each format's own; checksums, which some of them also send, are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.delta_formats import astraflow, pulse, slime, verl

Array = npt.NDArray[np.unsignedinteger[Any]]
Bits = dict[str, Array]


class Format(NamedTuple):
    """`encode(old, new)` makes bytes of two versions; `apply(held, data)` makes the new of the old one, in place."""

    encode: Callable[[Bits, Bits], bytes]
    apply: Callable[[Bits, bytes], None]


FORMATS = {
    "AstraFlow": Format(astraflow.encode, astraflow.apply),
    "verl": Format(verl.encode, verl.apply),
    "slime, positions + xor": Format(slime.encode_positions, slime.apply_positions),
    "slime, xor": Format(slime.encode_xor, slime.apply_xor),
    "slime, overwrite": Format(slime.encode_overwrite, slime.apply_overwrite),
    "slime, gaps": Format(slime.encode_gaps, slime.apply_gaps),
    "PULSE": Format(pulse.encode, pulse.apply),
}
