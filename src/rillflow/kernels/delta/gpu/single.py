"""Single instructions that the compiler does not find by itself: it takes the patterns apart before it looks for them.

The interpreter knows no instructions, so there, and only there, the patterns are what runs.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def majority(a, b, c):
    """Of numbers of type uint32, bit by bit."""
    if _INTERPRETED:
        found = (a & b) | ((a | b) & c)
    else:
        found = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xE8;", "=r,r,r,r", [a, b, c], dtype=tl.uint32, is_pure=True, pack=1
        )
    return found


@triton.jit
def sum_of_bytes(words, sums):
    """`sums` and all four bytes of each number; all of them of type uint32."""
    if _INTERPRETED:
        found = sums + (words & 0xFF) + ((words >> 8) & 0xFF) + ((words >> 16) & 0xFF) + (words >> 24)
    else:
        found = tl.inline_asm_elementwise(
            "dp4a.u32.u32 $0, $1, 0x01010101, $2;", "=r,r,r", [words, sums], dtype=tl.uint32, is_pure=True, pack=1
        )
    return found
