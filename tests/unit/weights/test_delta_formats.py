"""Formats of others give every bit back, and the numbers of `bench.weights` are those of files that were made."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from bench import weights as bench
from bench import weights_train
from bench.common import Report
from bench.delta_formats import FORMATS, Format
from bench.delta_formats.entropy import bound
from rillflow.weights import delta

RNG = np.random.default_rng(0)
PLACES = {
    "none": [],
    "first": [0],
    "last": [-1],
    "all": slice(None),
    "some": RNG.choice(70_000, 900, replace=False),
    "far apart": [3, 69_999],
}
SHAPES = [(1, 70_000), (70_000, 1), (700, 100)]


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_gives_every_bit_back(name, places):
    for shape, width in itertools.product(SHAPES, (2, 4)):
        old = RNG.integers(0, 1 << 8 * width, 70_000, dtype=f"u{width}")
        new = old.copy()
        new[PLACES[places]] ^= 0x8101
        held, wanted = (
            {"same": np.ones((2, 2), bits.dtype), "w": bits.reshape(shape), "b": bits[:9, None].copy()}
            for bits in (old, new)
        )
        FORMATS[name].apply(held, FORMATS[name].encode(held, wanted))
        for tensor, bits in wanted.items():
            assert np.array_equal(held[tensor], bits), (tensor, shape, width)


def pair(rate=0.02):
    source = torch.Generator().manual_seed(0)
    old = {"model.layers.0.w": 0.02 * torch.randn(256, 96, generator=source), "norm": 0.01 * torch.ones(96)}
    new = {name: w + rate * w.abs().mean() * torch.randn(w.shape, generator=source) for name, w in old.items()}
    return tuple({name: w.bfloat16() for name, w in version.items()} for version in (old, new))


def test_the_table_is_of_real_files():
    old, new = pair()
    case = bench.version(old, new)
    report = Report("weights")
    bench.sizes(report, 3e-6, case)
    changed = sum(int((old[name] != new[name]).sum()) for name in new)
    rows = {row["name"].split(": ")[1]: row for row in report.results}
    assert set(rows) == {"conditioned bound", "bound by tensor", "plain bound", *FORMATS}
    for name, made in FORMATS.items():
        assert rows[name]["peer"] * changed == pytest.approx(len(made.encode(bench.bits(old), bench.bits(new))))
    ours = rows["AstraFlow"]["ours"] * changed
    run = [torch.cat([weight.view(-1) for weight in version.values()]) for version in (old, new)]
    data = len(delta.encode(*run).data)
    assert data < ours < data + 200  # the file's list of pieces


def test_a_format_that_loses_a_bit_is_not_measured(monkeypatch):
    monkeypatch.setitem(FORMATS, "AstraFlow", Format(FORMATS["AstraFlow"].encode, lambda held, data: None))
    with pytest.raises(AssertionError, match="AstraFlow gives other bits for"):
        bench.sizes(Report("weights"), 3e-6, bench.version(*pair()))


# ------------------------------------------------------------ the bounds


def bits_of(symbols):
    """The empirical entropy of a sequence, times its length, one symbol after the other."""
    counts = Counter(symbols)
    return -sum(math.log2(counts[symbol] / len(symbols)) for symbol in symbols)


def ordered(weight):
    """An integer that grows with the weight, one for each bf16 number."""
    number = weight.view(torch.int16).item() & 0xFFFF
    return ~(number & 0x7FFF) if number & 0x8000 else number


def test_the_bounds_are_the_entropies_of_what_a_delta_must_say():
    """The entropy of each weight's change (none, or a number of units), given nothing and given the old exponent."""
    old, new = pair()
    told = bench.count(old, new)
    happened, by_tensor = {}, 0.0
    for name in new:
        mine = {}
        for before, after in zip(old[name].view(-1), new[name].view(-1), strict=True):
            exponent = before.view(torch.int16).item() >> 7 & 0xFF
            mine.setdefault(exponent, []).append(ordered(after) - ordered(before))
        by_tensor += sum(map(bits_of, mine.values()))
        for exponent, steps in mine.items():
            happened.setdefault(exponent, []).extend(steps)
    everything = [step for steps in happened.values() for step in steps]
    assert told.changed == sum(step != 0 for step in everything)
    assert told.plain == pytest.approx(bits_of(everything) / 8)
    assert told.conditioned == pytest.approx(sum(map(bits_of, happened.values())) / 8)
    assert told.by_tensor == pytest.approx(by_tensor / 8)
    assert told.by_tensor < told.conditioned < told.plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_of_one_tensor_both_bounds_are_the_codec_s(dtype):
    old, new = (version["model.layers.0.w"].to(dtype) for version in pair())
    assert bench.count({"w": old}, {"w": new}).conditioned == pytest.approx(bound(old, new))


def test_steps_are_ordered_as_the_weights_are():
    numbers = torch.tensor([-float("inf"), -1.0, -1e-39, -0.0, 0.0, 1e-39, 1.0, float("inf")]).bfloat16()
    array = bench.bits({"w": numbers})["w"].reshape(-1)
    assert (bench._steps(array[:-1], array[1:]) > 0).all()


# ------------------------------------------------------------ the versions


def test_versions_are_trained_once_and_kept(tmp_path, monkeypatch):
    """With a tiny model in the place of the real one."""
    monkeypatch.setitem(weights_train.SHAPES, "1.7b", weights_train.SHAPES["tiny"])
    monkeypatch.setattr(weights_train, "_package", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(weights_train, "_smollm", lambda file: weights_train._random("cpu"))
    monkeypatch.setattr(weights_train, "_text", lambda file, device: weights_train._noise(2048, "cpu"))
    monkeypatch.setattr(weights_train, "TOKENS", 4)
    folder = weights_train.Folder(tmp_path, "cpu")
    old, new = folder.pair(1e-6, weights_train.WARM + 1)
    masters = folder.pair(1e-6, weights_train.WARM + 1, torch.float32)
    for name, weight in new.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, masters[1][name].bfloat16()), "a published version is a copy of the masters"
    told = bench.count(old, new)
    assert 0 < told.changed < told.weights / 8, "one step of a small learning rate moves few bf16 weights"
    monkeypatch.delattr(weights_train, "train")
    assert all(torch.equal(new[name], weight) for name, weight in folder.pair(1e-6, weights_train.WARM + 1)[1].items())


def test_documentation_is_enough_text_where_gsm8k_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("RILLFLOW_DATA", str(tmp_path))
    long = [passage for passage in weights_train._passages() if len(passage.split()) >= weights_train.TOKENS]
    assert len(long) >= weights_train.ROWS * (weights_train.WARM + 1)


def test_noise_fills_the_quantisation_step_and_no_more():
    source = torch.Generator().manual_seed(0)
    four = torch.randint(16, (64, 32), generator=source) * 0.1 - 0.4
    eight = torch.randint(-127, 128, (64, 32), generator=source) * 0.01
    four[:, :2], eight[:, 0] = torch.tensor([-0.4, 1.1]), 1.27
    for weight, bits, step in ((four, 4, 0.1), (eight, 8, 0.01)):
        moved = weight.clone()
        weights_train._unquantise(moved, bits, source)
        moved -= weight
        assert moved.abs().max() <= step / 2 + 1e-6
        assert moved.abs().mean() == pytest.approx(step / 4, rel=0.1)
