"""The format of segments in numpy, without a compiled loop: slow and plain, what the fast code is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rillflow.errors import CorruptData
from rillflow.weights.delta.format import DAMAGED, MAX_RICE, Layout

Array = npt.NDArray[Any]


def pack_unary(quotients: Sequence[Array]) -> bytes:
    """Each number as that many zeros and a one."""
    if not quotients:
        return b""
    ends = np.cumsum(np.concatenate(quotients) + 1)
    bits = np.zeros(int(ends[-1]), np.bool_)
    bits[ends - 1] = True
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_unary(data: memoryview, count: int) -> Array:
    """The `count` numbers that `data` holds; CorruptData when it holds more, fewer or anything after them."""
    ones = np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").view(np.bool_))
    if len(ones) != count or len(data) != (int(ones[-1]) // 8 + 1 if count else 0):
        raise CorruptData(f"a delta has {len(ones)} gaps instead of {count}", DAMAGED)
    return np.diff(ones, prepend=-1) - 1


def pack_fields(fields: Sequence[tuple[Array, int]]) -> bytes:
    """Arrays of numbers below 2**width, each number in `width` (1 to 32) bits, without any space between."""
    if not fields:
        return b""
    values = np.concatenate([values.astype(np.uint64) for values, _ in fields])
    widths = np.repeat([width for _, width in fields], [len(values) for values, _ in fields]).astype(np.uint64)
    ends = np.cumsum(widths, dtype=np.uint64)
    total = int(ends[-1]) if len(ends) else 0
    starts = ends - widths
    at, shifts = (starts >> np.uint64(6)).astype(np.int64), starts & np.uint64(63)
    words = np.zeros(total // 64 + 2, np.uint64)
    firsts = np.flatnonzero(np.diff(at, prepend=-1))
    if total:
        words[at[firsts]] = np.bitwise_or.reduceat(values << shifts, firsts)
    # Only the last number that begins in a word can reach into the next one, so no index repeats.
    over = np.flatnonzero(shifts + widths > 64)
    words[at[over] + 1] |= values[over] >> (np.uint64(64) - shifts[over])
    return words.view(np.uint8)[: (total + 7) // 8].tobytes()


class Fields:
    """Reads what `pack_fields` wrote, array by array."""

    def __init__(self, data: memoryview) -> None:
        self._words = np.zeros(len(data) // 8 + 2, np.uint64)
        self._words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        self._at = 0

    def take(self, count: int, width: int) -> Array:
        """The next `count` numbers. The caller has checked that `data` holds the bits of all arrays it takes."""
        if not width:
            return np.zeros(count, np.int64)
        starts = np.arange(self._at, self._at + count * width, width)
        self._at += count * width
        at, shifts = starts >> 6, (starts & 63).astype(np.uint64)
        # Shifting by 64 is undefined: the second word moves by 1 and by 63 less than its share.
        high = (self._words[at + 1] << np.uint64(1)) << (np.uint64(63) - shifts)
        values: Array = ((self._words[at] >> shifts) | high) & np.uint64((1 << width) - 1)
        return values.astype(np.int64)


# The bits that a class must save: an estimate of its part of the table, and a share of all, because each takes time.
_CLASS_BITS, _CLASS_SHARE = 300, 0.004
_SAMPLE = 1 << 16
_BLOCK = 1 << 17
# Listing all members of a class costs as much as finding this share of them one by one.
_DENSE = 8


def unsigned(layout: Layout) -> np.dtype[Any]:
    return np.dtype(np.uint16 if layout.width == 16 else np.uint32)


def exponents(bits_N: Array, layout: Layout) -> Array:
    """The exponent field of each weight, as bytes: the cast cuts off the sign above 8-bit exponents."""
    shifted: Array = (bits_N >> bits_N.dtype.type(layout.mantissa)).astype(np.uint8)
    return shifted if layout.exponent == 8 else shifted & np.uint8(layout.exponents - 1)


class Classes:
    """The classes of the weights with the bits `old_N`; class c begins at exponent `starts[c]`, the first at 0."""

    def __init__(self, old_N: Array, starts: Sequence[int], layout: Layout) -> None:
        self._old_N, self._layout = old_N, layout
        self._class_E = np.searchsorted(starts, np.arange(layout.exponents), side="right") - 1
        self._words_CW = _words(old_N, starts, layout)
        counts_CW = np.bitwise_count(self._words_CW)
        self._sums_CW = np.zeros((len(starts), counts_CW.shape[1] + 1), np.int32)
        np.cumsum(counts_CW, axis=1, out=self._sums_CW[:, 1:])

    def size(self, number: int) -> int:
        return int(self._sums_CW[number, -1])

    def numbers(self, positions: Array) -> Array:
        """The class of each of these weights."""
        return self._class_E[exponents(self._old_N[positions], self._layout)]

    def ranks(self, number: int, positions: Array) -> Array:
        """How many weights of the class come before each of these, which are all of it."""
        at = positions >> 6
        below = (np.uint64(1) << (positions & 63).astype(np.uint64)) - np.uint64(1)
        inside: Array = np.bitwise_count(self._words_CW[number][at] & below).astype(np.int64)
        inside += self._sums_CW[number][at]
        return inside

    def positions(self, ranks_C: Sequence[Array]) -> list[Array]:
        """The inverse of `ranks`, for ascending ranks below the size of each class."""
        dense = [number for number, ranks in enumerate(ranks_C) if len(ranks) * _DENSE > self.size(number)]
        found = [
            np.zeros(0, np.int64) if number in dense else self._find(number, r) for number, r in enumerate(ranks_C)
        ]
        if dense:
            union = np.bitwise_or.reduce(self._words_CW[dense])
            members = np.flatnonzero(np.unpackbits(union.view(np.uint8), bitorder="little").view(np.bool_))
            numbers = self.numbers(members)
            for number in dense:
                mine = members[numbers == number]
                found[number] = mine if len(mine) == len(ranks_C[number]) else mine[ranks_C[number]]
        return found

    def _find(self, number: int, ranks: Array) -> Array:
        sums = self._sums_CW[number]
        at = np.searchsorted(sums, ranks.astype(np.int32), side="right") - 1
        return at * 64 + _select(self._words_CW[number][at], ranks - sums[at])


def _words(old_N: Array, starts: Sequence[int], layout: Layout) -> Array:
    """For each class a bit a weight, block by block, so that all of it happens in the processor's cache."""
    words_CW = np.zeros((len(starts), (len(old_N) + 63) // 64), np.uint64)
    bytes_CB = words_CW.view(np.uint8)
    bytes_CB[0, : len(old_N) // 8] = 0xFF
    if len(old_N) % 8:
        bytes_CB[0, len(old_N) // 8] = (1 << len(old_N) % 8) - 1
    for start in range(0, len(old_N), _BLOCK):
        exponent_N = exponents(old_N[start : start + _BLOCK], layout)
        at = slice(start // 8, start // 8 + (len(exponent_N) + 7) // 8)
        for number in range(1, len(starts)):
            bytes_CB[number, at] = np.packbits(exponent_N >= np.uint8(starts[number]), bitorder="little")
    for number in range(len(starts) - 1):
        words_CW[number] &= ~words_CW[number + 1]
    return words_CW


def _select(words: Array, ranks: Array) -> Array:
    """Return the position of the bit of that rank in each word, by halves."""
    found = np.zeros(len(words), np.int64)
    for step in (32, 16, 8, 4, 2, 1):
        low = words & np.uint64((1 << step) - 1)
        count = np.bitwise_count(low)
        beyond = ranks >= count
        ranks = ranks - np.where(beyond, count, 0)
        words = np.where(beyond, words >> np.uint64(step), low)
        found += np.where(beyond, step, 0)
    return found


def choose(old_N: Array, changed: Array, length_K: Array, layout: Layout) -> list[int]:
    """Where the classes begin, such that the estimated size is the least: all partitions into ranges are considered.

    `changed` are the positions of changed weights, `length_K` the bit lengths of their changes.
    """
    step = max(1, len(old_N) // _SAMPLE)
    size_E = np.bincount(exponents(old_N[::step], layout), minlength=layout.exponents).astype(np.float64) * step
    exponent_K = exponents(old_N[changed], layout).astype(np.int64)
    table_EL = np.bincount(exponent_K * layout.width + length_K, minlength=layout.exponents * layout.width)
    table_EL = table_EL.reshape(layout.exponents, layout.width).astype(np.float64)
    size_E = np.maximum(size_E, table_EL.sum(1))
    present = np.flatnonzero(size_E)
    cost = _costs(size_E[present], table_EL[present])
    return [0, *(int(present[start]) for start in _partition(cost)[1:])]


def _costs(size_E: Array, table_EL: Array) -> Array:
    """Bits of a class that has the exponents from i up to but without j."""
    sizes = np.concatenate([[0.0], np.cumsum(size_E)])
    tables = np.concatenate([np.zeros((1, table_EL.shape[1])), np.cumsum(table_EL, 0)])
    size = sizes[None, :] - sizes[:, None]
    changed = tables.sum(1)[None, :] - tables.sum(1)[:, None]
    lengths = -_plogp(changed)
    for column in tables.T:  # one by one: all of them at once would be large
        lengths += _plogp(column[None, :] - column[:, None])
    positions = _plogp(changed) + _plogp(size - changed) - _plogp(size)
    bits: Array = -positions - lengths
    bits += _CLASS_BITS + _CLASS_SHARE * bits[0, -1]
    return bits


def _plogp(counts: Array) -> Array:
    counts = np.maximum(counts, 0.0)  # half of the matrix is not used
    logs: Array = np.log2(counts, out=np.zeros_like(counts), where=counts > 0)
    return counts * logs


def _partition(cost: Array) -> list[int]:
    """The starts of the cheapest ranges that cover everything."""
    count = len(cost) - 1
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    before = [0] * (count + 1)
    for end in range(1, count + 1):
        totals = best[:end] + cost[:end, end]
        before[end] = int(np.argmin(totals))
        best[end] = totals[before[end]]
    starts = [before[count]]
    while starts[-1]:
        starts.append(before[starts[-1]])
    return starts[::-1]


class Subset(NamedTuple):
    total: int
    members: int
    rice: int
    inverted: bool

    @property
    def coded(self) -> int:
        """How many gaps are written: none where all or no items are members."""
        if self.members in (0, self.total):
            return 0
        return self.total - self.members if self.inverted else self.members


class Plan(NamedTuple):
    """The table's entry of one class: `longer[l]` are those with a bit length above l, of those above l - 1."""

    changed: Subset
    negative: Subset
    longer: list[Subset]

    def subsets(self) -> list[Subset]:
        return [self.changed, self.negative, *self.longer]

    def lengths(self) -> list[int]:
        """How many changes have the bit length 0, 1, …"""
        above = [subset.members for subset in self.longer] + [0]
        return [before - after for before, after in zip([self.changed.members, *above], above, strict=False)]


# ------------------------------------------------------------ changes


def ordered(bits_K: Array, layout: Layout) -> Array:
    """Numbers in the order of the values, neighbours one apart: what an ULP is counted in. As signed 64-bit."""
    wide = bits_K.astype(np.int64)
    sign = 1 << (layout.width - 1)
    return np.where(wide & sign, (2 * sign - 1) ^ wide, wide | sign)


def changes(old_K: Array, new_K: Array, layout: Layout) -> Array:
    """Differences in ULP, modulo 2**width, between -2**(width-1) and 2**(width-1) - 1; 0 only for equal bits."""
    half = 1 << (layout.width - 1)
    return ((ordered(new_K, layout) - ordered(old_K, layout) + half) & (2 * half - 1)) - half


def changed_bits(old_K: Array, change_K: Array, layout: Layout) -> Array:
    """The inverse of `changes`."""
    sign = 1 << (layout.width - 1)
    number = (ordered(old_K, layout) + change_K) & (2 * sign - 1)
    return np.where(number & sign, number ^ sign, (2 * sign - 1) ^ number).astype(unsigned(layout))


def bit_lengths(size_K: Array) -> Array:
    """floor(log2) of positive numbers below 2**53."""
    return np.frexp(size_K.astype(np.float64))[1].astype(np.int64) - 1


# ------------------------------------------------------------ writing


class Writer:
    """Collects the table and the two bit streams."""

    def __init__(self) -> None:
        self.table = bytearray()
        self._quotients: list[Array] = []
        self._fields: list[tuple[Array, int]] = []

    def subset(self, members: Array, total: int) -> None:
        """A subset by the ascending indices of its members."""
        self._number(len(members))
        if len(members) in (0, total):
            return
        inverted = 2 * len(members) > total
        if inverted:
            others = np.ones(total, np.bool_)
            others[members] = False
            members = np.flatnonzero(others)
        gaps = np.diff(members, prepend=-1) - 1
        rice = _best_rice(gaps)
        self.table.append(rice | inverted << 7)
        self._quotients.append(gaps >> rice)
        self.fields(gaps & ((1 << rice) - 1), rice)

    def fields(self, values: Array, width: int) -> None:
        if width:
            self._fields.append((values, width))

    def _number(self, value: int) -> None:
        while value > 0x7F:
            self.table.append(value & 0x7F | 0x80)
            value >>= 7
        self.table.append(value)

    def finish(self) -> bytes:
        unary = pack_unary(self._quotients)
        return bytes(self.table) + len(unary).to_bytes(4, "little") + unary + pack_fields(self._fields)


def _best_rice(gaps: Array) -> int:
    """The parameter that costs the fewest bits: near the logarithm of 0.69 times the mean gap."""
    guess = max(0, round(np.log2(max(float(gaps.mean()), 0.1) * 0.69)))
    near = range(max(0, guess - 1), min(MAX_RICE, guess + 1) + 1)
    return min(near, key=lambda rice: len(gaps) * rice + int((gaps >> rice).sum()))


def encode(old_N: Array, new_N: Array, changed: Array, layout: Layout) -> bytes:
    """`changed`, not empty, are the positions where `new_N` differs."""
    change_K = changes(old_N[changed], new_N[changed], layout)
    length_K = bit_lengths(np.abs(change_K))
    starts = choose(old_N, changed, length_K, layout)
    classes = Classes(old_N, starts, layout)
    class_K = classes.numbers(changed)
    writer = Writer()
    writer.table += bytes([len(starts) - 1, *starts[1:]])
    for number in range(len(starts)):
        inside = np.flatnonzero(class_K == number)
        writer.subset(classes.ranks(number, changed[inside]), classes.size(number))
        if len(inside):
            _write_changes(writer, change_K[inside], length_K[inside], layout)
    return writer.finish()


def _write_changes(writer: Writer, change_K: Array, length_K: Array, layout: Layout) -> None:
    writer.subset(np.flatnonzero(change_K < 0), len(change_K))
    left = length_K
    for length in range(layout.width - 1):
        longer = np.flatnonzero(left > length)
        writer.subset(longer, len(left))
        left = left[longer]
        if not len(left):
            break
    size_K = np.abs(change_K)
    for length in range(1, int(length_K.max()) + 1):
        writer.fields(size_K[length_K == length] - (1 << length), length)


# ------------------------------------------------------------ reading


class Reader:
    """Reads a table. CorruptData rather than a byte beyond its end."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> memoryview:
        if self.at + count > len(self.data):
            raise CorruptData("a delta ends too early", DAMAGED)
        self.at += count
        return self.data[self.at - count : self.at]

    def byte(self) -> int:
        return self.take(1)[0]

    def subset(self, total: int) -> Subset:
        members = self._number()
        if members > total:
            raise CorruptData(f"a delta marks {members} of {total} items", DAMAGED)
        if members in (0, total):
            return Subset(total, members, 0, False)
        kind = self.byte()
        if kind & 0x7F > MAX_RICE:
            raise CorruptData(f"a delta has the Rice parameter {kind & 0x7F}", DAMAGED)
        return Subset(total, members, kind & 0x7F, bool(kind >> 7))

    def _number(self) -> int:
        value = 0
        for shift in range(0, 35, 7):
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise CorruptData("a delta holds a number that is too long", DAMAGED)


def decode(old_N: Array, data: memoryview, new_N: Array, layout: Layout) -> None:
    """Fill `new_N`, which equals `old_N`, with the changed weights."""
    reader = Reader(data)
    starts = [0, *reader.take(reader.byte())]
    if any(low >= high for low, high in zip(starts, [*starts[1:], layout.exponents], strict=True)):
        raise CorruptData("a delta has classes out of order", DAMAGED)
    classes = Classes(old_N, starts, layout)
    plans = [_plan(reader, classes.size(number), layout) for number in range(len(starts))]
    unary = reader.take(int.from_bytes(reader.take(4), "little"))
    quotients = unpack_unary(unary, sum(subset.coded for plan in plans for subset in plan.subsets()))
    streams = _Streams(quotients, _fields(reader, plans))
    ranks_C, change_C = [], []
    for plan in plans:
        ranks_C.append(streams.members(plan.changed))
        change_C.append(_read_changes(streams, plan))
    positions = np.concatenate(classes.positions(ranks_C))
    new_N[positions] = changed_bits(old_N[positions], np.concatenate(change_C), layout)


def _plan(reader: Reader, size: int, layout: Layout) -> Plan:
    changed = reader.subset(size)
    if not changed.members:
        return Plan(changed, Subset(0, 0, 0, False), [])
    negative = reader.subset(changed.members)
    longer: list[Subset] = []
    left = changed.members
    while left and len(longer) < layout.width - 1:
        longer.append(reader.subset(left))
        left = longer[-1].members
    return Plan(changed, negative, longer)


def _fields(reader: Reader, plans: list[Plan]) -> Fields:
    """The rest of the segment, which must be exactly as long as the table says."""
    bits = 0
    for plan in plans:
        bits += sum(subset.coded * subset.rice for subset in plan.subsets())
        bits += sum(length * count for length, count in enumerate(plan.lengths()))
    rest = reader.take(len(reader.data) - reader.at)
    if len(rest) != (bits + 7) // 8:
        raise CorruptData(f"a delta has {len(rest)} bytes where {(bits + 7) // 8} belong", DAMAGED)
    return Fields(rest)


class _Streams:
    """The two bit streams, read subset by subset in the order of the table."""

    def __init__(self, quotients: Array, fields: Fields) -> None:
        self._quotients = quotients
        self._at = 0
        self.fields = fields

    def members(self, subset: Subset) -> Array:
        """The ascending indices of the members."""
        if not subset.coded:
            return np.arange(subset.members)
        quotients = self._quotients[self._at : self._at + subset.coded]
        self._at += subset.coded
        gaps = (quotients << subset.rice) + self.fields.take(subset.coded, subset.rice)
        found = np.cumsum(gaps + 1) - 1
        if found[-1] >= subset.total:
            raise CorruptData(f"a delta names item {found[-1]} of {subset.total}", DAMAGED)
        if not subset.inverted:
            return found
        others = np.ones(subset.total, np.bool_)
        others[found] = False
        return np.flatnonzero(others)


def _read_changes(streams: _Streams, plan: Plan) -> Array:
    negative = streams.members(plan.negative)
    length_K = np.zeros(plan.changed.members, np.int64)
    longer = np.arange(plan.changed.members)
    for subset in plan.longer:
        longer = longer[streams.members(subset)]
        length_K[longer] += 1
    change_K = np.left_shift(1, length_K)
    for length, count in enumerate(plan.lengths()):
        if length and count:
            change_K[length_K == length] += streams.fields.take(count, length)
    change_K[negative] *= -1
    return change_K
