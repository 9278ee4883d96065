"""Lesson 11's pools that are too small: tokens computed twice, the cliff, and what breaks."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from minivllm.entrypoints.llm import LLM
from minivllm.sampling_params import SamplingParams
from minivllm_lab.engines.inside import core_of
from minivllm_lab.preemption import cliff
from minivllm_lab.preemption.published_waste import AT_ONCE, PUBLISHED, REQUESTS, waste, workload
from minivllm_lab.progress import track
from minivllm_lab.tables import record_table
from minivllm_simulate.virtual_clock import SimulatedRequest


def show_waste(arguments: argparse.Namespace) -> dict[str, Any]:
    """Show the share of recomputed tokens by pool: as published, and ours by admission rule and
    victim rule.
    """
    pools, requests = ((400,), 60) if arguments.quick else (tuple(PUBLISHED), REQUESTS)
    records: dict[str, dict[str, Any]] = {}
    for blocks in track(pools, "replaying"):
        replay = partial(waste, blocks, requests=requests)
        first, least = replay(whole=False), replay(whole=False, victim="least computed")
        records[str(blocks)] = {
            "published": PUBLISHED[blocks].wasted,
            "first_chunk": first.share,
            "least": least.share,
            "whole": replay(whole=True).share,
            "found": replay(whole=True, caching=True).share,
            "published_less": PUBLISHED[blocks].less,
            "preemptions": first.preemptions,
            "less": 1 - least.recomputed / first.recomputed if first.recomputed else None,
        }
    record_table(
        f"Share of computed tokens that are recomputed: {requests} requests, {AT_ONCE} at once",
        records,
        "blocks {name} | published {published:.1%} | first chunk {first_chunk:.1%} | least {least:.1%} | "
        "whole {whole:.1%} | found {found:.1%}",
        "Published: vllm#54644. First chunk: a waiting request is admitted if its first chunk fits. Least: the same, "
        "and the victim is the request with the fewest computed tokens. Whole: a request is admitted if all its tokens "
        "fit, as in vLLM now. Found: the same with prefix caching.",
    )
    return records


def show_pools(arguments: argparse.Namespace) -> dict[str, Any]:
    """Show the modelled p99 latency of answers and first tokens by pool, under one open load."""
    pools = (450, 300) if arguments.quick else cliff.POOLS
    records = {str(blocks): cliff.pool_of(blocks)._asdict() for blocks in track(pools, "sweeping pools")}
    record_table(
        f"\n{cliff.REQUESTS:,} requests, {cliff.RATE} a second, by pool",
        records,
        "blocks {name} | full {mean:.0%} | at most {most:.0%} | preemptions {preemptions} | "
        "first, p99 {ttft:.2f} | answer, p50 {p50:.2f} | p99 {p99:.2f}",
        "Full: of the pool, on average; at most: at the peak. Seconds until the first token and the whole answer: "
        "p50 for the median request, p99 for the slowest in a hundred. Modelled: Llama-3.1-8B on an H100.",
    )
    return records


# ---- break it ------------------------------------------------------------------------------------


def break_it(arguments: argparse.Namespace) -> dict[str, Any]:
    """Show thrashing, and what a host tier saves."""
    return {"thrash": _thrash(arguments), "tier": _tier(arguments)}


def _thrash(arguments: argparse.Namespace) -> dict[str, Any]:
    """Show modelled output tokens per second by `max_num_seqs`, in a pool for about twelve
    requests.
    """
    limits_tried, requests = ((16, 32), 50) if arguments.quick else ((4, 8, 16, 32, 64), 100)
    work = [SimulatedRequest(8 * each.prompt_tokens, each.output_tokens) for each in workload(requests=requests)]
    useful = sum(each.prompt_tokens + each.output_tokens - 1 for each in work)
    records: dict[str, dict[str, Any]] = {}
    for at_once in track(limits_tried, "thrashing"):
        record = records[str(at_once)] = {}
        for name, whole in (("first_chunk", False), ("whole", True)):
            limits = {"max_num_seqs": at_once, "max_num_batched_tokens": 4096, "scheduler_reserve_full_isl": whole}
            run = cliff.on_h100(work, 3200, **limits)
            again = 1 - useful / sum(step.shape.num_tokens for step in run.steps)
            record[name] = {"rate": run.throughput, "preemptions": run.num_preemptions, "again": again}
    record_table(
        f"{len(work)} requests with long prompts, 3,200 blocks",
        records,
        "at once, at most {name} | first chunk {first_chunk[rate]:,.0f}, {first_chunk[again]:.0%} | "
        "whole {whole[rate]:,.0f}, {whole[again]:.0%}",
        "Output tokens a second, and the share of recomputed tokens. Modelled: Llama-3.1-8B on an H100.",
    )
    return records


def _tier(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the engine under memory pressure with and without a host tier, and count the recomputed
    tokens.

    Raises:
        AssertionError: a token differs.
    """
    prompts = [[7 + index, *([20 + index] * 39)] for index in range(6)]
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    transfer = {"kv_connector_extra_config": {"offload_prompt_only": False}}
    ways: dict[str, dict[str, Any]] = {
        "ample memory": {"num_gpu_blocks_override": 100, "enable_prefix_caching": False},
        "recompute": {"enable_prefix_caching": False},
        "recompute, blocks found": {},
        "with a host tier": {"kv_offloading_size": 0.01, "kv_transfer_config": transfer},
    }
    if arguments.quick:
        del ways["ample memory"], ways["recompute, blocks found"]
    records: dict[str, dict[str, int]] = {}
    expected = None
    for name, settings in track(ways.items(), "serving"):
        llm = LLM(
            arguments.model, device="cpu", dtype="float32", max_model_len=96, block_size=16, max_num_seqs=8,
            skip_tokenizer_init=True, **{"num_gpu_blocks_override": 13, **settings},
        )  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        expected = expected or tokens
        assert tokens == expected, f"{name}: the tokens differ from those of the first run"
        scheduler = core_of(llm).scheduler
        lookups = scheduler.make_stats().connector_prefix_cache_stats
        records[name] = {
            "preemptions": scheduler.num_preemptions,
            "again": scheduler.num_recomputed_tokens,
            "loaded": lookups.hits + lookups.preempted_hits if lookups else 0,
        }
    record_table(
        "\nThe engine, 12 blocks of 16 slots: 6 requests of 40 + 40 tokens",
        records,
        "{name} | preemptions {preemptions} | computed again {again} | from the host {loaded}",
        "Tokens. The answers are the same in all of these.",
    )
    return records
