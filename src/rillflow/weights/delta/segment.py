"""A segment of a delta: a run of weights, coded class by class. `file` documents the bytes.

Everything is made of one thing, a subset: which of `total` ordered items are members. Its gaps are Golomb-Rice coded,
those of the members or, when `inverted`, of the others; with `rice` 0 that is a bitmap. Where each array begins in the
two bit streams follows from the table alone, so that all of them can be read at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rillflow.errors import CorruptData
from rillflow.weights.delta.bits import DAMAGED, Array, Fields, pack_fields, pack_unary, unpack_unary
from rillflow.weights.delta.classes import Classes, Layout, choose

MAX_RICE = 22


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
    """What the table says of one class: `longer[l]` are those with a bit length above l, of those above l - 1."""

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
    return np.where(number & sign, number ^ sign, (2 * sign - 1) ^ number).astype(layout.unsigned)


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
