"""The exponential function of float32 as plain arithmetic, so that compiled loops compute several at once.

The C library's function would be called for one number at a time. Within 1e-7 of the true value, relatively,
from e to the -87 to e to the 88; numbers beyond are replaced by these bounds. NaN stays NaN. The polynomial is that of
the Cephes library (Moshier, `expf`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rillflow.kernels.compile import inlined

_LOG2E = np.float32(1.4426950408889634)
# ln 2 in two parts, of which the first has so few bits that its multiples are exact.
_LN2, _LN2_REST = np.float32(0.693359375), np.float32(-2.12194440e-4)
_P5, _P4, _P3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P2, _P1, _P0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_ROUNDS = np.float32(12582912.0)  # a number that is added to it is rounded to a whole number
_LEAST, _MOST, _ONE = np.float32(-87.0), np.float32(88.0), np.float32(1.0)


@inlined
def exponential(x: Any) -> Any:
    x = _LEAST if x < _LEAST else x
    x = _MOST if x > _MOST else x
    n = (x * _LOG2E + _ROUNDS) - _ROUNDS
    r = (x - n * _LN2) - n * _LN2_REST
    p = ((((_P5 * r + _P4) * r + _P3) * r + _P2) * r + _P1) * r + _P0
    return (p * (r * r) + r + _ONE) * np.int32((np.int32(n) + 127) << 23).view(np.float32)
