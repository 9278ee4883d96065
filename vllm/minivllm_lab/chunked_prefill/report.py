"""Lesson 10's measurements, tables, figure and command line.

A function `measure_*`, `compare_*` or `show_*` prints its table and returns its figures; the
callables that it takes are the lesson's own code.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.config import EMBEDDED_MODEL, CacheConfig, ModelConfig, Parts
from minivllm.kernels.unified_attention import unified_attention
from minivllm_lab import palette
from minivllm_lab.chunked_prefill.prefill_first import PREFILL_FIRST
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.disturbed_chats import LONG, disturb
from minivllm_lab.figures import SMALL_TEXT, panels
from minivllm_lab.inside import runner_of
from minivllm_lab.progress import track
from minivllm_lab.proof import furthest, refusal, show_errors
from minivllm_lab.recording import bare_engine, own_clock, record_run
from minivllm_lab.tables import Timed, closing, console, ms, record_table, table
from minivllm_lab.timing import in_turns
from minivllm_simulate.cost_model import RooflineCost, StepShape
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.lever_checks import SARATHI, SARATHI_DECODES, SARATHI_STEP, sarathi_step
from minivllm_simulate.memory import num_parameters
from minivllm_simulate.virtual_clock import percentile

BLOCK_SIZE, MAX_MODEL_LEN = 16, 2048
Steps = Sequence[Mapping[str, int]]
LessonCode = Callable[..., Any]
"""A function or class of the lesson's script."""


def load(arguments: argparse.Namespace, device: torch.device) -> None:
    """Read the model's config, so that a missing model is reported early, and store the device in
    `arguments`.

    Raises:
        MinivllmError: there is no such model.
    """
    arguments.device = device
    ModelConfig.from_pretrained(arguments.model)


# ---- 1 and 2. what a step is made of -------------------------------------------------------------


def show_steps(policies: Mapping[str, Steps]) -> dict[str, list[dict[str, int]]]:
    """Print each policy's steps as strips, with the request's letter for each token."""
    for name, steps in policies.items():
        sizes = [sum(step.values()) for step in steps]
        console.print(f"{name}: {len(steps)} steps, of {min(sizes)} to {max(sizes)} tokens")
        for number, step in enumerate(steps, start=1):
            console.print(f"  {number:2}  {''.join(name * tokens for name, tokens in step.items())}", markup=False)
    return {name: [dict(step) for step in steps] for name, steps in policies.items()}


# ---- 3. chats and long prompts in the engine -----------------------------------------------------

CHATS = 4
WAYS: dict[str, dict[str, Any]] = {
    "prefill first (V0)": {
        "parts": Parts(policy=PREFILL_FIRST),
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": MAX_MODEL_LEN,
    },
    **{f"mixed, {budget} a step": {"max_num_batched_tokens": budget} for budget in (2048, 512, 128, 32)},
}
QUICK_WAYS = "prefill first (V0)", "mixed, 512 a step", "mixed, 32 a step"


def measure_chats(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure, for each policy, the chats' token gaps while long prompts arrive, and the prompts'
    time to first token.
    """
    records, prompts = {}, 1 if arguments.quick else 4
    blocks = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=600, enable_prefix_caching=False)
    for name in track(QUICK_WAYS if arguments.quick else tuple(WAYS), "disturbing"):
        sizes = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, **WAYS[name]}
        core = bare_engine(arguments.model, arguments.device, blocks, dtype="float32", **sizes)
        run = disturb(core, arguments.prompt, prompts, CHATS)
        with_prompt = [step for step in run.scheduled if LONG in step]
        records[name] = {
            "itl_p50_ms": 1e3 * statistics.median(run.gaps),
            "itl_p99_ms": 1e3 * percentile(run.gaps, 0.99),
            "itl_max_ms": 1e3 * max(run.gaps),
            "ttft_ms": 1e3 * statistics.median(run.firsts),
            "steps": len(with_prompt) / prompts,
            "chat_tokens": sum(sum(step.values()) - step[LONG] for step in with_prompt) / len(with_prompt),
        }
    record_table(
        f"{CHATS} chats, and {prompts} prompt{'s' * (prompts > 1)} of {arguments.prompt:,} tokens, one after another; "
        "ms",
        records,
        "{name} | ITL p50 {itl_p50_ms:,.1f} | p99 {itl_p99_ms:,.1f} | longest {itl_max_ms:,.1f} | "
        "TTFT {ttft_ms:,.1f} | steps {steps:.0f} | decodes {chat_tokens:.0f}",
        "ITL is the chats', TTFT and steps a long prompt's; decodes: the chats' tokens in each of its steps.",
    )
    return records


# ---- 4. the kernel -------------------------------------------------------------------------------

AWKWARD = {
    "decodes and chunks": ([1, 1, 1, 17, 40, 5], [33, 1, 70, 17, 90, 37]),
    "decodes only": ([1, 1, 1], [5, 64, 31]),
    "chunks only": ([2, 33], [2, 34]),
    "one token in a chunk's place": ([1, 1, 9], [8, 40, 9]),
}


def mixed_case(
    queries: Sequence[int], seq_lens: Sequence[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return a step's tensors, keyed by the lesson's argument names, with scattered blocks."""
    tables = [-(-length // BLOCK_SIZE) for length in seq_lens]
    ids = iter((torch.randperm(sum(tables)) + 1).tolist())
    block_table = torch.zeros(len(tables), max(tables), dtype=torch.int32)
    for row, count in enumerate(tables):
        block_table[row, :count] = torch.tensor([next(ids) for _ in range(count)], dtype=torch.int32)
    q = torch.randn(sum(queries), heads, head_dim).to(dtype)
    return {
        "out": torch.full_like(q, math.nan),
        "q": q,
        "caches": torch.randn(2, sum(tables) + 1, BLOCK_SIZE, kv_heads, head_dim).to(dtype),
        "starts": torch.tensor([0, *accumulate(queries)], dtype=torch.int32),
        "seq_lens": torch.tensor(list(seq_lens), dtype=torch.int32),
        "block_table": block_table,
    }


def exact(case: Mapping[str, Tensor]) -> Tensor:
    """Compute a case's attention in float64, request by request."""
    q, caches = case["q"].cpu().double(), case["caches"].cpu().double()
    starts, out = case["starts"].tolist(), torch.empty_like(q)
    for index, length in enumerate(case["seq_lens"].tolist()):
        rows, blocks = slice(starts[index], starts[index + 1]), case["block_table"][index].cpu().long()
        keys, values = caches[:, blocks].flatten(1, 2)[:, :length].repeat_interleave(q.shape[1] // caches.shape[3], 2)
        new = rows.stop - rows.start
        visible = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) / math.sqrt(q.shape[2])
        out[rows] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -math.inf).softmax(2), values)
    return out


def num_decodes_of(queries: Sequence[int], name: str) -> int:
    """Count the leading requests with one token; in the case "one token in a chunk's place", one of
    them counts as a chunk.
    """
    return sum(count == 1 for count in queries) - (name == "one token in a chunk's place")


def verify_kernel(
    mixed_launch: LessonCode, in_two_launches: LessonCode, device: torch.device, quick: bool
) -> dict[str, float]:
    """Compare one launch and two with float64 on awkward steps; `quick` tests only one shape of
    heads.

    Raises:
        AssertionError: a row is wrong, or was not written.
    """
    errors: dict[str, float] = {}
    for heads, kv_heads, head_dim in track([(4, 2, 32), (6, 2, 80)][quick:], "verifying the kernel"):
        for name, lengths in AWKWARD.items():
            case = mixed_case(*lengths, heads, kv_heads, head_dim, torch.float16)
            expected = exact(case)
            for launch in (mixed_launch, in_two_launches):
                fresh = {key: tensor.clone().to(device) for key, tensor in case.items()}
                error = furthest(launch(**fresh, num_decodes=num_decodes_of(lengths[0], name)).double(), expected)
                errors[name] = max(errors.get(name, 0.0), error)
    return {"largest_error": show_errors("One launch, and two", errors, 4e-3)}


STEP = ([1] * 32 + [480], [1024] * 32 + [1504])
"""New tokens and keys of each request: 32 decodes and a chunk of a prompt, 512 tokens in all."""
TILES = {"tiles of 16 rows": (16, 16), "tiles of 64": (64, 64), "16 for decodes, 64 else": (16, 64)}


def compare_launches(tile_work: LessonCode, device: torch.device) -> dict[str, Any]:
    """Count a step's rows, scores and keys for each choice of tiles, and time the engine's
    attention in one call and in two.
    """
    queries, lengths = STEP
    records = {}
    for name, (decode, chunk) in TILES.items():
        records[name] = tile_work(queries, lengths, tile_rows=[decode if new == 1 else chunk for new in queries])
    record_table(
        "32 decodes and a chunk of 480, each after 1,024 keys; 4 heads a group",
        {
            name: {
                **record,
                "share": record["real"] / record["rows"],
                "millions": record["scores"] / 1e6,
                "kept": record["keeps"] / record["scores"],
            }
            for name, record in records.items()
        },
        "for each KV head {name} | tiles {tiles} | rows {rows:,} | real {share:.0%} | M scores {millions:.2f} | "
        "kept {kept:.0%} | keys {keys:,}",
    )
    case = mixed_case(queries, lengths, 8, 2, 64, torch.float32)
    case = {name: tensor.to(device) for name, tensor in case.items()}
    calls = {"one call": lambda: _attend(case), "two calls": lambda: (_attend(case, 0, 32), _attend(case, 32, 33))}
    turns = in_turns(calls, 15, device)
    ratio = statistics.median(two / single for single, two in zip(*turns.values(), strict=True))
    seconds = {name: statistics.median(times) for name, times in turns.items()}
    console.print(
        f"The engine's attention on this step: {ms(seconds['one call'])} ms in one call, {ratio:.2f} × that in two."
    )
    return {"tiles": records, "seconds": seconds, "two_over_one": ratio}


def _attend(case: Mapping[str, Tensor], first: int = 0, last: int | None = None) -> Tensor:
    """Run the engine's attention on the requests from `first` up to, but not including, `last`."""
    starts = case["starts"][first : None if last is None else last + 1]
    rows = slice(int(starts[0]), int(starts[-1]))
    lens, tables = case["seq_lens"][first:last], case["block_table"][first:last]
    return unified_attention(
        case["q"][rows], *case["caches"], starts - starts[0], lens, tables, case["q"].shape[2] ** -0.5,
        out=case["out"][rows],
    )  # fmt: skip


# ---- 5. what the pieces cost ---------------------------------------------------------------------


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside the block, where other work on the machine disturbs timings
    less.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_keys_read_again(keys_read_again: LessonCode, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a prompt for several chunk sizes: the keys that are read again, the time of
    attention, and the time of all steps.

    Raises:
        AssertionError: the engine's steps read a different number of keys than the formula says.
    """
    prompt, rounds = (512, 1) if arguments.quick else (1920, 3)
    chunks = [chunk for chunk in (prompt, 512, 256, 128, 64, 32) if chunk <= prompt]
    blocks = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=200, enable_prefix_caching=False)
    engines = {
        chunk: bare_engine(
            arguments.model, arguments.device, blocks, dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=1,
            max_num_batched_tokens=chunk,
        )
        for chunk in chunks
    }  # fmt: skip
    cases = {chunk: _chunks(prompt, chunk, arguments.device) for chunk in chunks}
    calls = {str(chunk): lambda case=cases[chunk]: [_attend(each) for each in case] for chunk in chunks}
    steps: dict[int, list[float]] = {chunk: [] for chunk in chunks}
    with one_thread():
        attention = in_turns(calls, rounds, arguments.device, own_clock(engines[prompt]))
        for turn in range(rounds):
            for chunk, core in engines.items():
                run = record_run(core, [(prompt, 1)], warm_up=turn == 0)
                counted = sum(step.shape.num_keys - step.shape.num_tokens for step in run.steps)
                assert counted == keys_read_again(prompt, chunk), f"chunks of {chunk}: {counted:,} keys are re-read"
                steps[chunk].append(run.seconds)
    seconds = {chunk: (statistics.median(attention[str(chunk)]), statistics.median(steps[chunk])) for chunk in chunks}
    records = {}
    for chunk, (attending, whole) in seconds.items():
        records[str(chunk)] = {
            "chunks": -(-prompt // chunk),
            "again": keys_read_again(prompt, chunk),
            "attention_ms": 1e3 * attending,
            "steps_ms": 1e3 * whole,
            "attention": attending / seconds[prompt][0],
            "steps": whole / seconds[prompt][1],
        }
    shown = {
        name: {**each, "share": each["again"] / prompt, "seconds": seconds[int(name)]} for name, each in records.items()
    }
    record_table(
        f"A prompt of {prompt:,} tokens in pieces",
        shown,
        "chunk {name} | chunks {chunks} | again {again:,} | / prompt {share:.1f} | attention {seconds[0]:ms} | "
        "{attention:.2f} × | steps {seconds[1]:ms} | {steps:.2f} ×",
        "Again: keys that a layer re-reads. ms of one layer's attention alone, and of all steps; one thread.",
    )
    return {"prompt": prompt, "chunks": records}


def _chunks(prompt: int, chunk: int, device: torch.device) -> list[dict[str, Tensor]]:
    """Return the attention arguments for each chunk of a prompt, all on one cache."""
    whole = mixed_case([prompt], [prompt], 8, 2, 32, torch.float32)
    cases = []
    for start in range(0, prompt, chunk):
        end = min(start + chunk, prompt)
        case = whole | {
            "q": whole["q"][start:end],
            "out": whole["out"][start:end],
            "starts": torch.tensor([0, end - start], dtype=torch.int32),
            "seq_lens": torch.tensor([end], dtype=torch.int32),
        }
        cases.append({name: tensor.to(device) for name, tensor in case.items()})
    return cases


# ---- 6. how many tokens are free -----------------------------------------------------------------

LARGE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "dtype": "float32",
}  # fmt: skip
"""A model whose weights, 487 MB, fit into no cache, so that each step reads them from memory."""
QUICK = {"hidden_size": 512, "intermediate_size": 2048}
"""A smaller model for `--quick`: the steps are the same, but its knee is another."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
FEW, MANY, ROWS = 4, 32, 256


def measure_knee(knee: LessonCode, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time steps of several sizes on a model larger than any cache, and compare the measured knee
    with the predicted one.

    The prediction uses two matmul rates only: operations per second with many rows, and bytes per
    second with one row. The medians over all rounds count; the spread comes from repeating the
    calculation for each round.
    """
    settings = LARGE | QUICK if arguments.quick else LARGE
    config, turns = ModelConfig.from_dict(settings), _turns_of_steps(settings, arguments)
    numbers = config.intermediate_size * config.hidden_size
    parameters = num_parameters(config) - config.vocab_size * config.hidden_size

    def knees(seconds: Mapping[str, float]) -> dict[str, float]:
        flops, bandwidth = 2 * ROWS * numbers / seconds["rows"], 4 * parameters / seconds["row"]
        foretold, measured = knee(flops, bandwidth, 4), sweep_knee({size: seconds[str(size)] for size in SIZES})
        off = foretold / measured - 1
        return {"flops": flops, "bandwidth": bandwidth, "foretold": foretold, "found": measured, "off": off}

    seconds = {name: statistics.median(times) for name, times in turns.items()}
    result = knees(seconds)
    offs = [knees(dict(zip(turns, times, strict=True)))["off"] for times in zip(*turns.values(), strict=True)]
    times = {size: seconds[str(size)] for size in SIZES}
    record_table(
        "A step by its tokens",
        {size: {"step": time, "token": time / size, "of": time / times[1]} for size, time in times.items()},
        "tokens {name} | ms {step:ms} | ms a token {token:ms} | of one token {of:.2f} ×",
        f"{parameters / 1e6:.0f} million parameters, {4 * parameters / 1e6:.0f} MB, one thread. Matmuls alone: "
        f"{result['flops'] / 1e9:.0f} billion operations a second with {ROWS} rows, "
        f"{result['bandwidth'] / 1e9:.1f} GB/s with one.",
    )
    console.print(
        f"The knee: {result['foretold']:.1f} tokens predicted, {result['found']:.1f} measured ({result['off']:+.0%}; "
        f"from turn to turn {min(offs):+.0%} to {max(offs):+.0%})."
    )
    steps = {str(size): 1e3 * time for size, time in times.items()}
    return {"steps_ms": steps, "megabytes": 4 * parameters / 1e6, **result, "least": min(offs), "most": max(offs)}


def _turns_of_steps(settings: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Time steps of several sizes, all layers' matmuls with one row, and one matmul with many rows,
    in alternating rounds.

    Because they alternate, a shared machine's changing memory speed affects all of them equally.
    Each token is a request of its own, because only a prompt's last token goes through all of the
    last layer.
    """
    device = arguments.device
    with tempfile.TemporaryDirectory() as folder, one_thread():
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        blocks = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=2 * SIZES[-1], enable_prefix_caching=False)
        sizes = {"max_model_len": 256, "max_num_seqs": SIZES[-1], "max_num_batched_tokens": SIZES[-1]}
        core = bare_engine(folder, device, blocks, load_format="dummy", dtype="float32", **sizes)
        model: Any = runner_of(core).model
        x = torch.randn(ROWS, settings["intermediate_size"], device=device)

        def one_row() -> None:
            for layer in model.layers:
                for matmul in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj):
                    matmul(x[:1, : settings["hidden_size"]].contiguous())
                layer.mlp.down_proj(x[:1])

        calls: dict[str, Callable[[], object]] = {"row": one_row, "rows": lambda: model.layers[0].mlp.down_proj(x)}
        calls |= {str(size): partial(record_run, core, [(1, 1)] * size, warm_up=False) for size in SIZES}
        return in_turns(calls, 1 if arguments.quick else 7, device, own_clock(core))


def sweep_knee(seconds: Mapping[int, float]) -> float:
    """Return the knee of a sweep over step sizes: the time of a small step divided by the time that
    each token adds to a large one.

    The former is the median over the steps of up to `FEW` tokens. The latter is the slope of a line
    through the steps of at least `MANY` tokens, fitted by least squares on relative errors; its
    intercept does not matter.
    """
    few = statistics.median(time for size, time in seconds.items() if size <= FEW)
    large = [size for size in seconds if size >= MANY]
    relative = torch.tensor([[1 / seconds[size], size / seconds[size]] for size in large], dtype=torch.float64)
    _, slope = torch.linalg.lstsq(relative, torch.ones(len(large), 1, dtype=torch.float64)).solution.flatten().tolist()
    return few / slope


GPUS = ("L4", "A100-80", "H100", "H200", "B200")
GPU_MODEL, GAP = "Llama-3.1-8B", 0.05


def show_gpus(knee: LessonCode, budget_for: LessonCode) -> dict[str, Any]:
    """Show each GPU's knee from its data sheet, the modelled budget for a gap of 50 ms, and the
    model's error.
    """
    model, records = known_model(GPU_MODEL), {}
    parameters = num_parameters(model) - model.vocab_size * model.hidden_size
    for name in GPUS:
        gpu, cost = get_hardware(name), RooflineCost.of(model, get_hardware(name))
        flops, bandwidth = gpu.flops_of("bfloat16"), gpu.bandwidth
        rates = cost.arithmetic_efficiency * flops, cost.memory_efficiency * bandwidth
        records[name] = {
            "knee": knee(flops, bandwidth, 2),
            "int4": knee(flops, bandwidth, 0.5),
            "least_ms": 1e3 * cost.seconds(StepShape.of([(1, 0)])),
            "budget": budget_for(GAP - cost.step_overhead, parameters, 2, *rates),
        }
    console.print()
    record_table(
        f"Free tokens, by data sheets; {GPU_MODEL} in bfloat16, modelled",
        records,
        "GPU {name} | knee {knee:.0f} | knee, 4 bits {int4:.0f} | ms of a decode {least_ms:.1f} | "
        f"budget for {1e3 * GAP:.0f} ms {{budget:,}}",
    )
    return {"gpus": records, "sarathi": _sarathi()}


def _sarathi() -> dict[str, float]:
    """Compare the model with the longest gaps that Sarathi-Serve's authors published for their
    budget.
    """
    errors = {name: sarathi_step(context) / published - 1 for name, (context, published) in SARATHI.items()}
    longer = " and ".join(f"{error:.0%}" for error in errors.values())
    console.print(
        f"How good is the model? Sarathi-Serve's authors ran Yi-34B on two A100, {SARATHI_STEP:,} tokens a step: "
        f"99% of the gaps are within 0.14 s (chats) and 0.17 s (long documents). For a step with {SARATHI_DECODES} "
        f"decodes of such lengths our model says {longer} more."
    )
    return errors


# ---- 7. break it ---------------------------------------------------------------------------------


def break_it(
    serve: LessonCode, mixed: LessonCode, steps_of_a_prompt: LessonCode, request: LessonCode
) -> dict[str, Any]:
    """Show a budget that decodes use up, a prompt that must not be cut, and a budget below the
    longest prompt.
    """

    def steps_to_first_token(**settings: Any) -> int:
        """Count the steps that a 24-token prompt takes to its first token if it arrives after four
        chats of 30 tokens have begun.
        """
        arrivals = {0: [request(name, 1, 30) for name in "abcd"], 1: [request("L", 24, 1)]}
        steps = list(serve(partial(mixed, **settings), arrivals))
        return max(number for number, step in enumerate(steps) if "L" in step)

    budgets = {}
    for budget in (4, 5, 8, 16, 24, 28):
        foretold = steps_of_a_prompt(24, budget, 4)
        budgets[str(budget)] = {
            "cut": steps_to_first_token(token_budget=budget),
            "whole": steps_to_first_token(token_budget=budget, may_be_cut=False) if budget >= 24 else None,
            "foretold": None if foretold == math.inf else round(foretold),
        }
    rows = [
        (name, record["foretold"] or "never", record["cut"], record["whole"] or "refused")
        for name, record in budgets.items()
    ]
    columns = ("budget", "by the formula", "cut", "not cut")
    table("Steps until a prompt of 24 tokens is computed, beside four chats of 30", columns, rows)
    small = CacheConfig(num_gpu_blocks=200)
    sizes = {"max_model_len": 512, "max_num_batched_tokens": 256, "enable_chunked_prefill": False}
    refused = refusal(lambda: bare_engine(EMBEDDED_MODEL, torch.device("cpu"), small, **sizes))
    console.print(f"not cut, and a budget below the longest prompt: {refused}")
    return {"budgets": budgets, "refused": refused}


# ---- the whole lesson ----------------------------------------------------------------------------


def close(figures: dict, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    first, *_, small = figures["chats"].values()
    knee = figures["knee"]
    closing(
        Timed(
            f"A long prompt stalled the chats for {first['itl_max_ms']:,.0f} ms in a step of its own, and for at most "
            f"{small['itl_max_ms']:,.0f} ms in pieces of 32 tokens."
        ),
        f"In pieces of 32 tokens it took {small['steps']:.0f} steps, with {small['chat_tokens']:.0f} tokens of the "
        "chats in each; in one piece none.",
        Timed(
            f"On this machine about {knee['found']:.0f} tokens of a step are free; two rates predict "
            f"{knee['foretold']:.0f}."
        ),
        disturbance=disturbance,
    )


def draw(figures: dict, path: str) -> None:
    """Draw the time of a step by its tokens, and the knee that two rates predict."""
    knee = figures["knee"]
    steps = {int(tokens): ms for tokens, ms in knee["steps_ms"].items()}
    with panels(path, 1, width=6.4) as (axes,):
        axes.plot(list(steps), list(steps.values()), "o-", color=palette.BLUE, label="measured")
        flat, rate = knee["megabytes"] * 1e9 / knee["bandwidth"], 1e3 * 2 * knee["megabytes"] * 1e6 / 4 / knee["flops"]
        predicted = [max(flat, rate * tokens) for tokens in steps]
        axes.plot(list(steps), predicted, "--", color=palette.ORANGE, label="predicted from two rates of the matmuls")
        axes.axvline(knee["foretold"], color=palette.GREY, linestyle=":")
        words = f" the knee: {knee['foretold']:.1f} tokens"
        axes.annotate(words, (knee["foretold"], max(steps.values())), va="top", fontsize=SMALL_TEXT)
        axes.set(title="A step by its tokens, on this processor", xlabel="tokens in the step", ylabel="ms")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.legend(loc="upper left")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Add the lesson's own flags to the common ones; `--help` shows `doc`."""
    flags = lesson_parser(doc or "", EMBEDDED_MODEL)
    length = whole_number(64, 1900)
    flags.add_argument("--prompt", type=length, default=1800, help="tokens of the long prompts (64 to 1900)")
    return flags
