"""The coding of deltas in numpy, without a compiled loop: slow and plain, what the compiled one is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rillflow.errors import CorruptData
from rillflow.kernels.delta.format import DAMAGED, MAX_RICE, Array, Coded, Found, Layout
from rillflow.kernels.delta.reference_classes import Classes, choose, unsigned


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
    """The table of one class: `longer[l]` are the changes with a bit length above l, of those above l - 1."""

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


def encode(old_N: Array, new_N: Array, layout: Layout, first_word: int) -> Coded:
    changed = np.flatnonzero(old_N != new_N)
    if not len(changed):
        return Coded(0, 0, ())
    data = coded(old_N, new_N, changed, layout)
    sum_gained = difference(old_N, changed, new_N[changed], first_word)
    return Coded(len(changed), sum_gained, (data,) if len(data) < old_N.nbytes else ())


def coded(old_N: Array, new_N: Array, changed: Array, layout: Layout) -> bytes:
    """Return the bytes of a segment; `changed`, not empty, are the positions where `new_N` differs."""
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


def decode(old_N: Array, data: memoryview, layout: Layout, first_word: int) -> Found:
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
    value_K = changed_bits(old_N[positions], np.concatenate(change_C), layout)
    order = np.argsort(positions)
    index_K, value_K = positions[order].astype(np.int32), value_K[order]
    return Found(index_K, value_K, difference(old_N, index_K, value_K, first_word))


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


# ------------------------------------------------------------ fingerprints and places

_STEP, _FIRST, _SECOND = (np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_CHUNK = 1 << 14  # words: all that is computed of them stays in the processor's cache


def mixed(words_W: Array, number_W: Array) -> Array:
    """Return what the words of these numbers, counted from 0, add to a fingerprint."""
    z_W = words_W + (number_W.astype(np.uint64) + np.uint64(1)) * _STEP
    z_W = (z_W ^ (z_W >> np.uint64(30))) * _FIRST
    z_W = (z_W ^ (z_W >> np.uint64(27))) * _SECOND
    sums_W: Array = z_W ^ (z_W >> np.uint64(31))
    return sums_W


def total(words_W: Array, first_word: int) -> int:
    found = 0
    for start in range(0, len(words_W), _CHUNK):
        some_W = words_W[start : start + _CHUNK]
        first = first_word + start
        found += int(mixed(some_W, np.arange(first, first + len(some_W))).sum())
    return found


def difference(weights_N: Array, index_K: Array, value_K: Array, first_word: int) -> int:
    each = 8 // weights_N.itemsize
    before_N = np.zeros(-(-len(weights_N) // each) * each, weights_N.dtype)
    before_N[: len(weights_N)] = weights_N
    after_N = before_N.copy()
    after_N[index_K] = value_K
    number_W = np.unique(index_K // each).astype(np.int64)
    sums = [int(mixed(part.view(np.uint64)[number_W], first_word + number_W).sum()) for part in (before_N, after_N)]
    return sums[1] - sums[0]


def union(one_K: Array, other_K: Array) -> Array:
    return np.union1d(one_K, other_K)
