"""Lesson 08's measurements, its tables, its figure and its command line.

A function `measure_*` or `compare_*` measures, prints its table and returns its figures; what it takes as a callable is
code of the lesson. `Make` makes the lesson's two engines.
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
from typing import Any

import torch
from torch import Tensor

from minivllm.config import EMBEDDED_MODEL, CacheConfig
from minivllm.engine.core import EngineCore
from minivllm_lab import palette
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.device_rates import copy_bandwidth
from minivllm_lab.disaggregation.goodput import Colocated, Disaggregated, Objective, System, Work, goodput
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
from minivllm_lab.figures import named_bars, panels
from minivllm_lab.http_load import Answer, Ask, load_beside
from minivllm_lab.paged_model import PagedModel, decoder_of
from minivllm_lab.paged_model import load as load
from minivllm_lab.progress import track
from minivllm_lab.recording import bare_engine
from minivllm_lab.tables import Timed, closing, console, ms, table
from minivllm_lab.timing import median_seconds
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.kv_links import Transfer, get_link
from minivllm_simulate.virtual_clock import percentile

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 200, 2048
BUDGETS = (2048, 512, 128)
"""Tokens of a step, of the engine whose chats are disturbed."""
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
"""Beside the best one. The last is `vllm serve`'s default on an H100."""
Make = Callable[..., tuple[Any, Any]]


# ---- requests and models ---------------------------------------------------------------------------------------------


def paged_model(arguments: argparse.Namespace) -> PagedModel:
    """The lesson's model in float32 with an empty cache of its own."""
    return PagedModel(decoder_of(arguments), NUM_BLOCKS, BLOCK_SIZE)


# ---- 1. interference -------------------------------------------------------------------------------------------------


def measure_interference(arguments: argparse.Namespace) -> dict:
    """The gaps between the tokens of a few chats while long prompts arrive, by the token budget of a step."""
    found, rows, prompts = {}, [], 1 if arguments.quick else 4
    for budget in track((None, *BUDGETS), "disturbing"):
        core = _engine(arguments, budget or BUDGETS[0])
        run = disturb(core, arguments.prompt, prompts if budget else 0, CHATS, CHAT_PROMPT)
        gaps, firsts = run.gaps, run.firsts
        one: dict[str, float] = {
            "itl_p50_ms": 1e3 * statistics.median(gaps),
            "itl_p99_ms": 1e3 * percentile(gaps, 0.99),
            "itl_max_ms": 1e3 * max(gaps),
        }
        if firsts:
            one["ttft_ms"] = 1e3 * statistics.median(firsts)
        found[str(budget or "alone")] = one
        name = f"{budget} tokens a step" if budget else "nobody else"
        rows.append((name, *(f"{one[key]:.1f}" if key in one else "" for key in INTERFERENCE)))
    title = f"{CHATS} running chats, and {prompts} prompts of {arguments.prompt:,} tokens, one after another"
    table(title, ("one engine", *INTERFERENCE.values()), rows)
    return found


INTERFERENCE = {
    "itl_p50_ms": "chats' ITL p50, ms",
    "itl_p99_ms": "p99",
    "itl_max_ms": "longest gap",
    "ttft_ms": "the prompts' TTFT, ms",
}


def _engine(arguments: argparse.Namespace, budget: int) -> EngineCore:
    blocks = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=600, enable_prefix_caching=False)
    sizes = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": budget}
    return bare_engine(arguments.model, arguments.device, blocks, dtype="float32", **sizes)


# ---- 1. and two servers ----------------------------------------------------------------------------------------------


def measure_two_servers(arguments: argparse.Namespace) -> dict:
    """The same chats and prompts over HTTP, to one server and through a proxy to two, by the same client.

    Each server has a core of its own, where that can be. `{}` where it is left out, which is said.
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
        found: dict[str, Any] = {"pinned": pair.pinned, "tokens_received": pair.received_tokens() - before}
    found |= {name: _gaps_and_firsts(*load) for name, load in loads.items()} | _same_answers(*loads.values())
    _show_servers(found, arguments.prompt)
    return found


SERVERS = {"one": "one server", "two": "two and a proxy"}
SERVED_PROMPTS, ANSWER = 4, 8
"""Long prompts that are served, and tokens of the answer of each."""


def _served(port: int, prompt: int, prompts: int, seed: int) -> tuple[list[Answer], list[Answer]]:
    """What the chats and the long prompts got."""
    chats = [
        _http_ask(random_prompt(CHAT_PROMPT, seed + 50 + one), MAX_MODEL_LEN - CHAT_PROMPT) for one in range(CHATS)
    ]
    longs = [_http_ask(random_prompt(prompt, seed + one), ANSWER) for one in range(prompts)]
    return load_beside(port, chats, longs, "/v1/completions")


def _http_ask(token_ids: list[int], max_tokens: int) -> Ask:
    greedy = {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    return Ask({"model": SERVED_NAME, "prompt": token_ids, "max_tokens": max_tokens, **greedy})


def _gaps_and_firsts(chats: list[Answer], longs: list[Answer]) -> dict[str, float]:
    """The gaps of the chats after their first eight events, as in the engine, and the first tokens of the others."""
    gaps = [gap for chat in chats for gap in chat.itls[8:]]
    return {
        "itl_p50_ms": 1e3 * statistics.median(gaps),
        "itl_p99_ms": 1e3 * percentile(gaps, 0.99),
        "itl_max_ms": 1e3 * max(gaps),
        "ttft_ms": 1e3 * statistics.median(long.ttft for long in longs),
    }


def _same_answers(*loads: tuple[list[Answer], list[Answer]]) -> dict[str, int]:
    """How many tokens both loads have of the same answers, and how many answers are the same as far as they go."""
    pairs = [
        (one.token_ids, two.token_ids)
        for left, right in zip(*loads, strict=True)
        for one, two in zip(left, right, strict=True)
    ]
    common = [(one[: len(two)], two[: len(one)]) for one, two in pairs]
    same = sum(one == two for one, two in common)
    return {"answers": len(pairs), "same_answers": same, "compared_tokens": sum(len(one) for one, _ in common)}


def _show_servers(found: Mapping[str, Any], prompt: int) -> None:
    rows = [(name, *(f"{found[key][column]:.1f}" for column in INTERFERENCE)) for key, name in SERVERS.items()]
    cores = (
        "Each server has one core; proxy and client run on both."
        if found["pinned"]
        else "The servers share all cores, so the decoder also waits for the prefiller's computing."
    )
    caption = (
        f"{BUDGETS[0]} tokens a step. {cores} {found['same_answers']} of {found['answers']} answers are the same, "
        f"{found['compared_tokens']:,} tokens; the keys and values of {found['tokens_received']:,} tokens moved."
    )
    console.print()
    title = f"The same over HTTP, {SERVED_PROMPTS} prompts of {prompt:,} tokens"
    table(title, ("over HTTP", *INTERFERENCE.values()), rows, caption)


# ---- 2. the same tokens ----------------------------------------------------------------------------------------------


def compare_tokens(make: Make, through_both: Callable, arguments: argparse.Namespace) -> dict:
    """Requests through both engines and through one: the tokens, what moved, and what is held afterwards.

    Raises:
        AssertionError: a token differs, or a block is still held.
    """
    (prefiller, decoder), (plain, _) = make(), make()
    tokens, found, rows, shared = 8 if arguments.quick else 24, {}, [], random_prompt(96, 1)
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
        mine = through_both(prefiller, decoder, name, list(prompt), tokens)
        its = until_finished(plain, plain.add(name, list(prompt), tokens))
        assert mine.output_token_ids == its.output_token_ids, f"{name}: other tokens than on one engine"
        _until_released(prefiller)
        found[name] = {
            "prompt": len(prompt),
            "here": mine.num_cached_tokens,
            "bytes": decoder.worker.num_bytes - before,
        }
        moved = found[name]["bytes"] // (BLOCK_SIZE * decoder.model.bytes_per_token)
        rows.append((name, len(prompt), mine.num_cached_tokens, moved, f"{found[name]['bytes']:,}", "yes"))
    pair = _two_at_once(prefiller, decoder, random_prompt(200, 9))
    columns = ("prompt", "tokens", "found here", "blocks moved", "bytes", "same tokens")
    caption = (
        f"{decoder.model.bytes_per_token:,} bytes a token. Two requests at once with one prompt of 200 tokens: "
        f"{pair['first']} and {pair['second']} blocks moved. Blocks that are held in the end: none."
    )
    table(f"{tokens} tokens of each, greedy, against one engine", columns, rows, caption)
    assert prefiller.blocks.num_held == decoder.blocks.num_held == 0, "blocks are still held"
    return {"requests": found, "bytes_per_token": decoder.model.bytes_per_token, "pair": pair}


def _two_at_once(prefiller: Any, decoder: Any, prompt: list[int]) -> dict[str, int]:
    """Two requests with one prompt reach the decoder together: the blocks that move for each."""
    for name in ("left", "right"):
        until_finished(prefiller, prefiller.add(name, list(prompt), 1, {"do_remote_decode": True}))
    requests = [decoder.add(name, list(prompt), 2, prefiller.params[name]) for name in ("left", "right")]
    until_finished(decoder, *requests)
    _until_released(prefiller)
    assert requests[0].output_token_ids == requests[1].output_token_ids, "one prompt, two answers"
    blocks = [-(-(len(prompt) - request.num_cached_tokens) // BLOCK_SIZE) for request in requests]
    return dict(zip(("first", "second"), blocks, strict=True))


def _until_released(engine: Any, seconds: float = 30.0) -> None:
    """Steps of an engine with nothing to do, until nobody holds a block of it any more, or time is up."""
    until = time.monotonic() + seconds
    while engine.blocks.num_held and time.monotonic() < until:
        engine.step()
        time.sleep(1e-4)


# ---- 3. the kernel ---------------------------------------------------------------------------------------------------


def transfer_case(numbers: int, num_blocks: int, block_ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """A cache of random numbers [6, num_blocks, numbers], an empty staging buffer for these blocks, and their ids."""
    data = torch.randn(6, num_blocks, numbers)
    return data, torch.zeros(len(block_ids), 6, numbers), torch.tensor(list(block_ids), dtype=torch.int32)


def verify_kernels(
    launch: Callable[..., Tensor], gather_kernel: Any, scatter_kernel: Any, device: torch.device
) -> dict:
    """Gathered and scattered again, bit for bit, in blocks that no tile divides; bytes, and bytes a second.

    Raises:
        AssertionError: a number is wrong, or one was written that should not be.
    """
    found, rows = {}, []
    for numbers in (16, 1000, 1024, 1040):
        block_ids = [5, 2, 7, 1]
        cache_, staging, ids = (one.to(device) for one in transfer_case(numbers, 9, block_ids))
        gathered = launch(gather_kernel, cache_, staging, ids)
        assert torch.equal(gathered, cache_[:, block_ids].transpose(0, 1)), f"blocks of {numbers} are gathered wrongly"
        target = torch.zeros_like(cache_)
        ids[2] = -1
        launch(scatter_kernel, target, gathered, ids)
        expected = torch.zeros_like(cache_)
        expected[:, [5, 2, 1]] = cache_[:, [5, 2, 1]]
        assert torch.equal(target, expected), f"blocks of {numbers} are scattered wrongly"
        moved = 2 * gathered.nbytes
        found[str(numbers)] = {"bytes": moved, "launches": 1, "copies": len(block_ids) * len(cache_)}
        rows.append((f"{numbers:,}", len(block_ids), len(cache_), f"{moved:,}", 1, len(block_ids) * len(cache_)))
    columns = ("numbers in a block", "blocks", "tensors", "bytes read and written", "launches", "copies without it")
    table("Blocks into one piece and back: right, bit for bit", columns, rows)
    return {"sizes": found, **_measure_gather(launch, gather_kernel, device)}


def _measure_gather(launch: Callable[..., Tensor], kernel: Any, device: torch.device) -> dict:
    """On a GPU: the kernel's bytes a second over a copy's, for blocks of Llama-3.1-8B. Elsewhere nothing."""
    if device.type != "cuda":
        return {}
    cache_ = torch.empty(64, 1024, 16 * 8 * 128, dtype=torch.bfloat16, device=device)
    ids = torch.randperm(1024, device=device)[:512].int()
    staging = cache_.new_empty(512, 64, 16 * 8 * 128)
    seconds = median_seconds(lambda: launch(kernel, cache_, staging, ids), device=device)
    one_by_one = median_seconds(lambda: _by_copies(cache_, staging, ids.tolist()), repeats=3, device=device)
    share = 2 * staging.nbytes / seconds / copy_bandwidth(device)
    console.print(
        f"{share:.0%} of a copy's bandwidth; {one_by_one / seconds:.0f} times as fast as a copy for each block"
    )
    return {"bandwidth_share": share, "times_faster": one_by_one / seconds}


def _by_copies(cache_: Tensor, staging: Tensor, block_ids: list[int]) -> None:
    for place, block in enumerate(block_ids):
        for tensor in range(len(cache_)):
            staging[place, tensor].copy_(cache_[tensor, block])


# ---- 4. links --------------------------------------------------------------------------------------------------------


def show_links(added_seconds: Callable[[float, float, int], float]) -> dict:
    """A prompt's prefill, its bytes, and what each link adds to its first token. *Modelled*."""
    found, rows = {}, []
    for place, (name, gpu, tp) in PLACES.items():
        for prompt in PROMPTS:
            links = {
                link: Transfer.of(known_model(name), get_hardware(gpu), prompt, get_link(link), tp) for link in LINKS
            }
            one = next(iter(links.values()))
            parts = {link: added_seconds(one.prefill, each.seconds, each.layers) for link, each in links.items()}
            found[f"{place}, {prompt}"] = {
                "prefill_ms": 1e3 * one.prefill,
                "megabytes": one.num_bytes / 1e6,
                "least_gb_per_second": one.num_bytes / one.prefill / 1e9,
                "after_ms": {link: 1e3 * each.seconds for link, each in links.items()},
                "layer_wise_ms": {link: 1e3 * seconds for link, seconds in parts.items()},
            }
            least = f"{one.num_bytes / one.prefill / 1e9:.1f}"
            cells = [f"{ms(each.seconds)} | {ms(parts[link])}" for link, each in links.items()]
            rows.append((place, f"{prompt:,}", ms(one.prefill), least, *cells))
    off = {check.what: check.error for check in link_checks() if "loading pays" in check.what}
    caption = (
        "Sent after the prefill | layer by layer. GB/s: from here on it takes no longer than the prefill. Mooncake's "
        "paper says 6 and 19 GB/s for 8,192 tokens of 70B on 8 A800 and 8 H800; at data-sheet rates "
        f"the model is off by {' and '.join(f'{error:+.0%}' for error in off.values())}."
    )
    columns = ("Llama-3", "tokens", "prefill", "GB/s", *LINKS)
    table("ms that a link adds to a first token, modelled", columns, rows, caption)
    return {"places": found, "off_mooncake": off}


# ---- 5. how many of each ---------------------------------------------------------------------------------------------

DISTSERVE = {"together": 1.6, "prefill": 5.6, "decode": 10.0}
"""Requests a second of one A100 with a model of 13 billion parameters, in the example of DistServe's authors."""


def show_ratios(goodput_per_gpu: Callable[[float, float, int, int], float], arguments: argparse.Namespace) -> dict:
    """DistServe's example for each ratio: published rates, our arithmetic. Then four GPUs with the real schedulers."""
    found, rows = {}, []
    for prefillers, decoders in ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3)):
        rate = goodput_per_gpu(DISTSERVE["prefill"], DISTSERVE["decode"], prefillers, decoders)
        busy = rate * (prefillers + decoders)
        found[f"{prefillers}:{decoders}"] = {"per_gpu": rate, "times": rate / DISTSERVE["together"]}
        idle = (1 - busy / (prefillers * DISTSERVE["prefill"]), 1 - busy / (decoders * DISTSERVE["decode"]))
        times = f"{rate / DISTSERVE['together']:.2f} ×"
        rows.append((f"{prefillers} : {decoders}", f"{rate:.2f}", times, *map("{:.0%}".format, idle)))
    columns = ("prefillers : decoders", "requests/s a GPU", "of one pool", "prefillers idle", "decoders idle")
    table("DistServe's example: 5.6 requests a second, 10, and 1.6 together", columns, rows)
    console.print()
    return {"distserve": found, **_simulated_pools(arguments)}


def _simulated_pools(arguments: argparse.Namespace) -> dict:
    """Goodput for each GPU of one pool, tuned and not, and of two pools in each split, for two kinds of work."""
    model, gpu, counted = known_model(MODEL), get_hardware(GPU), 4 if arguments.quick else 60
    rounds, objective = 2 if arguments.quick else ROUNDS, Objective(TTFT_SLO, TPOT_SLO)
    works = {kind: Work(*lengths, counted=counted) for kind, lengths in WORKS.items()}
    one = Colocated(model, gpu, GPUS)
    systems: dict[str, System] = {f"one pool, {each} tokens a step": replace(one, budget=each) for each in POOL_BUDGETS}
    for decoders in range(GPUS - 1, 0, -1):
        pools = Disaggregated(model, gpu, GPUS - decoders, decoders, get_link(LINK), layer_wise=True)
        systems[f"two pools, {GPUS - decoders} : {decoders}"] = pools
    found: dict[str, dict[str, Any]] = {BEST_BUDGET: {}} | {name: {} for name in systems}
    for name, system in track(systems.items(), "bisecting"):
        for kind, work in works.items():
            sustained = goodput(system, work, objective, rounds)
            found[name] |= {kind: sustained.per_gpu, f"{kind}: cause": sustained.cause}
    best = {}
    for kind, work in track(works.items(), "tuning"):
        tuned = best_budget(one, work, objective, rounds)
        found[BEST_BUDGET] |= {kind: tuned.goodput.per_gpu, f"{kind}: cause": tuned.goodput.cause}
        two = max(each[kind] for name, each in found.items() if name.startswith("two"))
        winning = winning_budgets(one, two * GPUS, work, objective)
        rates = {"one": tuned.goodput.per_gpu, "two": two, "times": two / tuned.goodput.per_gpu}
        best[kind] = rates | {"budget": int(tuned.name), "winning": winning}
        best[kind]["default"] = found[f"one pool, {POOL_BUDGETS[-1]} tokens a step"][kind]
    _show_pools(found, best, ours := _against_distserve(counted))
    return {"pools": found, "best": best, "against_distserve": ours}


BEST_BUDGET = "one pool, its best budget"


def _show_pools(found: Mapping[str, Mapping[str, Any]], best: Mapping[str, Any], ours: Sequence[float]) -> None:
    """A row for each way to use the GPUs, the best budgets in words below."""
    rows = [
        (name, *(f"{one[kind]:.1f} ({CAUSES[one[f'{kind}: cause']]})" for kind in WORKS)) for name, one in found.items()
    ]
    columns = (f"{GPUS} {GPU}, {MODEL}", *(f"{prompt:,} tokens in, {output} out" for prompt, output in WORKS.values()))
    budgets = " and ".join(f"{best[kind]['budget']:,}" for kind in WORKS)
    wins = " and ".join(", ".join(map(str, best[kind]["winning"])) or "none" for kind in WORKS)
    caption = (
        f"requests a second and GPU, and what is late beyond it. In time: a first token within {TTFT_SLO:g} s and "
        f"{1e3 * TPOT_SLO:g} ms a token, 9 of 10 requests; {LINK}, layer by layer. The best of {len(LADDER)} budgets: "
        f"{budgets} tokens a step; one pool sustains what two do with {wins}. Of DistServe's 2.1 × the model "
        f"says {ours[0]:.2f} ×, and {ours[1]:.2f} × with two factors fitted to the rates of that engine."
    )
    table("Goodput by bisection, modelled", columns, rows, caption)


def _against_distserve(counted: int) -> list[float]:
    """Two pools against prompts computed whole, in DistServe's example: the cost as it is, and fitted to its engine."""
    costs = (slower(1.0, 1.0), slower(ARITHMETIC_SLOWER, MEMORY_SLOWER))
    rates = [two_to_one(cost, Work(512, 64, counted=counted)) for cost in costs]
    return [apart / together for apart, together in rates]


CAUSES = {"tpot": "tokens", "ttft": "first tokens", "queue": "first tokens", "link": "link", "": "nothing"}


# ---- 6. break it -----------------------------------------------------------------------------------------------------


def measure_slow_links(make: Make, through_both: Callable, arguments: argparse.Namespace) -> dict:
    """Time to first token by the link's rate: of the prompt computed elsewhere, over that of one computed just before.

    In turns, because a busy machine is not as fast all the time.
    """
    prompt, (plain, _) = random_prompt(arguments.prompt, 7), make()
    size = -(-len(prompt) // BLOCK_SIZE) * BLOCK_SIZE * plain.model.bytes_per_token

    def here(first: int) -> float:
        begin = time.perf_counter()
        until_finished(plain, plain.add("here", [300 + first, *prompt[1:]], 1))
        return time.perf_counter() - begin

    here(0)  # to warm up
    prefill = here(1)
    found: dict[str, Any] = {
        "prompt": len(prompt),
        "prefill_ms": 1e3 * prefill,
        "bytes": size,
        "least": size / prefill,
        "ttft_ms": {},
        "times_here": {},
    }
    rows = [("none: computed where it is answered", "", ms(prefill), "")]
    for turn, times in enumerate((math.inf, 2.0, 0.5)):
        prefiller, decoder = make(bytes_per_second=times * size / prefill)
        beside = here(2 + turn)
        begin = time.perf_counter()
        through_both(prefiller, decoder, "there", list(prompt), 1)
        seconds = time.perf_counter() - begin
        name = "as fast as this machine" if times == math.inf else f"{times:g} × what hides it"
        rate = "" if times == math.inf else f"{times * size / prefill / 1e6:.1f}"
        found["ttft_ms"][f"{times:g}"] = 1e3 * seconds
        found["times_here"][f"{times:g}"] = seconds / beside
        rows.append((name, rate, ms(seconds), f"{seconds / beside:.2f} ×"))
    columns = ("link", "MB/s", "TTFT, ms", "of computing it here")
    caption = (
        f"{size:,} bytes; at {size / prefill / 1e6:.1f} MB/s they take as long as the prefill. Each is compared with a "
        "prompt computed just before it."
    )
    table(f"A prompt of {len(prompt):,} tokens, sent when it is computed", columns, rows, caption)
    return found


def break_peers(make: Make, through_both: Callable, arguments: argparse.Namespace, lease: float = 0.4) -> dict:
    """A decoder that dies in the middle of reading, and a prefiller that dies before: blocks, and tokens.

    Raises:
        AssertionError: blocks are lost for good, or a token is wrong.
    """
    prompt = random_prompt(200, 8)
    (prefiller, _), rows = make(lease=lease), []
    until_finished(prefiller, prefiller.add("dies", list(prompt), 1, {"do_remote_decode": True}))
    rows.append(("the prefiller has answered", prefiller.blocks.num_held))
    with _clock_stopped(prefiller.connector):  # however slow this machine is, the half is read in time
        _read_half(prefiller.params["dies"])
        prefiller.step()
        held = prefiller.blocks.num_held
    rows.append(("a decoder has read the half of it, and died", held))
    begin = time.monotonic()
    _until_released(prefiller)
    rows.append((f"{lease:g} s after its answer, the lease", prefiller.blocks.num_held))
    assert held > 0 == prefiller.blocks.num_held, "the lease holds blocks, and gives them back"
    table("Blocks that the prefiller holds", ("then", "blocks"), rows)
    return {"held": held, "lease": lease, "waited": time.monotonic() - begin} | _dead_prefiller(make, prompt)


@contextmanager
def _clock_stopped(connector: Any) -> Iterator[None]:
    clock, now = connector.clock, connector.clock()
    connector.clock = lambda: now
    yield
    connector.clock = clock


def _read_half(params: Mapping[str, Any]) -> None:
    """A reader that leaves when half of the blocks are there."""
    with socket.create_connection((params["remote_host"], params["remote_port"])) as connection:
        asked = {"request_id": params["remote_request_id"], "block_ids": params["remote_block_ids"]}
        connection.sendall(json.dumps(asked).encode() + b"\n")
        size = int.from_bytes(connection.recv(8), "big")
        read = 0
        while read < size // 2:
            read += len(connection.recv(min(4096, size // 2 - read)))


def _dead_prefiller(make: Make, prompt: list[int]) -> dict:
    """The decoder computes the prompt itself if its peer is gone."""
    (prefiller, decoder), (plain, _) = make(), make()
    until_finished(prefiller, prefiller.add("alone", list(prompt), 1, {"do_remote_decode": True}))
    prefiller.worker.listening.close()
    mine = until_finished(decoder, decoder.add("alone", list(prompt), 8, prefiller.params["alone"]))
    its = until_finished(plain, plain.add("alone", list(prompt), 8))
    assert mine.output_token_ids == its.output_token_ids, "other tokens than on one engine"
    console.print("A prefiller that is gone: the decoder computes the prompt itself, the same 8 tokens.")
    return {"bytes_from_the_dead": decoder.worker.num_bytes}


# ---- the whole lesson ------------------------------------------------------------------------------------------------


def close(found: dict, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    one, tokens, best = found["interference"], found["tokens"]["requests"], found["ratio"]["best"]
    whole, chunk = (one[str(budget)] for budget in (BUDGETS[0], BUDGETS[-1]))
    long, longer = (best[kind] for kind in WORKS)
    closing(
        Timed(
            f"A prompt of {found['slow']['prompt']:,} tokens stops running chats for {whole['itl_max_ms']:.0f} ms; in "
            f"chunks of {BUDGETS[-1]} tokens for {chunk['itl_max_ms']:.0f}, again and again."
        ),
        f"{len(tokens)} requests through two engines say what they say through one, and "
        f"{sum(each['bytes'] for each in tokens.values()):,} bytes moved for it.",
        f"Modelled, {MODEL} on {GPUS} {GPU}: with its best budget one pool sustains {1 / long['times']:.2f} × what two "
        f"do with long prompts and short answers, and {1 / longer['times']:.2f} × with longer answers; with "
        f"{POOL_BUDGETS[-1]:,} tokens a step {long['default'] / long['two']:.2f} × and "
        f"{longer['default'] / longer['two']:.2f} ×.",
        disturbance=disturbance,
    )


def draw(found: dict, path: str) -> None:
    """The chats' gaps by budget; what links add; goodput by ratio."""
    with panels(path, 3) as (left, middle, right):
        names = {str(budget): f"{budget} a step" for budget in BUDGETS} | {"alone": "nobody else"}
        gaps = [(name, found["interference"][key]["itl_max_ms"]) for key, name in names.items()]
        gaps += [(SERVERS[key], found["servers"][key]["itl_max_ms"]) for key in SERVERS if found["servers"]]
        named_bars(left, [(f"{name}: {gap:.0f} ms", gap, palette.SKY) for name, gap in gaps])
        left.set(title="Longest gap of running chats", xlabel="ms")
        one = found["links"]["places"][f"{next(iter(PLACES))}, {PROMPTS[-1]}"]
        rates = [get_link(link).bandwidth / 1e9 for link in LINKS]
        for key, label, colour in (
            ("after_ms", "sent afterwards", palette.ORANGE),
            ("layer_wise_ms", "layer by layer", palette.BLUE),
        ):
            middle.plot(rates, list(one[key].values()), "o-", color=colour, label=label)
        middle.axhline(one["prefill_ms"], color=palette.GREY, linewidth=1)
        middle.annotate("the prefill", (rates[-1], one["prefill_ms"]), ha="right", va="bottom", fontsize=9)
        middle.set(
            title="Added to a first token (modelled)", xlabel="GB a second", ylabel="ms", xscale="log", yscale="log"
        )
        middle.legend(loc="lower left")
        kind = next(iter(WORKS))
        goodput = {name: each[kind] for name, each in found["ratio"]["pools"].items()}
        colours = {name: palette.SKY if name.startswith("one") else palette.ORANGE for name in goodput}
        named_bars(right, [(f"{name}: {rate:.1f}", rate, colours[name]) for name, rate in goodput.items()])
        right.set(title="Goodput, long prompts (modelled)", xlabel="requests a second and GPU")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The lesson's own flags, besides the common ones; `doc` is shown by --help."""
    flags = lesson_parser(doc or "", EMBEDDED_MODEL)
    flags.add_argument(
        "--prompt",
        type=whole_number(64, 1900),
        default=1800,
        help="tokens of the long prompt, 64 to 1900 (default: 1800)",
    )
    return flags
