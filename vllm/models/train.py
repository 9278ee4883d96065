"""Train the models that ship with this repository, from Python's own standard library.

    uv run python vllm/models/train.py tiny-python --minutes 90
    uv run python vllm/models/train.py tiny-python --minutes 60 --resume    # continue from the saved weights
    uv run python vllm/models/train.py tiny-python-draft --minutes 20
    uv run python vllm/models/train.py --card            # measure both, rewrite README.md

The corpus is the source of the standard library that the running interpreter came with: every
machine has it, and the PSF licence permits it. One file in fifty is held out. The tokenizer is a
byte-level BPE of 4,096 tokens, learned once and shared by all models. Everything is seeded;
`--tokens` fixes the amount of work, `--minutes` the time instead.

The result is a Hugging Face directory (config.json, model.safetensors, tokenizer.json), so
`transformers` loads it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from minivllm.platforms.allocator import keep_freed_memory
from minivllm_lab.corpus import corpus_files, held_out_texts, is_held_out, read_texts
from minivllm_lab.tables import markdown_table

HERE = Path(__file__).resolve().parent
SIBLINGS_COMPARED = HERE.parents[1] / "benchmarks" / "results" / "attention_siblings.cpu.json"
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096
BATCH_TOKENS = 4096
SHORT_CONTEXT, LONG_CONTEXT = 512, 2048
LONG_ONE_IN = 6  # batches come in long windows all the way: positions that are not trained for a while are forgotten
PROMPTS_ONE_IN = 3  # batches of windows that begin as prompts do
CUT_SHARE = 0.05  # of the spaces before a word: this share becomes a token of its own, as it does at a prompt's end
PROMPT_LIKE = re.compile(r"^[ ]*(?:async |await )?(?:def|class|import|from|for|if|while|with|return|try|raise)\b", re.M)
CARD_COLUMNS = (
    "model",
    "layers × width",
    "heads / KV heads",
    "parameters",
    "bf16 MB",
    "tokens seen",
    "epochs",
    "held-out loss",
    "bits/byte",
    "trained on",
)
PROMPTS = ("def ", "import ", "class Queue", "    for i in range(", "    if not isinstance(")

console = Console()


@dataclass(frozen=True)
class Shape:
    """The hyper-parameters that differ between the shipped models."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    learning_rate: float
    kv_lora_rank: int = 0
    """Above 0: latent attention (MLA) of this width, in DeepSeek-V2's architecture."""


SHAPES = {
    "tiny-python": Shape(256, 4, 8, 2, 688, 5e-3),
    "tiny-python-draft": Shape(128, 2, 4, 1, 344, 8e-3),
}


# --- corpus
# ---------------------------------------------------------------------------------------------------------


def learn_tokenizer(texts: list[str]):
    """Learn a byte-level BPE of 4,096 tokens that splits numbers into digits; return it wrapped as
    `transformers` expects it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT, model_max_length=LONG_CONTEXT
    )


def encode(tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Return one array of token ids for each text, ended by the end-of-text token."""
    batches = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [np.array([*ids, tokenizer.eos_token_id], dtype=np.int64) for ids in batches]


def cut_after_spaces(text: str, rng: random.Random) -> list[str]:
    """Return the text in pieces, a few of which end in the space before a word.

    Byte-level BPE glues a space to the word after it. A prompt such as `def ` ends in a space
    without its word, and a model that has never seen one continues it badly; so this model sees
    some.
    """
    cuts = [found.start() for found in re.finditer(r"(?<=[^\s] )(?=\w)", text) if rng.random() < CUT_SHARE]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def encode_cut(tokenizer, texts: list[str], seed: int) -> list[np.ndarray]:
    """Encode as `encode` does, with each text's pieces tokenized apart."""
    rng = random.Random(seed)
    documents = []
    for text in texts:
        pieces = tokenizer(cut_after_spaces(text, rng), add_special_tokens=False)["input_ids"]
        documents.append(np.array([*(i for ids in pieces for i in ids), tokenizer.eos_token_id], dtype=np.int64))
    return documents


def token_stream(documents: list[np.ndarray], seed: int) -> Iterator[np.ndarray]:
    """Yield endless runs of `BATCH_TOKENS` + 1 ids from the documents, which come in a new order
    each epoch.
    """
    rng = np.random.default_rng(seed)
    while True:
        stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
        offset = int(rng.integers(BATCH_TOKENS))
        starts = np.arange(offset, len(stream) - BATCH_TOKENS - 1, BATCH_TOKENS)
        for start in rng.permutation(starts):
            yield stream[start : start + BATCH_TOKENS + 1]


def rows_of(ids: np.ndarray, context: int) -> np.ndarray:
    """Cut a run of ids into windows of `context` + 1, each beginning with the last id of the
    previous one.
    """
    return np.stack([ids[first : first + context + 1] for first in range(0, len(ids) - 1, context)])


def prompt_like_rows(tokenizer, texts: list[str], context: int, rng: random.Random) -> np.ndarray:
    """Return windows that begin where a prompt might: at a statement, half of them with the first
    space cut off.

    A window of the stream begins anywhere, in the middle of a name too, so from the stream alone a
    model learns nothing of what follows a first token.
    """
    rows = []
    while len(rows) < BATCH_TOKENS // context:
        text = rng.choice(texts)
        starts = [found.start() for found in PROMPT_LIKE.finditer(text)]
        if not starts:
            continue
        start = rng.choice(starts)
        piece = text[start : start + 8 * context]
        first = re.match(r"[ ]*\w+ (?=\w)", piece) if rng.random() < 0.5 else None
        head = piece[: first.end()] if first else ""
        (ids,) = encode_cut(tokenizer, [piece[len(head) :]], rng.getrandbits(32))
        ids = np.concatenate([np.array(tokenizer(head, add_special_tokens=False)["input_ids"], dtype=np.int64), ids])
        if len(ids) > context:
            rows.append(ids[: context + 1])
    return np.stack(rows)


# --- model
# ----------------------------------------------------------------------------------------------------------


def build_model(shape: Shape) -> Any:
    """Return a randomly initialised Llama, in Hugging Face's own class so that its files load
    anywhere.

    With a `kv_lora_rank`, it is a DeepSeek-V2 without experts whose heads are as wide as a Llama's:
    half of each head is rotated, and half is not.
    """
    from transformers import AutoModelForCausalLM, DeepseekV2Config, LlamaConfig

    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "max_position_embeddings": LONG_CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "attn_implementation": "sdpa",
    }
    if not shape.kv_lora_rank:
        return AutoModelForCausalLM.from_config(LlamaConfig(**common, rms_norm_eps=1e-5))
    width = shape.hidden_size // shape.num_attention_heads
    latent = {
        "kv_lora_rank": shape.kv_lora_rank,
        "q_lora_rank": None,
        "qk_nope_head_dim": width // 2,
        "qk_rope_head_dim": width // 2,
        "v_head_dim": width,
        "first_k_dense_replace": shape.num_hidden_layers,
    }
    return AutoModelForCausalLM.from_config(DeepseekV2Config(**common, **latent))


def load_model(directory: Path) -> Any:
    """Return the saved model with its weights in fp32, to train on."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")


def load_tokenizer(directory: Path):
    """Return the tokenizer that was learned with the model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def build_optimizers(model, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers and AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95), fused=True),
    ]


def learning_rate_factor(progress: float) -> float:
    """Return a factor that warms up over the first 2 %, stays constant, and falls linearly to zero
    over the last 45 %.
    """
    return min(1.0, progress / 0.02 + 0.02, (1.0 - progress) / 0.45)


def cross_entropy(model, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return mean cross-entropy in nats per token; inputs and targets are [windows, context]."""
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=inputs, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.reshape(-1))


def windows(rows: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of windows [n, context + 1]."""
    ids = torch.from_numpy(rows).to(device)
    return ids[:, :-1], ids[:, 1:]


@torch.no_grad()
def held_out_loss(model, documents: list[np.ndarray], device: torch.device, max_batches: int = 24) -> float:
    """Return nats per token on files that were never used for training, in windows of
    `LONG_CONTEXT`.
    """
    stream = np.concatenate(documents)
    starts = range(0, min(len(stream) - BATCH_TOKENS - 1, max_batches * BATCH_TOKENS), BATCH_TOKENS)
    batches = (windows(rows_of(stream[start : start + BATCH_TOKENS + 1], LONG_CONTEXT), device) for start in starts)
    losses = [cross_entropy(model, *batch).item() for batch in batches]
    return sum(losses) / len(losses)


def train(
    name: str, minutes: float | None, tokens: int, learning_rate: float, seed: int, resume: bool, device: torch.device
) -> None:
    """Train one model and write it, with the facts for its card, to its directory beside this file."""
    torch.manual_seed(seed)
    files = corpus_files()
    training = read_texts([path for path in files if not is_held_out(path)])
    console.print(f"corpus: {len(training)} files, {sum(map(len, training)) / 1e6:.1f} M characters")
    tokenizer = load_tokenizer(HERE / name) if resume else learn_tokenizer(training)
    corpus = Corpus.encoded(tokenizer, training, seed)
    before = json.loads((HERE / name / "training.json").read_text()) if resume else {}
    model = (load_model(HERE / name) if resume else build_model(SHAPES[name])).to(device)
    compiled = torch.compile(cross_entropy, dynamic=False)
    facts = fit(model, corpus, name, minutes, tokens, learning_rate, seed, compiled)
    facts["tokens_seen"] += before.get("tokens_seen", 0)
    facts["minutes"] += before.get("minutes", 0)
    save(model, tokenizer, HERE / name, facts)
    console.print(f"held-out loss {facts['held_out_loss']:.3f} nats/token after {facts['minutes']:.0f} minutes")


@dataclass(frozen=True)
class Corpus:
    """A model's training text, also as token ids, and the held-out text."""

    tokenizer: Any
    texts: list[str]
    documents: list[np.ndarray]
    held_out_texts: list[str]
    held_out: list[np.ndarray]

    @classmethod
    def encoded(cls, tokenizer, texts: list[str], seed: int) -> Corpus:
        """Encode the training texts, with cuts drawn from `seed`, and the held-out ones."""
        held_out = held_out_texts()
        corpus = cls(tokenizer, texts, encode_cut(tokenizer, texts, seed), held_out, encode(tokenizer, held_out))
        trained_on, kept = (sum(map(len, documents)) for documents in (corpus.documents, corpus.held_out))
        console.print(f"tokens: {trained_on / 1e6:.2f} M, {kept / 1e6:.2f} M held out")
        return corpus


def fit(
    model,
    corpus: Corpus,
    name: str,
    minutes: float | None,
    tokens: int,
    learning_rate: float,
    seed: int,
    loss_of: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor] = cross_entropy,
) -> dict[str, Any]:
    """Train for `minutes`, or else on `tokens` tokens; `seed` orders the data. Return the facts for
    `training.json`.

    `loss_of` is `cross_entropy`, compiled or not.
    """
    keep_freed_memory()
    device = model.device
    optimizers = build_optimizers(model, learning_rate)
    console.print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters on {device}")
    stream = token_stream(corpus.documents, seed)
    prompts, history, seen, started = random.Random(seed), [], 0, time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=1.0)
        progress = 0.0
        while progress < 1.0:
            elapsed = time.perf_counter() - started
            progress = elapsed / 60 / minutes if minutes else seen / tokens
            context = SHORT_CONTEXT if len(history) % LONG_ONE_IN else LONG_CONTEXT
            if len(history) % PROMPTS_ONE_IN == 1:
                rows = prompt_like_rows(corpus.tokenizer, corpus.texts, context, prompts)
            else:
                rows = rows_of(next(stream), context)
            loss = loss_of(model, *windows(rows, device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate * max(0.0, learning_rate_factor(progress))
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            seen += BATCH_TOKENS
            history.append(loss.item())
            recent = sum(history[-50:]) / len(history[-50:])
            summary = f"{name} loss {recent:.3f} {seen / 1e6:.1f}M tokens"
            bar.update(task, completed=min(progress, 1.0), description=summary)
            if len(history) % 100 == 0 and not console.is_terminal:
                console.print(f"step {len(history)} loss {recent:.3f} {seen / elapsed:.0f} tokens/s {elapsed:.0f} s")

    texts = corpus.held_out_texts
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_seen": seen,
        "tokens_in_corpus": sum(map(len, corpus.documents)),
        "characters_in_corpus": sum(map(len, corpus.texts)),
        "files": len(corpus.texts),
        "held_out_files": len(texts),
        "held_out_bytes_per_token": sum(len(t.encode()) for t in texts) / sum(map(len, corpus.held_out)),
        "held_out_loss": held_out_loss(model, corpus.held_out, device),
        "training_loss": sum(history[-50:]) / len(history[-50:]),
        "minutes": (time.perf_counter() - started) / 60,
        "seed": seed,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads",
    }


def save(model, tokenizer, directory: Path, facts: dict) -> None:
    """Write bf16 weights, config and tokenizer in Hugging Face's layout, and `training.json`."""
    model.to(torch.bfloat16).save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # where older readers look for it
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer.save_pretrained(directory)
    (directory / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


# --- card
# -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def sample(model, tokenizer, prompt: str, seed: int, new_tokens: int = 96, temperature: float = 0.6) -> str:
    """Return one sampled continuation."""
    torch.manual_seed(seed)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"].to(model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=True,
        temperature=temperature,
        top_k=50,
        pad_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.decode(out[0], skip_special_tokens=True)


@torch.no_grad()
def acceptance_rate(target, draft, documents: list[np.ndarray], max_windows: int = 16) -> float:
    """Return alpha = E[sum_x min(p(x), q(x))] on held-out text: how often a sampled draft is
    accepted (arXiv 2211.17192).
    """
    stream = np.concatenate(documents)
    rates = []
    for start in range(0, min(len(stream) - SHORT_CONTEXT, max_windows * SHORT_CONTEXT), SHORT_CONTEXT):
        ids = torch.from_numpy(stream[start : start + SHORT_CONTEXT])[None].to(target.device)
        p, q = (model(input_ids=ids).logits.float().softmax(-1) for model in (target, draft))
        rates.append(torch.minimum(p, q).sum(-1).mean().item())
    return sum(rates) / len(rates)


def head_lines() -> list[str]:
    """Return the card's lines about the EAGLE-3 head, which `train_eagle3.py` has trained and
    measured.
    """
    directory = HERE / "tiny-python-eagle3"
    if not (directory / "training.json").exists():
        return []
    fact = json.loads((directory / "training.json").read_text())
    rates = [count / fact["num_drafts"] for count in fact["num_accepted_tokens_per_pos"]]
    megabytes = (directory / "model.safetensors").stat().st_size / 1e6
    return [
        "",
        "## The EAGLE-3 head",
        "",
        "`tiny-python-eagle3` drafts for `tiny-python`: one layer that reads its hidden states, "
        f"{fact['parameters'] / 1e6:.2f} M parameters, {megabytes:.1f} MB.",
        "Embeddings and LM head are the target's. Trained by `train_eagle3.py` on what the target wrote after",
        f"{fact['prompts']:,} prompts from the same corpus, {fact['tokens_generated'] / 1e6:.2f} M tokens: "
        f"{fact['batches']} batches of {fact['batch_rows']} texts, {fact['device']}, {fact['minutes']:.0f} min.",
        "",
        f"After {fact['held_out_prompts']} prompts from held-out files, greedily, {len(rates)} drafts at a time, "
        "the shares",
        f"accepted by position are {', '.join(f'{rate:.3f}' for rate in rates)}: a mean acceptance length of "
        f"**{fact['mean_acceptance_length']:.2f}**.",
    ]


def sibling_lines() -> list[str]:
    """Return the card's lines about the siblings, which `train_siblings.py` has trained and
    compared.
    """
    if not SIBLINGS_COMPARED.exists():
        return []
    found = json.loads(SIBLINGS_COMPARED.read_text())["figures"]
    columns = ("model", "KV heads", "cached numbers", "MLP", "parameters", "tokens seen", "held-out loss", "by seed")
    rows = [
        (
            f"`{name}`",
            fact["num_key_value_heads"] or "latent",
            fact["cached_numbers_per_token_and_layer"],
            fact["intermediate_size"],
            f"{fact['parameters']:,}",
            f"{fact['tokens_seen'] / 1e6:.1f} M",
            f"{fact['held_out_loss_mean']:.3f}",
            ", ".join(f"{loss:.3f}" for loss in fact["held_out_loss_of_seed"].values()),
        )
        for name, fact in found.items()
    ]
    return [
        "",
        "## The siblings",
        "",
        "Four models as wide and deep as `tiny-python-draft`, with 8 query heads each, all trained by",
        "`train_siblings.py`; the MLP takes the parameters that fewer KV heads save. Cached numbers are per token and",
        "layer. The weights here are seed 0's. They have seen little data: they are meant for comparison.",
        "",
        markdown_table(columns, rows, words=True),
    ]


def adapter_lines() -> list[str]:
    """Return the card's lines that link to the adapters' own card, which `train_adapters.py`
    writes.
    """
    if not (HERE / "adapters" / "README.md").exists():
        return []
    return [
        "",
        "## The adapters",
        "",
        "Three LoRA adapters for `tiny-python` have [a card of their own](adapters/README.md).",
    ]


def write_card() -> None:
    """Rewrite README.md from the files in the directories; nothing in it is typed by hand."""
    directories = [HERE / name for name in SHAPES if (HERE / name / "training.json").exists()]
    models = {d.name: load_model(d).eval() for d in directories}
    facts = {d.name: json.loads((d / "training.json").read_text()) for d in directories}
    tokenizer = load_tokenizer(HERE / "tiny-python")
    held_out = encode(tokenizer, held_out_texts())
    lines = [
        "# The embedded models",
        "",
        "Written by `train.py --card`; every figure is read from the weights or from `training.json` beside them.",
        "",
        "Llama architecture, byte-level BPE of 4,096 tokens, bf16, trained on the source of Python's standard library",
        "(PSF licence). One file in fifty was held out. They know nothing but the look of Python, and that is their",
        "use: text that anyone recognises, a draft that is really accepted, a quantization error that is a real loss.",
        "",
    ]
    rows = []
    for name, fact in facts.items():
        shape, loss = SHAPES[name], fact["held_out_loss"]
        bits = loss / math.log(2) / fact["held_out_bytes_per_token"]
        size = (HERE / name / "model.safetensors").stat().st_size / 1e6
        rows.append((
            f"`{name}`",
            f"{shape.num_hidden_layers} × {shape.hidden_size}",
            f"{shape.num_attention_heads} / {shape.num_key_value_heads}",
            f"{fact['parameters'] / 1e6:.2f} M",
            f"{size:.1f}",
            f"{fact['tokens_seen'] / 1e6:.1f} M",
            f"{fact['tokens_seen'] / fact['tokens_in_corpus']:.1f}",
            f"{loss:.3f}",
            f"{bits:.3f}",
            f"{fact['device']}, {fact['minutes']:.0f} min",
        ))  # fmt: skip
    fact = facts["tiny-python"]
    lines += [
        markdown_table(CARD_COLUMNS, rows, words=True),
        "",
        f"Loss is in nats per token, on {fact['held_out_files']} files never trained on, "
        f"in windows of {LONG_CONTEXT:,} tokens.",
        f"The corpus: {fact['files']:,} files of Python {fact['python']}, "
        f"{fact['characters_in_corpus'] / 1e6:.1f} M characters, {fact['tokens_in_corpus'] / 1e6:.2f} M tokens.",
        f"One batch in {LONG_ONE_IN} has windows of {LONG_CONTEXT:,} tokens, the others of {SHORT_CONTEXT};",
        f"{LONG_CONTEXT:,} is the models' `max_position_embeddings`.",
    ]
    if "tiny-python-draft" in models:
        alpha = acceptance_rate(models["tiny-python"], models["tiny-python-draft"], held_out)
        lines += ["", f"The draft's acceptance rate on held-out text, E[Σ min(p, q)], temperature 1: **{alpha:.3f}**."]
    lines += head_lines() + sibling_lines() + adapter_lines()
    lines += ["", "## Samples", "", "`tiny-python`, temperature 0.6, top-k 50, seed 0, first try."]
    for prompt in PROMPTS:
        text = sample(models["tiny-python"], tokenizer, prompt, seed=0).rstrip()
        lines += ["", f"Prompt `{prompt}`:", "", "```text", text, "```"]
    (HERE / "README.md").write_text("\n".join(lines) + "\n")
    console.print(f"wrote {HERE / 'README.md'}")


def main() -> None:
    """Train one model, or rewrite the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=sorted(SHAPES), help="which model to train")
    parser.add_argument("--minutes", type=float, help="train for this long (default: by --tokens)")
    parser.add_argument("--tokens", type=int, default=30_000_000, help="train on this many tokens")
    parser.add_argument("--learning-rate", type=float, help="the peak (default: the model's own)")
    parser.add_argument("--resume", action="store_true", help="continue from the saved weights, reordering the files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--card", action="store_true", help="only rewrite README.md from the trained models")
    arguments = parser.parse_args()
    if not arguments.card and arguments.model is None:
        parser.error("name a model to train, or pass --card")
    if arguments.model:
        rate = arguments.learning_rate or SHAPES[arguments.model].learning_rate
        device = torch.device(arguments.device)
        train(arguments.model, arguments.minutes, arguments.tokens, rate, arguments.seed, arguments.resume, device)
    if arguments.card:
        write_card()


if __name__ == "__main__":
    sys.exit(main())
