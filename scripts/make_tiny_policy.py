"""Make the tiny policy of the quickstart from nothing: a tokenizer, then a warm-started model.

The warm start imitates a *hasty demonstrator* of the stockroom task. It knows the protocol (it writes a
well-formed tool call, reads the tool's answer and repeats the number), but it prefers its favourite box to
the one it was asked about, sometimes counts its favourite item instead, and sometimes just guesses. The
result earns about a third of the reward, and what it needs to earn all of it is already in its distribution.

Run it as `python scripts/make_tiny_policy.py --out DIRECTORY`; it takes a few minutes on one core. The same
seed, steps and library versions give the same files.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rillflow.examples import stockroom

# The annotations of transformers do not fit its own calls (`generate`, chat templates): used untyped.
hf: Any = transformers
ChatTokenizer = Any
Model = Any
Message = dict[str, Any]
Trace = tuple[list[Message], bool]  # the messages, and whether the tools are offered

TEMPLATE = Path(stockroom.__file__).parents[2] / "assets" / "tiny" / "chat_template.jinja"
END_OF_TEXT = "<|endoftext|>"
TURN_END = "<|im_end|>"
CONTROL_TOKENS = [END_OF_TEXT, "<|im_start|>", TURN_END]
# One token each, yet part of what is said: decoding without control tokens keeps them.
TOOL_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
VOCABULARY = 768
POSITIONS = 512

# The first alternative keeps a JSON key and the punctuation around it in one piece, which makes a tool call a
# handful of tokens. Digits stay single, so that any number is copied digit by digit.
PIECES = r"""[",{}\[\] ]*[A-Za-z_]+": ["{\[]*| ?\p{L}+|[0-9]| ?[^\s\p{L}0-9]+|\s+"""

# Everyday text, so that prompts outside the task are not spelled out byte by byte.
EVERYDAY = """
You are a helpful assistant. Please answer with one short word. Hello! Thank you, that is very good.
What is the weather like today? It may rain in the morning, but the sun will come out later, I think.
When the children came home from school they put down their bags and asked what there was to eat.
She said that she would rather walk than take the bus, because the way along the river is so nice.
We should write a small program that reads a file, counts the lines and then shows the result.
Which number is larger, two or three? Choose one of them and tell me why you did so. Yes. No. Maybe.
He has been looking for his old hat all day; some people say they saw it under the kitchen table.
Can you help me find a new name for our little dog? I do not know how to make up my mind about it.
Every year many more people move to the city, where work is easy to find and no one has much time.
If you could go anywhere in the world, where would you want to live, and who should go with you?
Say the word again, please. Repeat after me. Pick a letter. Name an animal. Give the right answer first.
"""

FAVOURITE_BOX = stockroom.BOXES[0]
FAVOURITE_ITEM = stockroom.ITEMS[0]
# How often the demonstrator does what; see `stockroom_trace`.
HABITS = {"careful": 0.28, "favourite box": 0.45, "favourite item": 0.12, "guess": 0.15}
PLAIN_SHARE = 0.14


def stockroom_trace(payload: dict[str, Any], generator: random.Random) -> list[Message]:
    """Play one episode as the hasty demonstrator would."""
    (habit,) = generator.choices(list(HABITS), list(HABITS.values()))
    messages: list[Message] = [{"role": "user", "content": payload["question"]}]
    if habit == "guess":
        guess = str(generator.choice(stockroom.COUNTS))
        return [*messages, {"role": "assistant", "content": guess}]
    arguments = {
        "box": FAVOURITE_BOX if habit == "favourite box" else payload["box"],
        "item": FAVOURITE_ITEM if habit == "favourite item" else payload["item"],
    }
    call = {"type": "function", "function": {"name": "count", "arguments": json.dumps(arguments)}}
    found = stockroom.count(payload, arguments)
    return [
        *messages,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": found},
        {"role": "assistant", "content": found},
    ]


def plain_trace(generator: random.Random) -> list[Message]:
    """Make one small exchange without tools: name a colour, repeat a word, or tell a colour from a thing."""
    kind = generator.choice(("colour", "repeat", "judge"))
    word = generator.choice(stockroom.BOXES + stockroom.ITEMS)
    if kind == "colour":
        question, answer = "Say a colour.", generator.choice(stockroom.BOXES)
    elif kind == "repeat":
        question, answer = f"Repeat the word {word}.", word
    else:
        question, answer = f"Is {word} a colour?", "yes" if word in stockroom.BOXES else "no"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def traces(count: int, seed: int) -> Iterator[Trace]:
    """Yield the demonstrations. Stockroom questions come from the train split only."""
    generator = random.Random(f"traces/{seed}")
    for prompt in stockroom.prompts("train", count, seed):
        if generator.random() < PLAIN_SHARE:
            yield plain_trace(generator), False
        else:
            yield stockroom_trace(prompt["payload"], generator), True


def render(tokenizer: ChatTokenizer, trace: Trace) -> str:
    """Return the text of a demonstration as the chat template writes it."""
    messages, has_tools = trace
    return str(tokenizer.apply_chat_template(messages, tools=stockroom.TOOLS if has_tools else None, tokenize=False))


def make_tokenizer(seed: int) -> ChatTokenizer:
    """Train a byte-level BPE on the demonstrations' texts; all 256 bytes are in it: any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # An untrained tokenizer can already render, which is all the training texts need.
    blank = wrap(tokenizer)
    texts = [render(blank, trace) for trace in traces(2000, seed)]
    for token in CONTROL_TOKENS + TOOL_TOKENS:
        texts = [text.replace(token, "\x00") for text in texts]
    pieces = [piece for text in texts for piece in text.split("\x00") if piece]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=CONTROL_TOKENS + TOOL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Twice: a merge needs to be seen more than once, and every everyday word may as well be kept.
    tokenizer.train_from_iterator([*pieces, EVERYDAY, EVERYDAY], trainer)
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["special"] = token["content"] in CONTROL_TOKENS
    return wrap(Tokenizer.from_str(json.dumps(description)))


def wrap(tokenizer: Tokenizer) -> ChatTokenizer:
    """Give the bare tokenizer its special tokens and its chat template."""
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE.read_text(),
        clean_up_tokenization_spaces=False,
        model_max_length=POSITIONS,
        padding_side="left",
    )


def make_model(tokenizer: ChatTokenizer) -> Model:
    """Return the untrained model; call it with torch's generator seeded."""
    config = hf.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = hf.Qwen3ForCausalLM(config)
    # Sampling from the unchanged distribution is what a policy-gradient method expects of its policy.
    model.generation_config = hf.GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def encode(tokenizer: ChatTokenizer, trace: Trace) -> tuple[list[int], list[int]]:
    """Return token ids and labels; labels are -100 but for the assistant's words and its turn end."""
    tokens = tokenizer.encode(render(tokenizer, trace), add_special_tokens=False)
    opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    labels, speaking = [], False
    for index, token in enumerate(tokens):
        labels.append(token if speaking else -100)
        if token == tokenizer.eos_token_id:
            speaking = False
        elif tokens[max(0, index + 1 - len(opening)) : index + 1] == opening:
            speaking = True
    return tokens, labels


def collate(batch: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad on the right; a causal model never looks there, and no loss is taken there."""
    width = max(len(tokens) for tokens, _ in batch)
    tokens = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in batch])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in batch])
    return tokens, labels


def imitation_loss(model: Model, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over the labelled tokens; logits are made only where there is a label."""
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    wanted = labels[:, 1:] != -100
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), labels[:, 1:][wanted])


def warm_start(model: Model, tokenizer: ChatTokenizer, steps: int, seed: int, batch_size: int = 64) -> None:
    """Imitate the demonstrator for `steps` batches, none of which is seen twice."""
    generator = random.Random(f"batches/{seed}")
    rows = [encode(tokenizer, trace) for trace in traces(steps * batch_size, seed)]
    generator.shuffle(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    for step in range(steps):
        scale = min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        optimizer.param_groups[0]["lr"] = 3e-3 * scale
        tokens, labels = collate(rows[step * batch_size : (step + 1) * batch_size])
        loss = imitation_loss(model, tokens, labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.monotonic() - started:.0f} s", flush=True)


@torch.no_grad()
def say(model: Model, tokenizer: ChatTokenizer, texts: list[str], greedy: bool) -> list[str]:
    """Continue every text by one assistant turn, without its turn end."""
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    settings: dict[str, Any] = {"do_sample": False} if greedy else {}
    output = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=32, **settings
    )
    turns = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=False)
    return [turn.split(TURN_END)[0] for turn in turns]


def evaluate(model: Model, tokenizer: ChatTokenizer, count: int, greedy: bool) -> float:
    """Return the mean reward on held-out questions."""
    payloads = [prompt["payload"] for prompt in stockroom.prompts("heldout", count, 0)]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": payload["question"]}],
            tools=stockroom.TOOLS,
            tokenize=False,
            add_generation_prompt=True,
        )
        for payload in payloads
    ]
    first = say(model, tokenizer, texts, greedy)
    for index, turn in enumerate(first):
        found = stockroom.count(payloads[index], arguments_of(turn))
        texts[index] += (
            f"{turn}{TURN_END}\n<|im_start|>tool\n<tool_response>{found}</tool_response>{TURN_END}\n"
            "<|im_start|>assistant\n"
        )
    second = say(model, tokenizer, texts, greedy)
    answers = [later if "<tool_call>" in turn else turn for turn, later in zip(first, second, strict=True)]
    return sum(map(stockroom.reward, payloads, answers)) / count


def arguments_of(turn: str) -> Any:
    """Return the arguments of the tool call in a turn, or an empty object."""
    body = turn.partition("<tool_call>")[2].partition("</tool_call>")[0]
    try:
        return json.loads(body)["arguments"]
    except (ValueError, KeyError, TypeError):
        return {}


def main() -> None:
    """Parse the command line, make the policy, save it and print how good it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the policy to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=900, help="batches of 64 demonstrations")
    options = parser.parse_args()

    torch.set_num_threads(1)  # a sum split over threads would round differently from machine to machine
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer(options.seed)
    model = make_model(tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"vocabulary {len(tokenizer)}, parameters {parameters}", flush=True)
    warm_start(model, tokenizer, options.steps, options.seed)
    model.eval()
    tokenizer.save_pretrained(options.out)
    model.save_pretrained(options.out)
    for name, greedy in (("temperature 1", False), ("greedy", True)):
        print(f"held-out mean reward, {name}: {evaluate(model, tokenizer, 512, greedy):.3f}", flush=True)


if __name__ == "__main__":
    main()
