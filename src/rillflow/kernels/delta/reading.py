"""A segment of a delta, read. `format` documents the bytes, which may be anything: compiled code has no bounds of its
own, so every number from them is checked before it is used, and what is wrong comes back as an index into `_WRONG`.

A pass over the old weights counts each class before every 64 of them. Then the table says how many members each subset
has, the streams which, and a search in the counts finds the places of the changed ranks, block by block.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rillflow.errors import CorruptData
from rillflow.kernels.compile import compiled, inlined
from rillflow.kernels.delta.classes import BLOCK, Classes, count_block, fill_exponents
from rillflow.kernels.delta.format import DAMAGED, MAX_RICE, Array, Found, Layout
from rillflow.kernels.delta.words import SPARE, between, get, mixed, put_run, row_of, select, word_of, write_places

_RIGHT, _SHORT, _ORDER, _COUNT, _RICE, _NUMBER, _FIELDS, _GAPS, _OUTSIDE = range(9)
_WRONG = (
    "",
    "ends too early",
    "has classes out of order",
    "marks more items than there are",
    "has a Rice parameter that is too large",
    "holds a number that is too long",
    "has more or fewer bytes than its table says",
    "has more or fewer gaps than its table says",
    "names an item that does not exist",
)

_1, _3, _6 = np.uint64(1), np.uint64(3), np.uint64(6)
_FAR = 1 << 40


def decode(old_N: Array, data: memoryview, layout: Layout, first_word: int) -> Found:
    mask = layout.exponents - 1
    data_B = np.frombuffer(data, np.uint8)
    _check(_SHORT if not len(data) or len(data) <= data[0] else _RIGHT)
    start_C = np.zeros(data[0] + 1, np.uint8)
    start_C[1:] = data_B[1 : len(start_C)]
    _check(_ORDER if np.any(start_C[1:] <= start_C[:-1]) or start_C[-1] > mask else _RIGHT)
    classes = Classes.of(start_C, mask)
    above_CR = np.zeros((len(start_C) + 1, (len(old_N) + 63) // 64 + BLOCK // 64), np.int32)
    _count(old_N, layout.mantissa, mask, start_C, above_CR)

    # For each class and subset (changed, negative, longer than 0, …): items, members, kind.
    plan_CSP = np.zeros((len(start_C), layout.width + 1, 3), np.int64)
    wrong, at, gaps, fields = _read_table(data_B, above_CR[:, -1].astype(np.int64), plan_CSP)
    _check(wrong)
    unary_end = at + 4 + int.from_bytes(data[at : at + 4], "little")
    _check(_FIELDS if len(data) - unary_end != (fields + 7) // 8 else _RIGHT)
    place_G = _places(_words(data_B[at + 4 : unary_end]), gaps)
    _check(_GAPS if len(place_G) != gaps or unary_end - at - 4 != (place_G[-1] // 8 + 1 if gaps else 0) else _RIGHT)
    count_C = plan_CSP[:, 0, 1].copy()
    count = int(count_C.sum())
    gap_K, change_K = np.empty(count, np.int32), np.empty(count, np.uint32)
    _check(_read_streams(place_G, _words(data_B[unary_end:]), plan_CSP, gap_K, change_K))

    index_K, value_K = np.empty(count + SPARE, np.int32), np.empty(count, old_N.dtype)
    gained = _fill(old_N, layout.mantissa, *classes, above_CR, count_C, gap_K, change_K, first_word, index_K, value_K)
    return Found(index_K[:count], value_K, int(gained))


def _check(wrong: int) -> None:
    if wrong:
        raise CorruptData(f"a delta {_WRONG[wrong]}", DAMAGED)


def _words(data_B: Array) -> Array:
    """A stream as words, and another one, of zeros, behind them."""
    words_W = np.zeros(len(data_B) // 8 + 2, np.uint64)
    words_W.view(np.uint8)[: len(data_B)] = data_B
    return words_W


def _places(stream_W: Array, most: int) -> Array:
    """Return the places of the ones in a stream; of `most` + 1 of them at most."""
    count = int(np.bitwise_count(stream_W).sum())
    place_G = np.empty(min(count, most + 1) + SPARE, np.int64)
    if count <= most:
        _write_places(stream_W, place_G)
    return place_G[:-SPARE]


@compiled
def _write_places(stream_W: Array, place_G: Array) -> None:
    end = 0
    for word in range(len(stream_W)):
        end = write_places(stream_W[word], 64 * word, place_G, end)


@compiled
def _count(old_N: Array, mantissa: int, mask: int, start_C: Array, above_CR: Array) -> None:
    """How many weights come before every 64 that have at least the exponent that class c begins at; in the last rows, a
    block of them, of all weights."""
    total_C = np.zeros(len(start_C) + 1, np.int64)
    exponent_B = np.empty(BLOCK, np.uint8)
    for block in range(0, len(old_N), BLOCK):
        count_block(old_N, block, mantissa, mask, start_C, exponent_B, total_C, above_CR, block // 64)
    for number in range(len(start_C)):
        for row in range((len(old_N) + 63) // 64, above_CR.shape[1]):
            above_CR[number, row] = total_C[number]


# ------------------------------------------------------------ table and streams


@compiled
def _read_table(data_B: Array, above_C: Array, plan_CSP: Array) -> tuple[int, int, int, int]:
    """Fill the plan. Return an error code, where the table ends (with at least 4 bytes behind it), and how many gaps
    and bits of fields belong to it."""
    at, gaps, fields = len(plan_CSP), 0, 0
    for number in range(len(plan_CSP)):
        total = above_C[number] - above_C[number + 1]
        for subset in range(plan_CSP.shape[1]):
            plan = plan_CSP[number, subset]
            shift = 0
            count: Any = 0
            while shift <= 28:
                if at >= len(data_B):
                    return _SHORT, at, 0, 0
                byte: Any = np.int64(data_B[at])
                at += 1
                count |= (byte & 0x7F) << shift
                shift = shift + 7 if byte > 0x7F else _FAR
            if shift != _FAR:
                return _NUMBER, at, 0, 0
            if count > total:
                return _COUNT, at, 0, 0
            plan[0], plan[1] = total, count
            if count and count != total:
                if at >= len(data_B):
                    return _SHORT, at, 0, 0
                plan[2] = data_B[at]
                at += 1
                if plan[2] & 0x7F > MAX_RICE:
                    return _RICE, at, 0, 0
            gaps += _coded(plan)
            fields += _coded(plan) * (plan[2] & 0x7F)
            if subset != 1:  # the lengths are those of the changed, whatever their sign
                total = count
                if not count:
                    break
        for length in range(1, plan_CSP.shape[1] - 1):
            fields += length * _of_length(plan_CSP[number], length)
    return (_RIGHT if at + 4 <= len(data_B) else _SHORT), at, gaps, fields


@inlined
def _coded(plan: Array) -> Any:
    """How many gaps a subset has: none where all or no items are members."""
    if plan[1] == 0 or plan[1] == plan[0]:
        return 0
    return plan[0] - plan[1] if plan[2] & 0x80 else plan[1]


@inlined
def _of_length(plan_SP: Array, length: int) -> Any:
    """How many changes of a class have this length, not 0."""
    longer = plan_SP[length + 2, 1] if length + 2 < len(plan_SP) else 0
    return plan_SP[length + 1, 1] - longer


@compiled
def _read_streams(place_G: Array, field_W: Array, plan_CSP: Array, gap_K: Array, change_K: Array) -> int:
    """Write the gaps between the ranks of changed weights and the changes modulo 2**32, class by class; return an error
    code. The streams have as many ones and bits of fields as the plan needs."""
    scratch_K, left_K = np.empty(len(gap_K), np.int32), np.empty(len(gap_K), np.int32)
    length_K = np.empty(len(gap_K), np.uint8)
    one = field_at = end = 0
    for number in range(len(plan_CSP)):
        plan_SP = plan_CSP[number]
        begin, end = end, end + plan_SP[0, 1]
        for subset in range(len(plan_SP) if begin < end else 0):
            plan = plan_SP[subset]
            gap_M = gap_K[begin:end] if subset == 0 else scratch_K[: plan[1]]
            if not _members(place_G, one, field_W, field_at, plan, gap_M):
                return _OUTSIDE
            one += _coded(plan)
            field_at += _coded(plan) * (plan[2] & 0x7F)
            if subset == 1:
                _mark_negative(gap_M, change_K[begin:end])
            if subset > 1:
                _mark_longer(gap_M, subset == 2, left_K, length_K[begin:end])
                if not plan[1]:
                    break
        field_at = _low_bits(field_W, field_at, plan_SP, length_K[begin:end], change_K[begin:end])
    return _RIGHT


@compiled
def _members(place_G: Array, one: int, field_W: Array, field_at: int, plan: Array, gap_M: Array) -> Any:
    """The gaps before the members of a subset; whether all of them exist."""
    coded, rice, total = _coded(plan), plan[2] & 0x7F, plan[0]
    before = place_G[one - 1] if one else -1
    if not coded:
        put_run(gap_M, 0, 0, len(gap_M))
    elif not plan[2] & 0x80:
        items = 0
        for number in range(coded):
            place = place_G[one + number]
            gap = ((place - before - 1) << rice) | np.int64(get(field_W, field_at, rice))
            before = place
            field_at += rice
            items += gap + 1
            gap_M[number] = gap
        return items <= total
    else:
        found = run = 0
        for number in range(coded):
            place = place_G[one + number]
            gap = ((place - before - 1) << rice) | np.int64(get(field_W, field_at, rice))
            before = place
            field_at += rice
            if found + gap > len(gap_M):
                return False
            if gap:
                put_run(gap_M, found, run, gap)
                found += gap
                run = 0
            run += 1
        if found < len(gap_M):
            put_run(gap_M, found, run, len(gap_M) - found)
    return True


@compiled
def _mark_negative(gap_M: Array, change_K: Array) -> None:
    """1 for changes that are negative, else 0."""
    for k in range(len(change_K)):
        change_K[k] = 0
    at = -1
    for gap in gap_M:
        at += gap + 1
        change_K[at] = 1


@compiled
def _mark_longer(gap_M: Array, first: bool, left_K: Array, length_K: Array) -> None:
    """One more for the lengths of the members; `left_K` are the places of those that are as long as was known."""
    for k in range(len(length_K) if first else 0):
        length_K[k] = 0
    at = -1
    for m in range(len(gap_M)):
        at += gap_M[m] + 1
        place = at if first else left_K[at]
        left_K[m] = place
        length_K[place] += 1


@compiled
def _low_bits(field_W: Array, field_at: int, plan_SP: Array, length_K: Array, change_K: Array) -> int:
    """Changes of signs, lengths and low bits; the next bit of the field stream."""
    first_L = np.zeros(len(plan_SP), np.int64)
    for length in range(1, len(plan_SP) - 1):
        first_L[length] = field_at
        field_at += length * _of_length(plan_SP, length)
    for k in range(len(change_K)):
        bits: Any = np.int64(length_K[k])
        size = np.int64((_1 << np.uint64(bits)) | get(field_W, first_L[bits], bits))
        first_L[bits] += bits
        change_K[k] = -size if change_K[k] else size
    return field_at


# ------------------------------------------------------------ places


@compiled
def _fill(
    old_N: Array,
    mantissa: int,
    mask: int,
    start_C: Array,
    span_C: Array,
    class_E: Array,
    above_CR: Array,
    count_C: Array,
    gap_K: Array,
    change_K: Array,
    first_word: int,
    index_K: Array,
    value_K: Array,
) -> Any:
    """Write the places and new values of the changed weights; return what the fingerprint gains."""
    classes, rows = len(start_C), BLOCK // 64
    # For each class: its next change, the end of its changes, and the rank of the next change.
    next_C, end_C, rank_C = np.zeros(classes, np.int64), np.zeros(classes, np.int64), np.zeros(classes, np.int64)
    end = 0
    for number in range(classes):
        next_C[number], end = end, end + count_C[number]
        end_C[number] = end
        rank_C[number] = gap_K[next_C[number]] if count_C[number] else _FAR
    exponent_B, change_B = np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.uint32)
    exponent_W = exponent_B.view(np.uint64)
    rank_B, row_B = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.uint8)
    bits_R, before_R = np.zeros(rows, np.uint64), np.empty(rows, np.int32)
    gained = np.uint64(0)
    end = 0
    for block in range(0, len(old_N), BLOCK):
        fill_exponents(old_N, block, mantissa, mask, exponent_B)
        first_row, end_row = block // 64, min(block + BLOCK, len(old_N) + 63) // 64
        for number in range(classes):
            # Three loops, because each step of one can begin before the step before has ended.
            behind = np.int64(above_CR[number, end_row]) - above_CR[number + 1, end_row]
            rank, count = rank_C[number], 0
            if rank >= behind:
                continue
            for row in range(rows):
                at = np.uint64(first_row + row)  # what cannot be negative is not looked for at the other end
                before_R[row] = above_CR[np.uint64(number), at] - above_CR[np.uint64(number + 1), at]
            k = next_C[number]
            while rank < behind:
                rank_B[count] = rank
                count += 1
                k += 1
                rank = rank + gap_K[k] + 1 if k < end_C[number] else _FAR
            for m in range(count):
                row_B[m] = row_of(before_R, rank_B[m])
            for m in range(count):
                at_row = np.uint64(row_B[m])
                found = between(exponent_W, at_row << _3, start_C[number], span_C[number])
                place = select(found, np.uint64(rank_B[m] - before_R[at_row]))
                bits_R[at_row] |= _1 << place
                change_B[(at_row << _6) | place] = change_K[next_C[number] + m]
            next_C[number], rank_C[number] = k, rank
        begin = end
        for row in range(end_row - first_row):
            end = write_places(bits_R[row], block + 64 * row, index_K, end)
            bits_R[row] = np.uint64(0)
        gained += _values(old_N, block, change_B, first_word, begin, end, index_K, value_K)
    return gained


@compiled
def _values(
    old_N: Array, block: int, change_B: Array, first_word: int, begin: int, end: int, index_K: Array, value_K: Array
) -> Any:
    """Write the new values of a block's changed weights, from `begin` to `end`; return what the fingerprint gains."""
    each, width = 8 // old_N.itemsize, 8 * old_N.itemsize
    shift = 2 if each == 4 else 1
    old_W = old_N[: len(old_N) // each * each].view(np.uint64)
    sign = np.int64(1) << (width - 1)
    full = 2 * sign - 1
    gained = before = after = np.uint64(0)
    last: Any = -1
    for k in range(begin, end):
        place: Any = np.int64(index_K[k])
        old = np.int64(old_N[np.uint64(place)])
        change = np.int64(change_B[np.uint64(place - block)])
        ordered = ((full ^ old if old & sign else old | sign) + change) & full
        new = ordered ^ sign if ordered & sign else full ^ ordered
        value_K[k] = new
        word = place >> shift
        if word != last:
            gained += mixed(after, first_word + last) - mixed(before, first_word + last)
            before = after = old_W[np.uint64(word)] if word < len(old_W) else word_of(old_N, word)
            last = word
        after ^= np.uint64(old ^ new) << np.uint64(width * (place & (each - 1)))
    return gained + mixed(after, first_word + last) - mixed(before, first_word + last)
