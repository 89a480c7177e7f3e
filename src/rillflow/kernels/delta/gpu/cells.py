"""How many weights of a cell are of a class or above, by their exponents, four to a number: three steps for four."""

from __future__ import annotations

import triton
import triton.language as tl

from rillflow.kernels.delta.gpu.single import majority, sum_of_bytes

# The high bit of each of four bytes, and all others.
HIGH = tl.constexpr(0x80808080)
LOW = tl.constexpr(0x7F7F7F7F)


@triton.jit
def halved(exponents):
    """The high bits of exponents that are a byte each, and all others."""
    exponents = exponents.to(tl.uint32, bitcast=True)
    return exponents & HIGH, exponents & LOW


@triton.jit
def four_times(byte):
    """A byte, given as a number of 64 bits, in all bytes of one of 32."""
    return ((byte & 0xFF) * 0x01010101).to(tl.uint32)


@triton.jit
def reaches(high, low, limit):
    """The high bit of each byte in which exponent + limit reaches 256, given the high and the low bits of the exponents
    and four times the limit (see `words.reached`). The sum of the low bits carries into the high one, and what is
    carried out of that is the majority of three bits."""
    return majority(high, low + (limit & LOW), limit & HIGH)


@triton.jit
def at_least(high, low, limit, sums):
    """`sums` and 128 for each exponent that reaches the limit."""
    return sum_of_bytes(reaches(high, low, limit), sums)


@triton.jit
def in_byte(sums, byte: tl.constexpr):
    """Return the counts of `at_least`, in the bytes of a number."""
    return sums >> 7 if byte == 0 else sums << (8 * byte - 7)


@triton.jit
def count_classes(e_0, e_1, e_2, e_3, limits, last, PACKS: tl.constexpr):
    """The counters of the classes 0 to `last`, at most 7, of each cell, given its exponents: PACKS numbers are used."""
    high_0, low_0 = halved(e_0)
    high_1, low_1 = halved(e_1)
    high_2, low_2 = halved(e_2)
    high_3, low_3 = halved(e_3)
    none = tl.zeros_like(high_0)
    above_0, above_1 = none + 4 * PACKS, none
    for c in tl.static_range(1, 8):
        if c <= last:
            limit = four_times(limits >> (8 * c))
            found = at_least(high_1, low_1, limit, at_least(high_0, low_0, limit, none))
            if PACKS == 4:
                found = at_least(high_3, low_3, limit, at_least(high_2, low_2, limit, found))
            if c < 4:
                above_0 += in_byte(found, c % 4)
            else:
                above_1 += in_byte(found, c % 4)
    above = above_0.to(tl.int64) | (above_1.to(tl.int64) << 32)
    # What a class has is what reaches it less what reaches the next: never negative, so no byte borrows from another.
    return above - (above >> 8)
