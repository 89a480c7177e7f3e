"""Weights as kernels see them: 8-byte words of 4 or 2 lanes, so that one load and one step of a scan serve several.

A cell is four consecutive words. Counters of eight classes share a 64-bit number, a byte each, within a cell; within a
block, which has fewer than 2**16 weights, four of them do, 16 bits each: the even ones and the odd ones. Constants of
kernels are upper case, as Triton's are: WIDTH, MANTISSA and EXPONENTS describe a dtype, LANES = 64 / WIDTH.

`majority` and `sum_of_bytes` are single instructions that the compiler does not find by itself. Triton's interpreter
has no instructions, so it computes the same by arithmetic.
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


# ---------------------------------------------------------------- words

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mixed(words, places, valid):
    """Return each word's term of the fingerprint: `places` count the tensor's words from 0."""
    z = words.to(tl.uint64, bitcast=True) + (places.to(tl.uint64) + 1) * GOLDEN
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    z = z ^ (z >> 31)
    return tl.where(valid, z.to(tl.int64, bitcast=True), 0)


@triton.jit
def words_at(address, at, weights, LANES: tl.constexpr):
    """Load the words `at` of `weights` weights, which begin and end at multiples of 16 bytes: two words at once."""
    pointer = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
    end = tl.multiple_of((weights + 2 * LANES - 1) // (2 * LANES) * 2, 2)
    return tl.load(pointer + at, mask=at < end, other=0)


@triton.jit
def weights_at(address, at, valid, WIDTH: tl.constexpr):
    """The bits of single weights, as `lane` has them; 0 where they are not valid."""
    if WIDTH == 16:
        bits = tl.load(address.to(tl.pointer_type(tl.int16)) + at, mask=valid, other=0).to(tl.int32) & 0xFFFF
    else:
        bits = tl.load(address.to(tl.pointer_type(tl.int32)) + at, mask=valid, other=0).to(tl.int64) & 0xFFFFFFFF
    return bits


@triton.jit
def half(words, j: tl.constexpr):
    """The low (0) or high (1) 32 bits of words: two weights of 16 bits, or one."""
    return (words >> (32 * j)).to(tl.int32)


@triton.jit
def lane(halves, k: tl.constexpr, WIDTH: tl.constexpr):
    """The bits of weight k of each half: as 32-bit numbers where they fit, else as 64-bit ones."""
    if WIDTH == 16:
        bits = (halves >> (16 * k)) & 0xFFFF
    else:
        bits = halves.to(tl.int64) & 0xFFFFFFFF
    return bits


@triton.jit
def ordered(bits, WIDTH: tl.constexpr):
    """Numbers in the order of the values, neighbours one apart."""
    SIGN: tl.constexpr = 1 << (WIDTH - 1)
    return tl.where((bits & SIGN) != 0, (2 * SIGN - 1) ^ bits, bits | SIGN)


@triton.jit
def change_of(old, new, WIDTH: tl.constexpr):
    """The difference in ULP, modulo 2**WIDTH, as a signed number."""
    HALF: tl.constexpr = 1 << (WIDTH - 1)
    return ((ordered(new, WIDTH) - ordered(old, WIDTH) + HALF) & (2 * HALF - 1)) - HALF


@triton.jit
def length_of(size, WIDTH: tl.constexpr):
    """floor(log2) of positive numbers; 0 of 0. By the exponent of a float that holds the number exactly."""
    size = tl.maximum(size, 1)
    if WIDTH == 16:
        length = (size.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    else:
        length = ((size.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023).to(tl.int32)
    return length


@triton.jit
def exponents_of(halves, WIDTH: tl.constexpr, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr):
    """The exponents of the weights of each half: of 16-bit ones, each in the low bits of its 16."""
    PAIR: tl.constexpr = 0x10001 if WIDTH == 16 else 1
    return (halves >> MANTISSA) & ((EXPONENTS - 1) * PAIR)


@triton.jit
def reached(exponents, limits, c: tl.constexpr, WIDTH: tl.constexpr):
    """Bit 8 (and 24) where the exponent is in class c or above. Byte c of `limits` is 256 less its start, or 0."""
    PAIR: tl.constexpr = 0x10001 if WIDTH == 16 else 1
    limit = ((limits >> (8 * (c % 8))) & 0xFF).to(tl.int32)
    return (exponents + limit * PAIR) & (0x100 * PAIR)


@triton.jit
def classes_of(exponents, limits_low, limits_high, WIDTH: tl.constexpr, CLASSES: tl.constexpr):
    """The class of each weight, times 256: in the low 16 bits, and in the high ones that of the other one."""
    found = tl.zeros_like(exponents)
    for c in tl.static_range(1, CLASSES):
        limits = limits_low if c < 8 else limits_high
        found += reached(exponents, limits, c, WIDTH)
    return found


@triton.jit
def exponent_bytes(words, WIDTH: tl.constexpr, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr):
    """The exponents of the weights of each word, a byte each: all four of 32 bits, or the low two."""
    low = exponents_of(half(words, 0), WIDTH, MANTISSA, EXPONENTS)
    return low | (exponents_of(half(words, 1), WIDTH, MANTISSA, EXPONENTS) << 8)


@triton.jit
def cell_bytes(x_0, x_1, x_2, x_3, WIDTH: tl.constexpr, MANTISSA: tl.constexpr, EXPONENTS: tl.constexpr):
    """The exponents of the four words of each cell, four bytes to a number: as many numbers as a word has weights."""
    e_0, e_1 = exponent_bytes(x_0, WIDTH, MANTISSA, EXPONENTS), exponent_bytes(x_1, WIDTH, MANTISSA, EXPONENTS)
    e_2, e_3 = exponent_bytes(x_2, WIDTH, MANTISSA, EXPONENTS), exponent_bytes(x_3, WIDTH, MANTISSA, EXPONENTS)
    if WIDTH == 32:
        e_0, e_1 = e_0 | (e_1 << 16), e_2 | (e_3 << 16)
    return e_0, e_1, e_2, e_3


@triton.jit
def at_least(exponents, carry, below):
    """A 1 in each byte of `exponents` that is not less than a number: `carry` carries its low seven bits into the
    highest bit of a byte, in each byte, and `below` is all ones if its own highest bit is 0."""
    sums = (exponents & 0x7F7F7F7F) + carry
    return (((sums & exponents) | ((sums | exponents) & below)) >> 7) & 0x01010101


@triton.jit
def shift_of(classes, k: tl.constexpr):
    """8 times the class of weight k of a half: where its byte is among the counters."""
    return ((classes >> (5 + 16 * k)) & 0x78).to(tl.int64)


@triton.jit
def one_of(shift, part: tl.constexpr, CLASSES: tl.constexpr):
    """A 1 in the byte of a class, if that is among the eight of this part."""
    one = tl.full([1], 1, tl.int64) << (shift & 63)
    if CLASSES > 8:
        one = tl.where((shift >> 6) == part, one, 0)
    return one


@triton.jit
def evens(counters):
    """The bytes of classes 0, 2, 4 and 6 as fields of 16 bits; of 1, 3, 5, 7 when shifted by 8 before."""
    return counters & 0x00FF00FF00FF00FF


@triton.jit
def field_of(even, odd, shift):
    """The 16-bit field of a class, given 8 times its number."""
    packed = tl.where((shift & 8) != 0, odd, even)
    return ((packed >> (shift & 48)) & 0xFFFF).to(tl.int32)


@triton.jit
def popcount(words):
    """Bits of 32-bit words."""
    x = words.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def put_bits(stream, at, values, valid):
    """Or numbers below 2**32 into a stream of 32-bit words, each from its bit `at` on."""
    shifted = values.to(tl.int64) << (at & 31).to(tl.int64)
    low = shifted.to(tl.int32)
    high = (shifted >> 32).to(tl.int32)
    tl.atomic_or(stream + (at >> 5), low, mask=valid & (low != 0), sem="relaxed")
    tl.atomic_or(stream + (at >> 5) + 1, high, mask=valid & (high != 0), sem="relaxed")


@triton.jit
def add_runs(stream, word, bits, first, last):
    """Add numbers to the 32-bit words of a stream, where those of a word are a run of lanes from a first to a last one,
    and no two have a bit in common: all that is ever added to a word is so, be it by others and at any time.

    A run's sum is a difference of prefix sums, modulo 2**32: two atomics a run instead of one for each lane.
    """
    sums = tl.cumsum(bits, 0)
    some = tl.where(last, sums, 0) - tl.where(first, sums - bits, 0)
    tl.atomic_add(stream + word, some, mask=first | last, sem="relaxed")


# ---------------------------------------------------------------- cells

# Classes of a cell are counted by its exponents, four to a number: three steps for four weights.
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
    and four times the limit (see `reached`). The sum of the low bits carries into the high one, and what is
    carried out of that is the majority of three bits."""
    return majority(high, low + (limit & LOW), limit & HIGH)


@triton.jit
def count_reached(high, low, limit, sums):
    """`sums` and 128 for each exponent that reaches the limit."""
    return sum_of_bytes(reaches(high, low, limit), sums)


@triton.jit
def in_byte(sums, byte: tl.constexpr):
    """Return the counts of `count_reached`, in the bytes of a number."""
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
            found = count_reached(high_1, low_1, limit, count_reached(high_0, low_0, limit, none))
            if PACKS == 4:
                found = count_reached(high_3, low_3, limit, count_reached(high_2, low_2, limit, found))
            if c < 4:
                above_0 += in_byte(found, c % 4)
            else:
                above_1 += in_byte(found, c % 4)
    above = above_0.to(tl.int64) | (above_1.to(tl.int64) << 32)
    # A class has the weights that reach it less those that reach the next: never negative, so no byte borrows.
    return above - (above >> 8)
