"""Train three LoRA adapters for `tiny-python`, each of which you recognise at a glance by the text
that it writes.

    uv run python vllm/models/train_adapters.py                    # all three, then the card
    uv run python vllm/models/train_adapters.py braces --steps 50  # one of them, shorter
    uv run python vllm/models/train_adapters.py --card             # measure the existing adapters, rewrite the card

    braces   blocks in braces, statements closed by a semicolon
    doctest  every line after the prompt of an interactive session, >>> or ...
    stubs    heads of functions, with ... for a body, as in a .pyi file

The text is again `train.py`'s corpus: its short functions without their docstrings, rewritten in
these styles. The files held out from the base model are held out here too. The base model's weights
stay frozen; only A and B learn. The first line of half the windows is left unchanged, since prompts
are not rewritten either.

Each result is a folder in PEFT's format, in bf16, which `peft`, vLLM and this engine load.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import platform
import random
import re
import sys
import textwrap
import time
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from train import HERE, cross_entropy, learning_rate_factor, load_model, load_tokenizer, windows

from minivllm.config import EMBEDDED_MODEL
from minivllm.memory.adapters import ALL_LINEARS, ATTENTION_LINEARS
from minivllm.platforms.allocator import keep_freed_memory
from minivllm_lab.corpus import corpus_files, held_out_texts, is_held_out, read_texts
from minivllm_lab.multi_lora.adapters import WEIGHTS_FILE, merge_adapter, peft_key, read_adapter, write_adapter
from minivllm_lab.results import write_json
from minivllm_lab.tables import markdown_table

ADAPTERS = HERE / "adapters"
COMPARED = HERE.parents[1] / "benchmarks" / "results" / "adapters.cpu.json"
CONTEXT, ROWS, MOST_LINES = 256, 8, 10
HELD_OUT_ROWS, PROMPTS, NEW_TOKENS = 64, 64, 48
SHOWN = ("def add(a, b):", "def read(self, path):")

console = Console()


# --- what the adapters speak
# ------------------------------------------------------------------------------------------


def with_braces(function: str) -> str:
    """Rewrite a function with blocks in braces and statements closed by semicolons, both found
    exactly by Python's own tokenizer.
    """
    lines, opened, closed = function.split("\n"), [], {}
    kept = (t for t in tokenize.generate_tokens(io.StringIO(function).readline) if t.type not in SKIPPED)
    tokens = list(kept)
    start = row = 0
    for before, token, after in zip([tokens[0], *tokens], tokens, [*tokens[1:], tokens[-1]], strict=False):
        if before.type in BETWEEN_STATEMENTS and token.type not in BETWEEN_STATEMENTS:
            start = token.start[1]
        if token.type == tokenize.NEWLINE:
            row, column = before.end[0] - 1, before.end[1]
            opens = after.type == tokenize.INDENT
            lines[row] = lines[row][: column - opens] + (" {" if opens else ";") + lines[row][column:]
        elif token.type == tokenize.INDENT:
            opened.append(start)
        elif token.type == tokenize.DEDENT:
            closed.setdefault(row, []).append(" " * opened.pop() + "}")
    return "\n".join(part for row, line in enumerate(lines) for part in (line, *closed.get(row, ()))) + "\n"


SKIPPED = (tokenize.NL, tokenize.COMMENT)
BETWEEN_STATEMENTS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def as_session(function: str) -> str:
    """Return the function as typed into an interactive session, where a blank line would end it."""
    first, *others = (line for line in function.split("\n") if line.strip())
    return "\n".join([f">>> {first}", *(f"... {line}" for line in others), "... \n"])


def as_stub(function: str) -> str:
    """Return the head of the function with `...` for its body."""
    return function.split("\n", 1)[0] + " ...\n"


def lines_like(pattern: str) -> Callable[[str], bool]:
    """Return a test of whether at least half of a text's finished lines, blank ones aside, match
    the pattern.
    """

    def speaks(text: str) -> bool:
        lines = [line for line in text.split("\n")[:-1] if line.strip()]
        return bool(lines) and 2 * sum(bool(re.search(pattern, line)) for line in lines) >= len(lines)

    return speaks


@dataclass(frozen=True)
class Task:
    """A style that one adapter learns, and the test that recognises its text."""

    rewrite: Callable[[str], str]
    """A function's source as the adapter shall write it."""
    speaks: Callable[[str], bool]
    rank: int
    targets: tuple[str, ...]
    about: str


TASKS = {
    "braces": Task(with_braces, lines_like(r"[;{}]\s*(#.*)?$"), 16, ALL_LINEARS, "blocks in braces, semicolons"),
    "doctest": Task(as_session, lines_like(r"^(>>>|\.\.\.)"), 8, ATTENTION_LINEARS, "an interactive session"),
    "stubs": Task(as_stub, lines_like(r"\.\.\.$"), 8, ALL_LINEARS, "heads of functions, ... for a body"),
}


# --- text
# -------------------------------------------------------------------------------------------------------------


def functions_of(text: str) -> list[str]:
    """Return the source of each short function and method in a file, dedented, without docstring
    and comments.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    lines = text.expandtabs(8).split("\n")
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.end_lineno)
    found = (short_function(node, lines) for node in nodes)
    return [function for function in found if function]


def short_function(node: ast.FunctionDef, lines: list[str]) -> str | None:
    """Return one function's source, or None if the function is long, its head takes several lines,
    or the cut source does not parse.
    """
    assert node.end_lineno
    body = node.body[1:] if ast.get_docstring(node) else node.body
    if not body or node.body[0].lineno == node.lineno or node.end_lineno - body[0].lineno > MOST_LINES:
        return None
    kept = [lines[node.lineno - 1], *lines[body[0].lineno - 1 : node.end_lineno]]
    function = textwrap.dedent("\n".join(line for line in kept if not line.lstrip().startswith("#"))) + "\n"
    try:
        return function if len(ast.parse(function).body) == 1 and function.startswith("def ") else None
    except SyntaxError:
        return None


def rewritten(functions: list[str], task: Task) -> list[tuple[str, str]]:
    """Return the function's original first line, and the whole function as the adapter should write
    it.
    """
    return [(function.split("\n", 1)[0], task.rewrite(function)) for function in functions]


def row(tokenizer, pairs: list[tuple[str, str]], rng: random.Random) -> np.ndarray:
    """Return one window of `CONTEXT` + 1 ids: functions one after another; in half the windows, the
    first line is unchanged.
    """
    text, as_it_was = "", rng.random() < 0.5
    while len(text) < 6 * CONTEXT:
        head, function = rng.choice(pairs)
        if not text and as_it_was and not function.startswith(head):
            function = head + function[function.index("\n") :]
        text += function
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"][: CONTEXT + 1], dtype=np.int64)


def rows(tokenizer, pairs: list[tuple[str, str]], rng: random.Random) -> Iterator[np.ndarray]:
    """Yield windows without end; the few that are too short are drawn again."""
    while True:
        ids = row(tokenizer, pairs, rng)
        if len(ids) == CONTEXT + 1:
            yield ids


def batch(found: Iterator[np.ndarray], count: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets [count, CONTEXT]."""
    return windows(np.stack([next(found) for _ in range(count)]), torch.device("cpu"))


# --- training
# ---------------------------------------------------------------------------------------------------------


class LoRALinear(torch.nn.Module):
    """A frozen linear with scale * B A added to it: A [rank, in]; B [out, rank], which starts at
    zero.
    """

    def __init__(self, base: torch.nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.lora_A = torch.nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.lora_B = torch.nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out]."""
        return self.base(x) + self.scale * (x @ self.lora_A.T @ self.lora_B.T)


def with_lora(model: Any, task: Task, scale: float) -> dict[str, torch.nn.Parameter]:
    """Freeze the model, add A and B to its target linears, and return them under PEFT's keys."""
    model.requires_grad_(False)
    matrices = {}
    for index, layer in enumerate(model.model.layers):
        for name in task.targets:
            parent = layer.self_attn if name in ATTENTION_LINEARS else layer.mlp
            linear = LoRALinear(getattr(parent, name), task.rank, scale)
            setattr(parent, name, linear)
            matrices |= {peft_key(index, name, "A"): linear.lora_A, peft_key(index, name, "B"): linear.lora_B}
    return matrices


def train(name: str, functions: list[str], steps: int, learning_rate: float, seed: int) -> None:
    """Train one adapter and write it together with the facts of its training."""
    task, scale = TASKS[name], 2.0
    torch.manual_seed(seed)
    keep_freed_memory()
    model, tokenizer = load_model(EMBEDDED_MODEL), load_tokenizer(EMBEDDED_MODEL)
    matrices = with_lora(model, task, scale)
    found = rows(tokenizer, rewritten(functions, task), random.Random(seed))
    optimizer = torch.optim.AdamW(matrices.values(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    history, started = [], time.process_time()
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console) as bar:
        shown = bar.add_task(name, total=steps)
        for step in range(steps):
            loss = cross_entropy(model, *batch(found))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(matrices.values(), 1.0)
            optimizer.param_groups[0]["lr"] = learning_rate * max(0.0, learning_rate_factor(step / steps))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            history.append(loss.item())
            bar.update(shown, advance=1, description=f"{name} loss {sum(history[-10:]) / len(history[-10:]):.3f}")
    tensors = {key: matrix.detach().to(torch.bfloat16) for key, matrix in matrices.items()}
    folder = write_adapter(ADAPTERS / name, tensors, task.rank, scale * task.rank, task.targets, EMBEDDED_MODEL.name)
    facts = {
        "parameters": sum(matrix.numel() for matrix in matrices.values()),
        "steps": steps,
        "tokens_seen": steps * ROWS * CONTEXT,
        "learning_rate": learning_rate,
        "seed": seed,
        "cpu_minutes": round((time.process_time() - started) / 60, 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": f"{torch.get_num_threads()} CPU threads",
    }
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    console.print(f"{name}: loss {history[0]:.3f} -> {sum(history[-10:]) / 10:.3f}, {facts['cpu_minutes']} CPU minutes")


# --- measuring
# --------------------------------------------------------------------------------------------------------


def merged(name: str | None) -> Any:
    """Return the base model, either unchanged or with an adapter merged into its weights."""
    model = load_model(EMBEDDED_MODEL).eval()
    if name is not None:
        merge_adapter(model, ADAPTERS / name)
    return model


@torch.no_grad()
def continuations(model, tokenizer, prompts: list[str]) -> list[str]:
    """Return greedy continuations of `NEW_TOKENS` tokens."""
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    inputs = tokenizer(prompts, return_tensors="pt", add_special_tokens=False, padding=True)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    out = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def compare(names: list[str]) -> dict[str, Any]:
    """Measure the held-out loss of the base model and of each adapter on each task's text, and
    which style each of them writes.

    `recognised` counts, among the greedy continuations of held-out function heads, those that look
    like each task.
    """
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    functions = [function for text in held_out_texts() for function in functions_of(text)]
    texts = {name: rows(tokenizer, rewritten(functions, TASKS[name]), random.Random(1)) for name in names}
    held_out = {name: batch(found, HELD_OUT_ROWS) for name, found in texts.items()}
    heads = list(dict.fromkeys(function.split("\n", 1)[0] for function in functions))
    heads = random.Random(2).sample([head for head in heads if head.endswith("):")], PROMPTS)
    figures = {}
    for name in (None, *names):
        model = merged(name)
        with torch.no_grad():
            losses = {task: cross_entropy(model, *held_out[task]).item() for task in names}
        spoken = continuations(model, tokenizer, heads)
        figures[name or "base"] = {
            "held_out_loss": {task: round(loss, 4) for task, loss in losses.items()},
            "recognised": {task: sum(map(TASKS[task].speaks, spoken)) for task in names},
            "texts": dict(zip(SHOWN, continuations(model, tokenizer, list(SHOWN)), strict=True)),
        }
        console.print(name or "base", figures[name or "base"]["held_out_loss"], figures[name or "base"]["recognised"])
    return figures


def write_card() -> None:
    """Measure the adapters, save the figures with the other results, and rewrite the card from
    them.
    """
    names = [name for name in TASKS if (ADAPTERS / name / WEIGHTS_FILE).exists()]
    figures = compare(names)
    write_json(COMPARED, "adapters", figures, unit="nats per token", held_out_rows=HELD_OUT_ROWS, prompts=PROMPTS)
    (ADAPTERS / "README.md").write_text("\n".join(card_lines(names, figures)) + "\n")
    console.print(f"wrote {COMPARED} and {ADAPTERS / 'README.md'}")


def card_lines(names: list[str], figures: dict[str, Any]) -> list[str]:
    """Return the card's lines; every figure is measured here or read from a `training.json`."""
    return [
        "# Adapters of the embedded model",
        "",
        "Written by `train_adapters.py --card`; every figure is measured or read from the `training.json` files.",
        "",
        "Three LoRA adapters for `tiny-python`, in PEFT's format and bf16. The base model's weights are unchanged.",
        "",
        markdown_table(
            ("adapter", "writes", "rank", "linears", "parameters", "kB", "tokens seen", "CPU minutes"),
            [facts_of(name) for name in names],
            words=True,
        ),
        "",
        "Loss in nats per token on text of each kind from files never trained on, "
        f"{HELD_OUT_ROWS} windows of {CONTEXT} tokens:",
        "",
        markdown_table(
            ("model", *(f"{name} text" for name in names)),
            [(spoken, *(f"{found['held_out_loss'][name]:.3f}" for name in names)) for spoken, found in figures.items()],
            words=True,
        ),
        "",
        f"How many of {PROMPTS} greedy continuations of held-out function heads show each style:",
        "",
        markdown_table(
            ("model", *names),
            [(spoken, *(found["recognised"][name] for name in names)) for spoken, found in figures.items()],
            words=True,
        ),
        "",
        f"One prompt, each model's greedy continuation of {NEW_TOKENS} tokens:",
        *(line for spoken, found in figures.items() for prompt in SHOWN for line in shown(spoken, prompt, found)),
    ]


def facts_of(name: str) -> tuple[Any, ...]:
    """Return the adapter's row in the card's table."""
    config, _ = read_adapter(ADAPTERS / name)
    facts = json.loads((ADAPTERS / name / "training.json").read_text())
    linears = ", ".join(linear.removesuffix("_proj") for linear in config["target_modules"])
    size = (ADAPTERS / name / WEIGHTS_FILE).stat().st_size / 1e3
    seen = f"{facts['tokens_seen'] / 1e6:.2f} M"
    return (
        f"`{name}`", TASKS[name].about, config["r"], linears, f"{facts['parameters']:,}", f"{size:.0f}", seen,
        facts["cpu_minutes"],
    )  # fmt: skip


def shown(spoken: str, prompt: str, found: dict[str, Any]) -> list[str]:
    """Return the card's lines for a continuation, without its unfinished last line."""
    text = prompt + found["texts"][prompt].rsplit("\n", 1)[0].rstrip()
    return ["", f"`{spoken}`:", "", "```text", text, "```"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapters", nargs="*", choices=[*TASKS, []], help="which to train (default: all)")
    parser.add_argument("--steps", type=int, default=150, help=f"steps of {ROWS} windows of {CONTEXT} tokens")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--card", action="store_true", help="only measure the existing adapters")
    arguments = parser.parse_args()
    if not arguments.card:
        training = read_texts([path for path in corpus_files() if not is_held_out(path)])
        functions = [function for text in training for function in functions_of(text)]
        console.print(f"{len(functions):,} functions")
        for name in arguments.adapters or TASKS:
            train(name, functions, arguments.steps, arguments.learning_rate, arguments.seed)
    write_card()


if __name__ == "__main__":
    sys.exit(main())
