"""Train the EAGLE-3 head of `tiny-python`: one decoder layer that drafts from the target's own
hidden states.

    uv run python vllm/models/train_eagle3.py                      # from scratch, then measure and save
    uv run python vllm/models/train_eagle3.py --resume             # continue from the saved head, with other prompts
    uv run python vllm/models/train_eagle3.py --quick --out DIR    # seconds: is everything in place?

The target is frozen. It first continues prompts from Python's standard library, since a head learns
best from the text that it will draft. Then the head learns the target's own distribution at each
position (soft cross-entropy), over three unrolled steps: the first from the target's hidden states,
the second and third from the head's own output. This is EAGLE-3's training-time test (arXiv
2503.01840). The LM head is the target's and stays unchanged.

The result is a directory that vLLM loads with `{"method": "eagle3", "model": DIR}`: config.json,
model.safetensors.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from train import build_optimizers, learning_rate_factor, load_model

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL
from minivllm.models.tokenizer import load_tokenizer
from minivllm.platforms.allocator import keep_freed_memory
from minivllm_lab.corpus import corpus_files, held_out_texts, is_held_out, read_texts

HERE = Path(__file__).resolve().parent
AUX_LAYERS = (1, 2, 3)
STEPS = 3  # drafts in a row that the head learns to make
STEP_WEIGHTS = (1.0, 0.8, 0.64)
PROMPT_LENGTHS = (16, 48, 96, 144)
NEW_TOKENS = 80
SAMPLED_ONE_IN = 4  # prompts are continued at temperature 0.8, the others greedily
BATCH_ROWS = 32

PROMPTS_AT_ONCE = 512
HELD_OUT_PROMPTS = 128

console = Console()


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a progress bar; yield a function that advances it and may change its label."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count, words=what: bar.update(task, advance=count, description=words)


# --- data
# -----------------------------------------------------------------------------------------------------------


def prompts_of(texts: list[str], count: int, rng: random.Random) -> list[list[int]]:
    """Return `count` prompts from random positions in the texts; each run of `BATCH_ROWS` prompts
    has one length.
    """
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    prompts = []
    while len(prompts) < count:
        length = PROMPT_LENGTHS[len(prompts) // BATCH_ROWS % len(PROMPT_LENGTHS)]
        text = rng.choice(texts)
        start = rng.randrange(max(1, len(text) - 6 * length))
        ids = tokenizer.encode(text[start : start + 12 * length]).ids[1:]  # the first may be the rest of a word
        if len(ids) >= length:
            prompts.append(ids[:length])
    return prompts


def continue_prompts(llm: LLM, prompts: list[list[int]], sampled_one_in: int, seed: int) -> list[list[int]]:
    """Return each prompt followed by `NEW_TOKENS` tokens that the target generates."""

    def params(index: int) -> SamplingParams:
        temperature = 0.8 if sampled_one_in and index % sampled_one_in == 0 else 0.0
        return SamplingParams(temperature=temperature, max_tokens=NEW_TOKENS, seed=seed + index, ignore_eos=True)

    requests = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(requests, [params(index) for index in range(len(prompts))], use_tqdm=False)
    return [[*ids, *output.outputs[0].token_ids] for ids, output in zip(prompts, outputs, strict=True)]


# --- model
# ----------------------------------------------------------------------------------------------------------


class Norm(nn.RMSNorm):
    """An RMSNorm in float32, even where other modules compute in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to [..., hidden]."""
        return super().forward(x.float())


class Attention(nn.Module):
    """The projections of the head's only attention layer, which reads the embedding and the hidden
    state side by side.
    """

    def __init__(self, config: dict):
        super().__init__()
        hidden, self.head_dim = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(2 * hidden, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=False)

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [rows, heads, tokens, head_dim], with keys and values
        repeated for each query head.
        """
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        group = self.heads // self.kv_heads
        return rotate(q, rotary), rotate(k, rotary).repeat_interleave(group, 1), v.repeat_interleave(group, 1)


class MLP(nn.Module):
    """A gated MLP: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: dict):
        super().__init__()
        hidden, width = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = nn.Linear(hidden, width, bias=False), nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to [..., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The decoder layer: attention over (embedding, hidden state), then the MLP."""

    def __init__(self, config: dict):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, Norm(config["hidden_size"], config["rms_norm_eps"]))


class Head(nn.Module):
    """The head in trainable form; its parameters have the checkpoint's names.

    `minivllm.models.eagle3` computes the same step by step over a paged cache.
    """

    def __init__(self, config: dict):
        super().__init__()
        self.config = config
        hidden = config["hidden_size"]
        self.fc = nn.Linear(len(AUX_LAYERS) * hidden, hidden, bias=False)
        self.midlayer = Layer(config)
        self.norm = Norm(hidden, config["rms_norm_eps"])

    def unrolled(self, features: Tensor, embeds: Tensor, first: int) -> list[Tensor]:
        """Return the head's hidden states when it drafts 1, 2, ... `STEPS` tokens beyond the
        target's hidden states.

        Position i has the hidden state of token i and the embedding of token i + 1, and predicts
        token i + 2. In step j, the target has computed the tokens up to i - j + 1: for those after
        it, the head has its own hidden states and attends to its own keys.

        Args:
            features: the target's hidden states [rows, places, 3 × hidden].
            embeds: the embeddings of the tokens after them [rows, places, hidden].
            first: the first position that matters.

        Returns:
            For each step, normalised hidden states for the last positions: [rows, places - first -
            max(0, j - 2), hidden].
        """
        places = torch.arange(features.shape[1], device=features.device)
        rotary = rotary_of(places, self.config)
        layer, attn, inputs = self.midlayer, self.midlayer.self_attn, self.midlayer.input_layernorm(embeds)
        hidden, drafted_keys, outputs, start = self.fc(features), [], [], 0
        true_keys = true_values = features.new_zeros(0)
        for step in range(STEPS):
            x = torch.cat((inputs[:, start:], layer.hidden_norm(hidden)), dim=-1)
            q, k, v = attn.project(x, (rotary[0][start:], rotary[1][start:]))
            if step == 0:
                true_keys, true_values = k, v
            else:  # earlier drafts' keys, one place back for each step
                drafted_keys = [(key[:, :, :-1], value[:, :, :-1]) for key, value in drafted_keys]
                drafted_keys.append((k, v))
            visible = places[start:, None] - step >= places[None, :]
            attended = attend(q, true_keys, true_values, visible, drafted_keys)
            residual = hidden + attn.o_proj(attended.transpose(1, 2).flatten(2))
            hidden = residual + layer.mlp(layer.post_attention_layernorm(residual))
            keep = max(first - start, 0)
            outputs.append(self.norm(hidden[:, keep:]))
            # The next step's place i has the hidden state that this one made of place i - 1.
            following = max(first, start + 1)
            hidden = hidden[:, following - start - 1 : -1]
            start = following
        return outputs


def attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attend over the `visible` [queries, keys] true keys and, for each query, over one key of each
    pair in `own`.
    """
    q = q * q.shape[-1] ** -0.5
    scores = (q @ keys.transpose(-1, -2)).float().masked_fill(~visible, float("-inf"))
    scores = torch.cat((scores, *((q * key).sum(-1, keepdim=True).float() for key, _ in own)), dim=-1)
    weights = scores.softmax(-1).to(values.dtype)
    out = weights[..., : keys.shape[2]] @ values
    for index, (_, value) in enumerate(own):
        out = out + weights[..., keys.shape[2] + index, None] * value
    return out


def rotary_of(places: Tensor, config: dict) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [places, head_dim / 2]."""
    dim, theta = config["head_dim"], config["rope_parameters"]["rope_theta"]
    angles = places[:, None] / theta ** (torch.arange(0, dim, 2, device=places.device) / dim)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions: element i is paired with element i + head_dim / 2."""
    (cos, sin), (low, high) = rotary, x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


@dataclass
class Target:
    """The frozen target: the states that the head reads from it, and its LM head."""

    model: Any  # LlamaForCausalLM

    @torch.no_grad()
    def read(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Read `ids` [rows, places + 1].

        Returns:
            Hidden states [rows, places, 3 × hidden]; embeddings and last hidden states of the
            tokens after them, [rows, places, hidden].
        """
        out = self.model.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        features = torch.cat([out.hidden_states[index] for index in AUX_LAYERS], dim=-1)
        return features[:, :-1], self.model.model.embed_tokens(ids[:, 1:]), out.last_hidden_state[:, 1:]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the vocabulary in float32."""
        return self.model.lm_head(hidden).float()


def losses_of(head: Head, target: Target, ids: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return the soft cross-entropy against the target for each step [steps], and how often the two
    choose the same token [steps].
    """
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        features, embeds, last = target.read(ids)
        with torch.no_grad():
            expected = target.logits(last[:, first:])
            probabilities, choices = expected.softmax(-1), expected.argmax(-1)
        losses, same = [], []
        for hidden in head.unrolled(features, embeds, first):
            logits, places = target.logits(hidden), hidden.shape[1]
            # The gradient of this form needs no second pass over log-softmax.
            losses.append((logits.logsumexp(-1) - (probabilities[:, -places:] * logits).sum(-1)).mean())
            same.append((logits.argmax(-1) == choices[:, -places:]).float().mean())
    return torch.stack(losses), torch.stack(same).detach()


# --- training
# -------------------------------------------------------------------------------------------------------


def batches_of(rows: list[list[int]], seed: int) -> Iterator[np.ndarray]:
    """Yield endless batches [`BATCH_ROWS`, prompt length + `NEW_TOKENS`] of rows of one length,
    reshuffled each epoch.
    """
    rng = np.random.default_rng(seed)
    by_length: dict[int, list[list[int]]] = {}
    for row in rows:
        by_length.setdefault(len(row), []).append(row)
    arrays = [np.array(those) for those in by_length.values()]
    while True:
        batches = []
        for array in arrays:
            order = rng.permutation(len(array))
            batches += [array[order[at : at + BATCH_ROWS]] for at in range(0, len(order) - BATCH_ROWS + 1, BATCH_ROWS)]
        for index in rng.permutation(len(batches)):
            yield batches[index]


def train(head: Head, target: Target, rows: list[list[int]], num_batches: int, rate: float, seed: int) -> None:
    """Take `num_batches` optimizer steps; the loss counts the positions after the prompt."""
    optimizers, weights = build_optimizers(head, rate), torch.tensor(STEP_WEIGHTS)
    stream, history, started = batches_of(rows, seed), [], time.perf_counter()
    with progress("head", num_batches) as advance:
        for step in range(num_batches):
            ids = torch.from_numpy(next(stream))
            losses, same = losses_of(head, target, ids, ids.shape[1] - NEW_TOKENS - 1)
            (losses * weights).sum().backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * max(0.0, learning_rate_factor(step / num_batches))
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            history.append(torch.stack((losses.detach(), same)))
            recent = torch.stack(history[-50:]).mean(0)
            shares = " ".join(f"{share:.3f}" for share in recent[1].tolist())
            advance(1, f"head loss {recent[0, 0]:.3f} same {shares}")
            if (step + 1) % 50 == 0 and not console.is_terminal:
                console.print(
                    f"step {step + 1} loss {recent[0, 0]:.3f} same {shares} {time.perf_counter() - started:.0f} s"
                )


@torch.no_grad()
def acceptance(head: Head, target: Target, rows: list[list[int]]) -> tuple[int, list[int]]:
    """Return the drafts made and the tokens accepted at each position, in greedy continuations with
    `STEPS` drafts at a time.

    A draft counts only if all drafts before it were right, and then it followed the target's own
    tokens. So the text determines what would be accepted at each position, and only the walk over
    it is left.
    """
    drafts, accepted = 0, [0] * STEPS
    for row in rows:
        ids = torch.tensor(row)[None]
        features, embeds, last = target.read(ids)
        first = len(row) - NEW_TOKENS - 1
        choices = target.logits(last)[0].argmax(-1)
        hits = []
        for hidden in head.unrolled(features, embeds, first):
            right = target.logits(hidden)[0].argmax(-1) == choices[-hidden.shape[1] :]
            hits.append(F.pad(right, (len(choices) - len(right), 0)).tolist())
        place = first
        while place + STEPS <= len(choices):
            drafts += 1
            run = 0
            while run < STEPS and hits[run][place + run]:
                accepted[run] += 1
                run += 1
            place += run + 1
    return drafts, accepted


def save(head: Head, directory: Path, facts: dict) -> None:
    """Write bf16 weights with the checkpoint's names, vLLM's config for them, and
    `training.json`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = head.config | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": head.config["vocab_size"],
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


def own_text(texts: list[str], count: int, sampled_one_in: int, seed: int) -> list[list[int]]:
    """Return `count` prompts from the texts, each continued by the target."""
    llm = LLM(EMBEDDED_MODEL, dtype="float32", max_model_len=256, max_num_seqs=256)
    rng, rows = random.Random(seed), []
    with progress("the target continues prompts", count) as advance:
        while len(rows) < count:
            prompts = prompts_of(texts, min(PROMPTS_AT_ONCE, count - len(rows)), rng)
            rows += continue_prompts(llm, prompts, sampled_one_in, seed + len(rows))
            advance(len(prompts))
    return rows


def kept_in(file: Path | None, rows: Callable[[], list[list[int]]]) -> list[list[int]]:
    """Return the rows saved in the file; if there is no file yet, make the rows and save them."""
    if file and file.exists():
        return json.loads(file.read_text())
    made = rows()
    if file:
        file.write_text(json.dumps(made))
    return made


def main(argv: list[str] | None = None) -> None:
    """Generate the training text, then train, measure and save the head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6144, help="prompts that the target continues")
    parser.add_argument("--batches", type=int, default=500, help=f"of {BATCH_ROWS} continued prompts")
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="the peak")
    parser.add_argument("--resume", action="store_true", help="continue from the saved head; pass another --seed")
    parser.add_argument("--rows", type=Path, help="a file that keeps the continued prompts: written once, then read")
    parser.add_argument("--quick", action="store_true", help="a few small steps, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "tiny-python-eagle3")
    arguments = parser.parse_args(argv)
    held_out_prompts = HELD_OUT_PROMPTS
    if arguments.quick:
        arguments.prompts, arguments.batches, held_out_prompts = 2 * BATCH_ROWS, 2, 4
    keep_freed_memory()
    torch.manual_seed(arguments.seed)
    started = time.perf_counter()
    texts = read_texts([path for path in corpus_files() if not is_held_out(path)])
    rows = kept_in(arguments.rows, lambda: own_text(texts, arguments.prompts, SAMPLED_ONE_IN, arguments.seed))

    before = {}
    head = Head(json.loads((EMBEDDED_MODEL / "config.json").read_text()))
    if arguments.resume:
        head.load_state_dict(load_file(arguments.out / "model.safetensors"))
        before = json.loads((arguments.out / "training.json").read_text())
    target = Target(load_model(EMBEDDED_MODEL).requires_grad_(False))
    console.print(f"head: {sum(p.numel() for p in head.parameters()) / 1e6:.2f} M parameters")
    train(head, target, rows, arguments.batches, arguments.learning_rate, arguments.seed)

    head.load_state_dict({name: tensor.bfloat16() for name, tensor in head.state_dict().items()})
    drafts, accepted = acceptance(head, target, own_text(held_out_texts(), held_out_prompts, 0, 0))
    facts = {
        "parameters": sum(p.numel() for p in head.parameters()),
        "prompts": len(rows) + before.get("prompts", 0),
        "tokens_generated": NEW_TOKENS * len(rows) + before.get("tokens_generated", 0),
        "batches": arguments.batches + before.get("batches", 0),
        "batch_rows": BATCH_ROWS,
        "minutes": (time.perf_counter() - started) / 60 + before.get("minutes", 0),
        "seeds": [*before.get("seeds", []), arguments.seed],
        "held_out_prompts": held_out_prompts,
        "num_speculative_tokens": STEPS,
        "num_drafts": drafts,
        "num_accepted_tokens_per_pos": accepted,
        "mean_acceptance_length": 1 + sum(accepted) / drafts,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": f"{torch.get_num_threads()} CPU threads",
    }
    save(head, arguments.out, facts)
    rates = ", ".join(f"{count / drafts:.3f}" for count in accepted)
    console.print(
        f"held out, greedy, {STEPS} drafts at a time: acceptance by position {rates}, "
        f"mean acceptance length {facts['mean_acceptance_length']:.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
