"""Lesson 08's measurements, its tables, its figure and its command line.

A function `measure_*` or `compare_*` measures, prints its table and returns its figures; the
callables that it takes are the lesson's own code. A `Make` callable makes the lesson's two engines.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count, product
from typing import Any

import torch
from torch import Tensor

from minivllm.config import EMBEDDED_MODEL, CacheConfig
from minivllm_lab import palette
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.disaggregation.goodput import Colocated, Disaggregated, Goodput, Objective, System, Work, goodput
from minivllm_lab.disaggregation.model_checks import (
    ARITHMETIC_SLOWER,
    MEMORY_SLOWER,
    link_checks,
    slower,
    two_to_one,
)
from minivllm_lab.disaggregation.server_pair import NAME as SERVED_NAME
from minivllm_lab.disaggregation.server_pair import missing_package, server_pair
from minivllm_lab.disaggregation.transfer_worker import until_finished
from minivllm_lab.disaggregation.tuning import BUDGETS as LADDER
from minivllm_lab.disaggregation.tuning import ROUNDS, best_budget, winning_budgets
from minivllm_lab.disturbed_chats import disturb, random_prompt
from minivllm_lab.figures import SMALL_TEXT, panels
from minivllm_lab.http_load import Answer, Ask, load_beside
from minivllm_lab.paged_model import PagedModel, decoder_of
from minivllm_lab.paged_model import load as load
from minivllm_lab.progress import track
from minivllm_lab.recording import bare_engine
from minivllm_lab.tables import Timed, closing, console, heading, ms, record_table
from minivllm_lab.timing import wall_seconds
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.kv_links import Transfer, get_link, layer_wise_end
from minivllm_simulate.virtual_clock import percentile

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 200, 2048
BUDGETS = (2048, 512, 128)
"""Tokens of a step, of the engine whose chats are disturbed; of the servers, the first."""
CHATS, CHAT_PROMPT = 4, 32
LINKS = ("10 Gb/s", "100 Gb/s", "400 Gb/s", "NVLink 4")
PLACES = {
    "8B, 1 H100": ("Llama-3.1-8B", "H100", 1),
    "70B, 8 H100": ("Meta-Llama-3-70B", "H100", 8),
    "70B, 8 A100": ("Meta-Llama-3-70B", "A100-80", 8),
}
PROMPTS = (512, 8192)
MODEL, GPU, GPUS, LINK = "Llama-3.1-8B", "H100", 4, "400 Gb/s"
WORKS = {"long prompts": (4096, 32), "longer answers": (2048, 128)}
TTFT_SLO, TPOT_SLO = 0.5, 0.010
"""Tokens in and out, and seconds, of the modelled pools."""
POOL_BUDGETS = (512, 8192)
"""Beside the best one. The last is the default of `vllm serve` on an H100."""
Make = Callable[..., tuple[Any, Any]]


INTERFERENCE = (
    "{name} | chats' ITL p50, ms {itl_p50_ms:.1f} | p99 {itl_p99_ms:.1f} | longest gap {itl_max_ms:.1f} | "
    "the prompts' TTFT, ms {ttft_ms:.1f}"
)
SERVERS = {"one": "one server", "two": "two and a proxy"}
SERVED_PROMPTS, ANSWER = 4, 8
"""Long prompts that are served, and tokens of the answer of each."""


def paged_model(arguments: argparse.Namespace) -> PagedModel:
    """Make the lesson's model in float32 with an empty cache of its own."""
    return PagedModel(decoder_of(arguments), NUM_BLOCKS, BLOCK_SIZE)


# ---- 1. interference -----------------------------------------------------------------------------


def measure_interference(arguments: argparse.Namespace) -> dict:
    """Measure the token gaps of a few chats while long prompts arrive, for each token budget."""
    heading("1. A long prompt among running chats")
    results, prompts = {}, 1 if arguments.quick else 4
    for budget in track((None, *BUDGETS), "disturbing"):
        sizes = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": budget or BUDGETS[0]}
        blocks = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=600, enable_prefix_caching=False)
        core = bare_engine(arguments.model, arguments.device, blocks, dtype="float32", **sizes)
        run = disturb(core, arguments.prompt, prompts if budget else 0, CHATS, CHAT_PROMPT)
        results[str(budget or "alone")] = latencies(run.gaps, run.firsts)
    record_table(
        f"{CHATS} running chats, and {prompts} prompts of {arguments.prompt:,} tokens, one after another",
        {"nobody else" if key == "alone" else f"{key} tokens a step": each for key, each in results.items()},
        f"one engine {INTERFERENCE}",
    )
    return results


def latencies(gaps: Sequence[float], firsts: Sequence[float]) -> dict[str, float]:
    """Summarize, in milliseconds, the chats' gaps and, if there were any, the long prompts' times
    to first token.
    """
    figures = {"itl_p50_ms": statistics.median(gaps), "itl_p99_ms": percentile(gaps, 0.99), "itl_max_ms": max(gaps)}
    if firsts:
        figures["ttft_ms"] = statistics.median(firsts)
    return {name: 1e3 * seconds for name, seconds in figures.items()}


def measure_two_servers(arguments: argparse.Namespace) -> dict:
    """Send the same chats and prompts over HTTP, to one server and through a proxy to two; or print
    why not.

    Each server gets a core of its own where possible.
    """
    lacking = missing_package()
    if arguments.quick or lacking:
        why = f"they need {lacking}" if lacking else "--quick does not start them"
        console.print(f"Two servers and a proxy: left out, {why}.")
        return {}
    with server_pair(arguments.model, BUDGETS[0], MAX_MODEL_LEN) as pair:
        ports, loads = {"one": pair.prefill, "two": pair.proxy}, {}
        for port in ports.values():
            _served(port, arguments.prompt, 1, 200)  # to warm up
        before = pair.received_tokens()
        for name, port in track(ports.items(), "serving"):
            loads[name] = _served(port, arguments.prompt, SERVED_PROMPTS, 100)
        figures: dict[str, Any] = {"pinned": pair.pinned, "tokens_received": pair.received_tokens() - before}
    for name, (chats, longs) in loads.items():
        # As in the engine, a chat's first eight gaps do not count.
        figures[name] = latencies([gap for chat in chats for gap in chat.itls[8:]], [long.ttft for long in longs])
    figures |= _same_answers(*([*chats, *longs] for chats, longs in loads.values()))
    cores = (
        "Each server has one core; proxy and client run on both."
        if figures["pinned"]
        else "The servers share all cores, so the decoder also waits while the prefiller computes."
    )
    console.print()
    record_table(
        f"The same over HTTP, {SERVED_PROMPTS} prompts of {arguments.prompt:,} tokens",
        {name: figures[key] for key, name in SERVERS.items()},
        f"over HTTP {INTERFERENCE}",
        f"{BUDGETS[0]} tokens a step. {cores} {figures['same_answers']} of {figures['answers']} answers are the same, "
        f"{figures['compared_tokens']:,} tokens; the keys and values of {figures['tokens_received']:,} tokens moved.",
    )
    return figures


def _served(port: int, prompt: int, prompts: int, seed: int) -> tuple[list[Answer], list[Answer]]:
    """Return the answers to the chats and to the long prompts."""
    greedy = {"model": SERVED_NAME, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}

    def ask(length: int, seed: int, max_tokens: int) -> Ask:
        return Ask({**greedy, "prompt": random_prompt(length, seed), "max_tokens": max_tokens})

    chats = [ask(CHAT_PROMPT, seed + 50 + index, MAX_MODEL_LEN - CHAT_PROMPT) for index in range(CHATS)]
    longs = [ask(prompt, seed + index, ANSWER) for index in range(prompts)]
    return load_beside(port, chats, longs, "/v1/completions")


def _same_answers(left: Sequence[Answer], right: Sequence[Answer]) -> dict[str, int]:
    """Count the answers that agree over their common length, and the tokens compared."""
    pairs = [
        (answer.token_ids[: len(other.token_ids)], other.token_ids[: len(answer.token_ids)])
        for answer, other in zip(left, right, strict=True)
    ]
    same = sum(answer == other for answer, other in pairs)
    return {"answers": len(pairs), "same_answers": same, "compared_tokens": sum(len(answer) for answer, _ in pairs)}


# ---- 2. the same tokens --------------------------------------------------------------------------


def compare_tokens(make: Make, through_both: Callable, arguments: argparse.Namespace) -> dict:
    """Send requests through both engines and through one; compare the tokens, the bytes moved, and
    the blocks held afterwards.

    Raises:
        AssertionError: a token differs, or a block is still held.
    """
    heading("2. The prompt here, the answer there")
    (prefiller, decoder), (plain, _) = make(), make()
    tokens, results, shared = 8 if arguments.quick else 24, {}, random_prompt(96, 1)
    block_bytes = BLOCK_SIZE * decoder.model.bytes_per_token
    cases = {
        "100 tokens": random_prompt(100, 2),
        "64, four full blocks": random_prompt(64, 3),
        "one token": random_prompt(1, 4),
        "96, then 40 of its own": shared + random_prompt(40, 5),
        "the same 96, then 20": shared + random_prompt(20, 6),
        "the first one again": random_prompt(100, 2),
    }
    for name, prompt in cases.items():
        before = decoder.worker.num_bytes
        request = through_both(prefiller, decoder, name, list(prompt), tokens)
        expected = until_finished(plain, plain.add(name, list(prompt), tokens))
        assert request.output_token_ids == expected.output_token_ids, f"{name}: the tokens differ from one engine's"
        _until_released(prefiller)
        moved = decoder.worker.num_bytes - before
        results[name] = {"prompt": len(prompt), "here": request.num_cached_tokens, "bytes": moved}
    pair = _two_at_once(prefiller, decoder, random_prompt(200, 9))
    record_table(
        f"{tokens} tokens of each, greedy, against one engine",
        {name: {**each, "blocks": each["bytes"] // block_bytes, "same": "yes"} for name, each in results.items()},
        "prompt {name} | tokens {prompt} | found here {here} | blocks moved {blocks} | bytes {bytes:,} | "
        "same tokens {same}",
        f"{decoder.model.bytes_per_token:,} bytes a token. Two requests at once with one prompt of 200 tokens: "
        f"{pair['first']} and {pair['second']} blocks moved. No blocks are held at the end.",
    )
    assert prefiller.blocks.num_held == decoder.blocks.num_held == 0, "blocks are still held"
    return {"requests": results, "bytes_per_token": decoder.model.bytes_per_token, "pair": pair}


def _two_at_once(prefiller: Any, decoder: Any, prompt: list[int]) -> dict[str, int]:
    """Let two requests with the same prompt reach the decoder together; count the blocks that move
    for each.
    """
    for name in ("left", "right"):
        until_finished(prefiller, prefiller.add(name, list(prompt), 1, {"do_remote_decode": True}))
    requests = [decoder.add(name, list(prompt), 2, prefiller.params[name]) for name in ("left", "right")]
    until_finished(decoder, *requests)
    _until_released(prefiller)
    assert requests[0].output_token_ids == requests[1].output_token_ids, "one prompt, two answers"
    blocks = [-(-(len(prompt) - request.num_cached_tokens) // BLOCK_SIZE) for request in requests]
    return dict(zip(("first", "second"), blocks, strict=True))


def _until_released(engine: Any, seconds: float = 30.0) -> None:
    """Step an idle engine until it holds no blocks, or until time is up."""
    until = time.monotonic() + seconds
    while engine.blocks.num_held and time.monotonic() < until:
        engine.step()
        time.sleep(1e-4)


# ---- 3. the kernel -------------------------------------------------------------------------------


def transfer_case(numbers: int, num_blocks: int, block_ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Make a random cache [6, num_blocks, numbers], an empty staging buffer for these blocks,
    and their ids.
    """
    data = torch.randn(6, num_blocks, numbers)
    return data, torch.zeros(len(block_ids), 6, numbers), torch.tensor(list(block_ids), dtype=torch.int32)


def verify_kernels(
    launch: Callable[..., Tensor], gather_kernel: Any, scatter_kernel: Any, device: torch.device
) -> dict:
    """Check gathering and scattering bit for bit, also for blocks of awkward sizes, and count
    bytes.

    Raises:
        AssertionError: a number is wrong, or one was written that should not be.
    """
    heading("3. The kernel")
    errors, block_ids = {}, [5, 2, 7, 1]
    for numbers in (16, 1000, 1024, 1040):
        cache_, staging, ids = (tensor.to(device) for tensor in transfer_case(numbers, 9, block_ids))
        gathered = launch(gather_kernel, cache_, staging, ids)
        assert torch.equal(gathered, cache_[:, block_ids].transpose(0, 1)), f"blocks of {numbers} are gathered wrongly"
        target = torch.zeros_like(cache_)
        ids[2] = -1
        launch(scatter_kernel, target, gathered, ids)
        expected = torch.zeros_like(cache_)
        expected[:, [5, 2, 1]] = cache_[:, [5, 2, 1]]
        assert torch.equal(target, expected), f"blocks of {numbers} are scattered wrongly"
        errors[str(numbers)] = {"bytes": 2 * gathered.nbytes, "launches": 1, "copies": len(block_ids) * len(cache_)}
    record_table(
        "Blocks into one piece and back: correct, bit for bit",
        {f"{int(numbers):,}": {**each, "blocks": len(block_ids), "tensors": 6} for numbers, each in errors.items()},
        "numbers in a block {name} | blocks {blocks} | tensors {tensors} | bytes read and written {bytes:,} | "
        "launches {launches} | copies without it {copies}",
    )
    return {"sizes": errors}


# ---- 4. links ------------------------------------------------------------------------------------


def show_links(added_seconds: Callable[[float, float, int], float]) -> dict:
    """Show a prompt's prefill time, its bytes, and how much each link delays its first token.
    *Modelled*.
    """
    heading("4. Which links hide the transfer")
    results, shown = {}, {}
    for (place, (name, gpu, tp)), prompt in product(PLACES.items(), PROMPTS):
        model = known_model(name), get_hardware(gpu), prompt
        transfers = {link: Transfer.of(*model, get_link(link), tp) for link in LINKS}
        transfer = transfers[LINKS[0]]
        after = {link: each.seconds for link, each in transfers.items()}
        layered = {link: added_seconds(each.prefill, each.seconds, each.layers) for link, each in transfers.items()}
        results[f"{place}, {prompt}"] = {
            "prefill_ms": 1e3 * transfer.prefill,
            "megabytes": transfer.num_bytes / 1e6,
            "least_gb_per_second": transfer.num_bytes / transfer.prefill / 1e9,
            "after_ms": {link: 1e3 * seconds for link, seconds in after.items()},
            "layer_wise_ms": {link: 1e3 * seconds for link, seconds in layered.items()},
        }
        shown[f"{place}, {prompt}"] = {
            **results[f"{place}, {prompt}"],
            "place": place,
            "prompt": prompt,
            "prefill": transfer.prefill,
            **{link: f"{ms(after[link])} | {ms(layered[link])}" for link in LINKS},
        }
    off = {check.what: check.error for check in link_checks() if "loading pays" in check.what}
    columns = {"Llama-3": "{place}", "tokens": "{prompt:,}", "prefill": "{prefill:ms}"}
    record_table(
        "ms that a link adds to a first token, modelled",
        shown,
        {**columns, "GB/s": "{least_gb_per_second:.1f}", **{link: f"{{{link}}}" for link in LINKS}},
        "Sent after the prefill | layer by layer. GB/s: at this rate it takes as long as the prefill. Mooncake's "
        "paper says 6 and 19 GB/s for 8,192 tokens of 70B on 8 A800 and 8 H800 at data-sheet rates, where the "
        f"model is off by {' and '.join(f'{error:+.0%}' for error in off.values())}. The table's GPUs are slower.",
    )
    return {"places": results, "off_mooncake": off}


# ---- 5. how many of each -------------------------------------------------------------------------

DISTSERVE = {"together": 1.6, "prefill": 5.6, "decode": 10.0}
"""Requests a second of one A100 with a model of 13 billion parameters, in the example of
DistServe's authors.
"""


def show_ratios(goodput_per_gpu: Callable[[float, float, int, int], float], arguments: argparse.Namespace) -> dict:
    """Show DistServe's example for each ratio by arithmetic, and four GPUs simulated with the real
    schedulers.
    """
    heading("5. How many of each")
    results, shown = {}, {}
    for prefillers, decoders in ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3)):
        rate = goodput_per_gpu(DISTSERVE["prefill"], DISTSERVE["decode"], prefillers, decoders)
        busy, name = rate * (prefillers + decoders), f"{prefillers}:{decoders}"
        results[name] = {"per_gpu": rate, "times": rate / DISTSERVE["together"]}
        idle = [1 - busy / (many * DISTSERVE[kind]) for many, kind in ((prefillers, "prefill"), (decoders, "decode"))]
        shown[name.replace(":", " : ")] = {**results[name], "prefillers": idle[0], "decoders": idle[1]}
    record_table(
        "DistServe's example: 5.6 requests a second to prefill, 10 to decode, 1.6 for both",
        shown,
        "prefillers : decoders {name} | requests/s a GPU {per_gpu:.2f} | of one pool {times:.2f} × | "
        "prefillers idle {prefillers:.0%} | decoders idle {decoders:.0%}",
    )
    console.print()
    return {"distserve": results, **_simulated_pools(arguments)}


def _simulated_pools(arguments: argparse.Namespace) -> dict:
    """Find the goodput per GPU of one pool, tuned and not, and of two pools in each split, for
    two kinds of work.
    """
    counted, rounds = (4, 2) if arguments.quick else (60, ROUNDS)
    objective = Objective(TTFT_SLO, TPOT_SLO)
    works = {kind: Work(*lengths, counted=counted) for kind, lengths in WORKS.items()}
    mixed = Colocated(known_model(MODEL), get_hardware(GPU), GPUS)
    systems: dict[str, System] = {
        f"one pool, {each} tokens a step": replace(mixed, budget=each) for each in POOL_BUDGETS
    }
    for decoders in range(GPUS - 1, 0, -1):
        pools = Disaggregated(mixed.model, mixed.gpu, GPUS - decoders, decoders, get_link(LINK), layer_wise=True)
        systems[f"two pools, {GPUS - decoders} : {decoders}"] = pools
    results: dict[str, dict[str, Any]] = {BEST_BUDGET: {}} | {name: {} for name in systems}
    for name, system in track(systems.items(), "bisecting"):
        for kind, work in works.items():
            results[name] |= _cells(kind, goodput(system, work, objective, rounds))
    best = {}
    for kind, work in track(works.items(), "tuning"):
        tuned = best_budget(mixed, work, objective, rounds)
        results[BEST_BUDGET] |= _cells(kind, tuned.goodput)
        two = max(each[kind] for name, each in results.items() if name.startswith("two"))
        best[kind] = {
            "one": tuned.goodput.per_gpu,
            "two": two,
            "times": two / tuned.goodput.per_gpu,
            "budget": int(tuned.name),
            "winning": winning_budgets(mixed, two * GPUS, work, objective),
            "default": results[f"one pool, {POOL_BUDGETS[-1]} tokens a step"][kind],
        }
    against_distserve = _against_distserve(counted)
    _show_pools(results, best, against_distserve)
    return {"pools": results, "best": best, "against_distserve": against_distserve}


BEST_BUDGET = "one pool, its best budget"
CAUSES = {"tpot": "tokens", "ttft": "first tokens", "queue": "first tokens", "link": "link", "": "nothing"}


def _cells(kind: str, sustained: Goodput) -> dict[str, Any]:
    return {kind: sustained.per_gpu, f"{kind}: cause": sustained.cause}


def _show_pools(results: Mapping[str, Mapping[str, Any]], best: Mapping[str, Any], ours: Sequence[float]) -> None:
    """Print a row for each way to use the GPUs, and the best budgets in words."""
    columns = {f"{GPUS} {GPU}, {MODEL}": "{name}"}
    columns |= {f"{prompt:,} tokens in, {output} out": f"{{{kind}}}" for kind, (prompt, output) in WORKS.items()}
    budgets = " and ".join(f"{best[kind]['budget']:,}" for kind in WORKS)
    wins = " and ".join(", ".join(map(str, best[kind]["winning"])) or "none" for kind in WORKS)
    record_table(
        "Goodput by bisection, modelled",
        {
            name: {kind: f"{each[kind]:.1f} ({CAUSES[each[f'{kind}: cause']]})" for kind in WORKS}
            for name, each in results.items()
        },
        columns,
        f"Requests a second and GPU; in brackets, what is late beyond that rate. In time: for 9 of 10 requests, a "
        f"first token within {TTFT_SLO:g} s and {1e3 * TPOT_SLO:g} ms a token. Link: {LINK}, layer by layer. The best "
        f"of {len(LADDER)} budgets: {budgets} tokens a step.",
    )
    console.print(f"\nBudgets with which one pool sustains what two do: {wins}.")
    console.print(
        f"DistServe's published gain is 2.1 ×. The model says {ours[0]:.2f} ×; with two factors fitted to that engine, "
        f"{ours[1]:.2f} ×."
    )


def _against_distserve(counted: int) -> list[float]:
    """Model DistServe's gain over prompts computed whole: with the cost as it is, and fitted to
    its engine.
    """
    costs = (slower(1.0, 1.0), slower(ARITHMETIC_SLOWER, MEMORY_SLOWER))
    rates = [two_to_one(cost, Work(512, 64, counted=counted)) for cost in costs]
    return [apart / together for apart, together in rates]


# ---- 6. break it ---------------------------------------------------------------------------------


def measure_slow_links(make: Make, through_both: Callable, arguments: argparse.Namespace) -> dict:
    """Compare the time to first token of a prompt computed elsewhere and of one computed here, for
    several link rates.

    The two alternate, because a busy machine is not always equally fast.
    """
    heading("6. Break it")
    prompt, (plain, _) = random_prompt(arguments.prompt, 7), make()
    size = -(-len(prompt) // BLOCK_SIZE) * BLOCK_SIZE * plain.model.bytes_per_token
    firsts = count(300)  # a first token of its own keeps a prompt out of the prefix cache

    def here() -> float:
        return wall_seconds(lambda: until_finished(plain, plain.add("here", [next(firsts), *prompt[1:]], 1)))

    here()  # to warm up
    prefill = here()
    shown: dict[str, dict[str, Any]] = {"none: computed where it is answered": {"seconds": prefill}}
    ttfts, times_here = {}, {}
    for times in (math.inf, 2.0, 0.5):
        prefiller, decoder = make(bytes_per_second=times * size / prefill)
        beside = here()
        request = partial(through_both, prefiller, decoder, "there", list(prompt), 1)
        seconds = wall_seconds(request)
        ttfts[f"{times:g}"], times_here[f"{times:g}"] = 1e3 * seconds, seconds / beside
        cells = {"seconds": seconds, "of": f"{seconds / beside:.2f} ×"}
        if times < math.inf:
            cells["rate"] = times * size / prefill / 1e6
        shown["as fast as this machine" if times == math.inf else f"{times:g} × what hides it"] = cells
    record_table(
        f"A prompt of {len(prompt):,} tokens, sent when it is computed",
        shown,
        {"link": "{name}", "MB/s": "{rate:.1f}", "TTFT, ms": "{seconds:ms}", "of computing it here": "{of}"},
        f"{size:,} bytes; at {size / prefill / 1e6:.1f} MB/s they take as long as the prefill. Each is compared with a "
        "prompt computed just before it.",
    )
    sizes = {"prompt": len(prompt), "prefill_ms": 1e3 * prefill, "bytes": size, "least": size / prefill}
    return {**sizes, "ttft_ms": ttfts, "times_here": times_here}


def break_peers(make: Make, arguments: argparse.Namespace, lease: float = 0.4) -> dict:
    """Let a decoder die while it reads, and a prefiller before its blocks are read; check the
    blocks and the tokens.

    Raises:
        AssertionError: blocks are never freed, or a token is wrong.
    """
    prompt, (prefiller, _) = random_prompt(200, 8), make(lease=lease)
    until_finished(prefiller, prefiller.add("dies", list(prompt), 1, {"do_remote_decode": True}))
    held = {"the prefiller has answered": prefiller.blocks.num_held}
    with _clock_stopped(prefiller.connector):  # however slow this machine is, the half is read in time
        _read_half(prefiller.params["dies"])
        prefiller.step()
        held["a decoder has read half of it and then died"] = while_read = prefiller.blocks.num_held
    begin = time.monotonic()
    _until_released(prefiller)
    waited = time.monotonic() - begin
    held[f"{lease:g} s after its answer, when the lease ends"] = prefiller.blocks.num_held
    assert while_read > 0 == prefiller.blocks.num_held, "the lease must hold the blocks, then free them"
    records = {then: {"blocks": blocks} for then, blocks in held.items()}
    record_table("Blocks that the prefiller holds", records, {"then": "{name}", "blocks": "{blocks}"})
    return {"held": while_read, "lease": lease, "waited": waited} | _dead_prefiller(make, prompt)


@contextmanager
def _clock_stopped(connector: Any) -> Iterator[None]:
    """Stop a connector's clock, so that no lease expires."""
    clock, now = connector.clock, connector.clock()
    connector.clock = lambda: now
    yield
    connector.clock = clock


def _read_half(params: Mapping[str, Any]) -> None:
    """Read half of the blocks, then leave."""
    with socket.create_connection((params["remote_host"], params["remote_port"])) as connection:
        body = {"request_id": params["remote_request_id"], "block_ids": params["remote_block_ids"]}
        connection.sendall(json.dumps(body).encode() + b"\n")
        size = int.from_bytes(connection.recv(8), "big")
        read = 0
        while read < size // 2:
            read += len(connection.recv(min(4096, size // 2 - read)))


def _dead_prefiller(make: Make, prompt: list[int]) -> dict:
    """Kill the prefiller before its blocks are read: the decoder computes the prompt itself."""
    (prefiller, decoder), (plain, _) = make(), make()
    until_finished(prefiller, prefiller.add("alone", list(prompt), 1, {"do_remote_decode": True}))
    prefiller.worker.listening.close()
    request = until_finished(decoder, decoder.add("alone", list(prompt), 8, prefiller.params["alone"]))
    expected = until_finished(plain, plain.add("alone", list(prompt), 8))
    assert request.output_token_ids == expected.output_token_ids, "the tokens differ from one engine's"
    console.print("With the prefiller gone, the decoder computes the prompt itself: the same 8 tokens.")
    return {"bytes_from_the_dead": decoder.worker.num_bytes}


# ---- the whole lesson ----------------------------------------------------------------------------


def close(results: dict, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    gaps = {budget: each["itl_max_ms"] for budget, each in results["interference"].items()}
    requests, (long, longer) = results["tokens"]["requests"], results["ratio"]["best"].values()
    closing(
        Timed(
            f"A prompt of {results['slow']['prompt']:,} tokens stops running chats for {gaps[str(BUDGETS[0])]:.0f} ms; "
            f"in chunks of {BUDGETS[-1]} tokens for {gaps[str(BUDGETS[-1])]:.0f}, again and again."
        ),
        f"{len(requests)} requests through two engines give the same tokens as through one, and "
        f"{sum(each['bytes'] for each in requests.values()):,} bytes moved for that.",
        f"Modelled, {MODEL} on {GPUS} {GPU}: with its best budget one pool sustains {1 / long['times']:.2f} × what two "
        f"do with long prompts and short answers, and {1 / longer['times']:.2f} × with longer answers; with "
        f"{POOL_BUDGETS[-1]:,} tokens a step {long['default'] / long['two']:.2f} × and "
        f"{longer['default'] / longer['two']:.2f} ×.",
        disturbance=disturbance,
    )


def draw(results: dict, path: str) -> None:
    """Draw what each link adds to a first token, sent after the prefill and layer by layer."""
    added = results["links"]["places"][f"{next(iter(PLACES))}, {PROMPTS[-1]}"]
    rates = [get_link(link).bandwidth / 1e9 for link in LINKS]
    knee, prefill, layers = added["least_gb_per_second"], added["prefill_ms"], known_model(MODEL).num_hidden_layers
    with panels(path, 1, width=6.4) as (axes,):
        after, layered = (list(added[f"{way}_ms"].values()) for way in ("after", "layer_wise"))
        axes.plot(rates, after, "o-", color=palette.VERMILLION, label="sent after the prefill")
        # Up to the knee the line is curved, so its points come from the formula; then it is straight on these axes.
        bend = [rates[0] * (knee / rates[0]) ** (step / 32) for step in range(33)]
        curve = [layer_wise_end(0, prefill, added["megabytes"] / rate, layers) - prefill for rate in bend]
        points = bend + rates[1:], curve + layered[1:]
        axes.plot(*points, "s-", color=palette.INK, markevery=[0, 33, 34, 35], label="layer by layer")
        axes.axhline(prefill, color=palette.GREY, linewidth=1)
        words = f"the prefill itself: {prefill:.0f} ms"
        axes.annotate(words, (rates[-1], prefill), ha="right", va="bottom", fontsize=SMALL_TEXT)
        axes.axvline(knee, color=palette.GREEN, linestyle="--")
        axes.annotate(f" right of {knee:.1f} GB/s,\n the link keeps up", (knee, 0.1), va="bottom", fontsize=SMALL_TEXT)
        title = "What a link adds to the first token of a long prompt (modelled)"
        xlabel = f"speed of the link, for {PROMPTS[-1]:,} tokens of {MODEL} on an {GPU}"
        axes.set(title=title, xlabel=xlabel, ylabel="ms later", xscale="log", yscale="log")
        axes.set_xticks(rates, [f"{link}\n{rate:g} GB/s" for link, rate in zip(LINKS, rates, strict=True)])
        axes.set_yticks((0.1, 1, 10, 100, 1000), ("0.1", "1", "10", "100", "1,000"))
        axes.minorticks_off()
        axes.legend(loc="upper right", bbox_to_anchor=(1, 0.8))


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Add the lesson's own flag to the common ones; --help shows `doc`."""
    flags = lesson_parser(doc or "", EMBEDDED_MODEL)
    prompt = "tokens of the long prompt, 64 to 1900 (default: 1800)"
    flags.add_argument("--prompt", type=whole_number(64, 1900), default=1800, help=prompt)
    return flags
