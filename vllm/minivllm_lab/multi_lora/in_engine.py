"""Lesson 12's measurements in the engine: a thousand adapters, a step's time, and what each adapter answers."""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minivllm.config import EMBEDDED_MODEL, NO_PARTS, Parts
from minivllm.core.block_hash import hash_block_tokens
from minivllm.core.lora_request import LoRARequest
from minivllm.core.policy import SchedulingPolicy, running_then_waiting
from minivllm.core.scheduler import Scheduler
from minivllm.core.step import Step
from minivllm.entrypoints.llm import LLM
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams
from minivllm_lab.cli import warnings_only
from minivllm_lab.engines.inside import runner_of
from minivllm_lab.multi_lora.adapters import write_random_adapters
from minivllm_lab.multi_lora.ways import RANK
from minivllm_lab.progress import track
from minivllm_lab.tables import record_table, table
from minivllm_lab.timing import wall_seconds

AT_ONCE = 16
"""Requests of a step, and slots, so that no request waits for a slot."""
QV = ("q_proj", "v_proj")


def engine_with(arguments: argparse.Namespace, **settings: Any) -> LLM:
    """Start an engine in this process."""
    sizes = {"max_model_len": 256, "max_num_seqs": AT_ONCE, "dtype": "float32", **settings}
    with warnings_only():
        return LLM(arguments.model, device=arguments.device.type, **sizes)


def with_adapters(arguments: argparse.Namespace, adapters: int, **settings: Any) -> LLM:
    """Start an engine with a slot of rank 8 for each request, and host memory for `adapters`."""
    lora = {"enable_lora": True, "max_loras": AT_ONCE, "max_lora_rank": 8, "max_cpu_loras": max(AT_ONCE, adapters)}
    return engine_with(arguments, **{**lora, **settings})


def named(folders: Sequence[Path]) -> list[LoRARequest]:
    """Return an adapter for each folder, numbered from 1."""
    return [LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders, start=1)]


class StepCounts:
    """A count of steps, and of the different adapters in each; `schedule` is the engine's own, and
    counts.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin to count again."""
        self.steps = self.adapters = 0

    def schedule(self, scheduler: Scheduler, step: Step) -> None:
        """Fill a step as the engine does, and count it and its adapters."""
        running_then_waiting(scheduler, step)
        self.steps += 1
        self.adapters += len({one.lora_request.lora_int_id for one in scheduler.running if one.lora_request})

    @property
    def mean(self) -> float:
        """Different adapters in a step."""
        return self.adapters / self.steps


def measure_thousand(arguments: argparse.Namespace) -> dict[str, Any]:
    """Serve Zipf traffic over more and more adapters, each set in one engine; measure loads and
    requests per second.
    """
    most = min(arguments.adapters, 64) if arguments.quick else arguments.adapters
    requests, records = 32 if arguments.quick else 128, {}
    with tempfile.TemporaryDirectory() as folder:
        adapters = named(write_random_adapters(folder, most, targets=QV, model=arguments.model))
        for count in track(sorted({8, min(64, most), most}), "serving"):
            counts = StepCounts()
            parts = Parts(policy=SchedulingPolicy(schedule=counts.schedule))
            llm = with_adapters(arguments, count, enable_prefix_caching=False, parts=parts)
            _generate(llm, [None] * AT_ONCE)
            shares = [k**-arguments.skew for k in range(1, count + 1)]
            drawn = random.Random(arguments.seed).choices(adapters[:count], shares, k=requests)
            lora: Any = runner_of(llm).lora
            counts.reset()
            first, second = (_generate(llm, drawn) for _ in range(2))
            counted = {"distinct": counts.mean, "read": lora.num_loads, "copied": lora.manager.num_activations}
            # The requests that run together cycle through eight different adapters.
            eight = [adapters[(i // AT_ONCE * 8 + i % 8) % count] for i in range(requests)]
            _generate(llm, eight)
            records[str(count)] = {
                "wanted": len({adapter.lora_int_id for adapter in drawn}), **counted,
                "first_per_second": requests / first, "per_second": requests / second,
                "fixed_per_second": requests / _generate(llm, eight),
            }  # fmt: skip
        base = requests / _generate(llm, [None] * requests)
    record_table(
        f"{most:,} adapters in one process; {requests} requests of 8 tokens, {AT_ONCE} at once",
        {f"{int(count):,}": record for count, record in records.items()},
        "registered {name} | wanted {wanted} | a step {distinct:.1f} | read {read} | copied {copied} | "
        "requests/s, first {first_per_second:,.0f} | again {per_second:,.0f} | eight a step {fixed_per_second:,.0f}",
        f"Zipf with skew {arguments.skew:g}. Wanted, a step: different adapters. Read: from disk; copied: into a slot. "
        f"Eight a step: other traffic with eight different adapters a step, again. Without adapters: {base:,.0f}.",
    )
    return {"adapters": records, "requests": requests, "base_per_second": base}


def _generate(llm: LLM, adapters: Sequence[LoRARequest | None], max_tokens: int = 8) -> float:
    """Return the seconds that requests with these adapters take."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": [1 + number % 50] * 8} for number in range(len(adapters))]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, lora_request=list(adapters))
    return time.perf_counter() - start


def measure_cost(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time a decode step of 16 requests: with `enable_lora` off, and with it on for no adapter, one
    and sixteen.
    """
    with tempfile.TemporaryDirectory() as folder:
        adapters = named(write_random_adapters(folder, AT_ONCE, model=arguments.model))
        off = engine_with(arguments, enable_prefix_caching=False)
        on = with_adapters(arguments, AT_ONCE, enable_prefix_caching=False)
        ways: dict[str, tuple[LLM, list[LoRARequest | None]]] = {
            "enable_lora off": (off, [None] * AT_ONCE),
            "on, nobody has one": (on, [None] * AT_ONCE),
            "on, all have the same": (on, [adapters[0]] * AT_ONCE),
            "on, each its own": (on, list(adapters)),
        }
        steps: dict[str, list[float]] = {name: [] for name in ways}
        turns, tokens = (2, 8) if arguments.quick else (8, 24)
        for turn in range(turns):
            for name, (llm, wanted) in ways.items():
                seconds = _decode_seconds(llm, wanted, tokens)
                steps[name] += [seconds] if turn else []
    base, records = steps["enable_lora off"], {}
    for name, times in steps.items():
        ratio = statistics.median(seconds / other for seconds, other in zip(times, base, strict=True))
        records[name] = {"ms": 1e3 * statistics.median(times), "ratio": ratio}
    title = f"\nA decode step of {AT_ONCE} requests, adapters of rank 8 on all seven projections"
    record_table(title, records, "{name} | ms {ms:.2f} | of one without {ratio:.2f} ×", "Medians of alternating runs.")
    return records


def _decode_seconds(llm: LLM, adapters: Sequence[LoRARequest | None], tokens: int) -> float:
    """Return the median time of the steps in which all of these requests decode."""
    engine, params = llm.llm_engine, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for number, adapter in enumerate(adapters):
        engine.add_request(str(number), {"prompt_token_ids": [7 + number] * 8}, params, lora_request=adapter)
    engine.step()
    times = []
    while engine.has_unfinished_requests():
        times.append(wall_seconds(engine.step))
    return statistics.median(times)


PROMPT = "def add(a, b):\n    return a + b\n\n\ndef total(items):"
TRAINED = Path(EMBEDDED_MODEL).parent / "adapters"


def embedded_with_adapters(arguments: argparse.Namespace, **settings: Any) -> tuple[LLM, list[LoRARequest]]:
    """Start the embedded model with the adapters that were trained for it."""
    own = argparse.Namespace(**{**vars(arguments), "model": EMBEDDED_MODEL})
    folders = sorted(path.parent for path in TRAINED.glob("*/adapter_config.json"))
    return with_adapters(own, AT_ONCE, max_lora_rank=RANK, **settings), named(folders)


def show_answers(arguments: argparse.Namespace) -> dict[str, str]:
    """Show how the model continues one prompt, alone and with each of the trained adapters, in
    one batch.
    """
    llm, adapters = embedded_with_adapters(arguments)
    texts = [output.outputs[0].text for output in _continue(llm, [None, *adapters])]
    names = ["no adapter", *(adapter.lora_name for adapter in adapters)]
    answers = dict(zip(names, texts, strict=True))
    rows = [(name, repr(text)) for name, text in answers.items()]
    table("\nOne prompt, and who answers", ("adapter", "text"), rows, words=True)
    return answers


def share_hashes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one prompt under two adapters in turn, then again with block hashes that leave the
    adapter out.

    Raises:
        AssertionError: the sound engine hits another adapter's blocks, or the unsound one does not.
    """

    own = Parts(policy=SchedulingPolicy(hash_block_tokens=lambda parent, ids, _: hash_block_tokens(parent, ids)))
    records: dict[str, Any] = {}
    for name, parts in (("unchanged", NO_PARTS), ("hashes ignore the adapter", own)):
        llm, (first, second, *_) = embedded_with_adapters(arguments, block_size=4, parts=parts)
        _continue(llm, [first])
        (output,) = _continue(llm, [second])
        records[name] = {"text": output.outputs[0].text, "cached": output.num_cached_tokens}
    sound, shared = records.values()
    assert sound["cached"] == 0 < shared["cached"], f"cached: {sound['cached']}, {shared['cached']}"
    assert sound["text"] != shared["text"], "both engines generate the same text: use another prompt"
    title = f"\nThe second request begins like the first, with {second.lora_name} in place of {first.lora_name}"
    rows = [(name, record["cached"], repr(record["text"])) for name, record in records.items()]
    table(title, ("prefix cache", "tokens found", "text"), rows, words=True)
    return records


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def _continue(llm: LLM, adapters: Sequence[LoRARequest | None]) -> list[RequestOutput]:
    """Continue the prompt once with each of these adapters."""
    return llm.generate([PROMPT] * len(adapters), GREEDY, use_tqdm=False, lora_request=list(adapters))
