"""The museum's workloads: each function drives an engine and returns its observations.

A workload imports only the engine (`minivllm`), since it also runs on copies that consist of the
engine alone. It is deterministic: on the sound engine it always returns the same observations. The
first paragraph of its docstring tells the learner what it does.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minivllm.config import CacheConfig, ModelConfig, Parts, SchedulerConfig
from minivllm.core.kv_connector import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from minivllm.core.lora_request import LoRARequest
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.async_thread_client import AsyncThreadClient
from minivllm.engine.core import EngineCore
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.engine.llm_engine import LLMEngine
from minivllm.kernels.unified_attention import unified_attention
from minivllm.memory import kv_bytes_per_token, kv_cache_tokens
from minivllm.models.tokenizer import load_tokenizer
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import RequestOutputKind, SamplingParams
from minivllm.worker.kv_cache import allocate_kv_caches

Seen = dict[str, Any]
"""Observations by name: texts and numbers."""

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-python"
MOST_STEPS = 300
ADD = "def add(a, b):\n    return"
READ = "def read_lines(path):\n    with open(path) as file:\n"
CLASS = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
LOOP = "for index in range(10):\n    print(index)\nfor index in range(10):\n"
LONG = (
    "import os\nimport sys\n\n\ndef main(arguments):\n    for name in arguments:\n        path = os.path.join(name)\n"
)
LONGER = LONG + "        if os.path.exists(path):\n            print(path)\n\n\n" + CLASS


# ---- driving an engine ---------------------------------------------------------------------------


@dataclass
class Ask:
    """A request: its prompt, its length, the step in which it arrives, and its parameters (greedy
    by default).
    """

    prompt: str | list[int]
    max_tokens: int = 16
    at: int = 0
    salt: str | None = None
    adapter: LoRARequest | None = None
    params: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    """A request's answer so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    prompt_logprob: float | None = None


def engine(**settings: Any) -> LLMEngine:
    """Start a small engine on the embedded model: 64 blocks of 16 slots, at most 4 requests at
    once.
    """
    defaults = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 4, "num_gpu_blocks_override": 65}
    return LLMEngine(EngineArgs(**{"model": MODEL, **defaults, **settings}))


def core_of(llm: LLMEngine) -> EngineCore:
    """Return the core of an engine in this process."""
    return llm.engine_core.engine_core  # type: ignore[attr-defined]


class Answers(dict[str, Answer]):
    """Answers by name; `raised` is the error that ended them all, if any."""

    raised: str | None = None


def serve(llm: LLMEngine, asks: Mapping[str, Ask], after_step: Callable[[], None] | None = None) -> Answers:
    """Run all requests until they end, for at most `MOST_STEPS` steps, or until the first error."""
    answers = Answers({name: Answer() for name in asks})
    last = max(ask.at for ask in asks.values())
    try:
        for step in range(MOST_STEPS):
            for name, ask in asks.items():
                if ask.at == step:
                    _add(llm, name, ask)
            if llm.has_unfinished_requests():
                for output in llm.step():
                    _take_in(answers[output.request_id], output)
                if after_step:
                    after_step()
            elif step >= last:
                break
    except Exception as error:
        answers.raised = f"{type(error).__name__}: {error}"
    return answers


def _add(llm: LLMEngine, name: str, ask: Ask) -> None:
    prompt: dict[str, Any] = {"prompt" if isinstance(ask.prompt, str) else "prompt_token_ids": ask.prompt}
    if ask.salt is not None:
        prompt["cache_salt"] = ask.salt
    settings = {"temperature": 0.0, "ignore_eos": True, "output_kind": RequestOutputKind.CUMULATIVE, **ask.params}
    params = SamplingParams(max_tokens=ask.max_tokens, **settings)
    llm.add_request(name, prompt, params, lora_request=ask.adapter)  # type: ignore[arg-type]


def _take_in(answer: Answer, output: RequestOutput) -> None:
    first = output.outputs[0]
    answer.text, answer.token_ids, answer.finish_reason = first.text, list(first.token_ids), first.finish_reason
    answer.pieces.append(first.text)
    answer.samples = [completion.text for completion in output.outputs]
    answer.num_cached_tokens = output.num_cached_tokens
    if output.prompt_logprobs:
        logprobs = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry]
        answer.prompt_logprob = round(sum(logprobs), 1)


def each_answer(answers: Answers, label: str, value: Callable[[Answer], Any]) -> Seen:
    """Return one value per answer under the key "`what` NAME", and the error if there was one."""
    seen = {f"{label} {name}": value(answer) for name, answer in answers.items()}
    return seen if answers.raised is None else {"raised": answers.raised, **seen}


def texts(answers: Answers) -> Seen:
    """Return each request's text."""
    return each_answer(answers, "text of", lambda answer: answer.text)


def hits(answers: Answers) -> Seen:
    """Return how many tokens of each prompt came from the prefix cache."""
    return each_answer(answers, "cached tokens of", lambda answer: answer.num_cached_tokens)


def left_over(llm: LLMEngine) -> Seen:
    """Return what the engine still holds after the last request."""
    scheduler = core_of(llm).scheduler
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "requests still running": len(scheduler.running),
        "requests still waiting": len(scheduler.waiting),
        "blocks still held": pool.num_usable_blocks - pool.get_num_free_blocks(),
    }


def block_tables_of(llm: LLMEngine) -> dict[str, list[int]]:
    """Return the block tables by request name; the core's own ids are that name, "-" and a number."""
    manager = core_of(llm).scheduler.kv_cache_manager
    return {inner.rpartition("-")[0]: manager.get_block_ids(inner) for inner in manager.req_to_blocks}


def recorded_steps(llm: LLMEngine) -> list[SchedulerOutput]:
    """Return a list to which each step is added when it is executed."""
    steps: list[SchedulerOutput] = []
    executor = core_of(llm).executor
    start = executor.start_model

    def start_and_record(output: SchedulerOutput) -> Any:
        steps.append(output)
        return start(output)

    executor.start_model = start_and_record  # type: ignore[method-assign]
    return steps


def prompt_of(number: int, length: int) -> list[int]:
    """Return a prompt of `length` token ids that shares no block with the prompts of other numbers."""
    return [(37 * number + 11 * position + position * position) % 4000 + 5 for position in range(length)]


# ---- lesson 01: one request, token by token ------------------------------------------------------


def one_request() -> Seen:
    """Run one greedy request alone on the engine."""
    answers = serve(engine(), {"A": Ask(ADD, 12)})
    return {"first token": answers["A"].token_ids[:1], **texts(answers)}


def three_lengths() -> Seen:
    """Start three greedy requests of different lengths together."""
    asks = {"A": Ask(ADD), "B": Ask(READ), "C": Ask(CLASS)}
    return texts(serve(engine(), asks))


def cache_ledger() -> Seen:
    """Compare the ledger's bytes per token with the tensors that the engine allocates."""
    config, seen = ModelConfig.from_pretrained(MODEL), Seen()
    for dtype in ("auto", "int8"):
        caches = allocate_kv_caches(config, 8, 16, torch.device("cpu"), torch.bfloat16, dtype)
        parts = [part for cache in caches for part in cache if part is not None]
        seen[f"bytes of a token, {dtype}: in the tensors"] = sum(part.nbytes for part in parts) // (8 * 16)
        seen[f"bytes of a token, {dtype}: in the ledger"] = kv_bytes_per_token(config, dtype)
    return {**seen, "blocks of 64 MiB, by the ledger": kv_cache_tokens(64 * 2**20, config) // 16}


def wanted_lengths() -> Seen:
    """Run requests for 1, 2 and 7 tokens."""
    answers = serve(engine(), {f"the request for {count}": Ask(ADD, count) for count in (1, 2, 7)})
    return each_answer(answers, "tokens of", lambda answer: len(answer.token_ids))


# ---- lesson 02: blocks ---------------------------------------------------------------------------


def shared_prompt() -> Seen:
    """Send a prompt twice, the second time after the first; while the second answer grows,
    strangers fill the small pool.
    """
    llm = engine(num_gpu_blocks_override=13, max_model_len=128)
    prompt = prompt_of(1, 40)
    asks = {"A": Ask(prompt, 4), "B": Ask(prompt, 24, at=6)}
    strangers = {f"stranger {number}": Ask(prompt_of(number, 60), 4, at=4 + 3 * number) for number in (2, 3, 4)}
    shared: set[int] = set()

    def look() -> None:
        tables = block_tables_of(llm)
        blocks_of_b = set(tables.pop("B", ()))
        tables.pop("A", None)
        shared.update(*(blocks_of_b.intersection(table) for table in tables.values()))

    answers = serve(llm, {**asks, **strangers}, look)
    return {"blocks of B that a stranger held at the same time": sorted(shared), **texts(answers), **left_over(llm)}


def preemption() -> Seen:
    """Let three requests outgrow a pool of eight blocks: the last one loses its blocks and runs
    again later.
    """
    llm = engine(num_gpu_blocks_override=9, max_model_len=96)
    answers = serve(llm, {"A": Ask(READ, 32), "B": Ask(LOOP, 32), "C": Ask(ADD, 40)})
    return {**texts(answers), "preemptions": core_of(llm).scheduler.num_preemptions, **left_over(llm)}


def rows_reused() -> Seen:
    """Run five requests of different lengths on an engine that runs two at once."""
    prompts = {"A": LONG, "B": ADD, "C": CLASS, "D": READ, "E": LOOP}
    llm = engine(max_num_seqs=2, enable_prefix_caching=False)
    return {**texts(serve(llm, {name: Ask(prompt) for name, prompt in prompts.items()})), **left_over(llm)}


def many_short_requests() -> Seen:
    """Run ten short requests, one after the other, on an engine that runs four at once."""
    llm = engine()
    answers = serve(llm, {f"request {number}": Ask(ADD, 2, at=3 * number) for number in range(10)})
    return each_answer(answers, "the end of", lambda answer: answer.finish_reason)


def block_tables() -> Seen:
    """Inspect the pool before the first request, and the block tables while two requests run."""
    llm = engine(num_gpu_blocks_override=9, max_model_len=96)
    seen: Seen = {"usage before the first request": f"{core_of(llm).scheduler.kv_cache_manager.usage:.1%}"}
    tables: dict[str, list[int]] = {}
    answers = serve(llm, {"A": Ask(READ), "B": Ask(CLASS)}, lambda: tables.update(block_tables_of(llm)))
    return {**seen, **{f"blocks of {name}": table for name, table in tables.items()}, **texts(answers)}


def full_house() -> Seen:
    """Send requests of two blocks each to a pool that has room for four of them."""
    llm = engine(num_gpu_blocks_override=9, max_model_len=96, block_size=16)
    scheduler = core_of(llm).scheduler
    running, held = [0], [0]

    def look() -> None:
        running.append(len(scheduler.running))
        held.append(len(block_tables_of(llm).get("request 0", ())))

    serve(llm, {f"request {number}": Ask(prompt_of(number, 17), 16) for number in range(6)}, look)
    counts = {"requests at once": max(running), "blocks of a request of 32 slots": max(held)}
    return {**counts, "preemptions": scheduler.num_preemptions}


# ---- lesson 03: attention ------------------------------------------------------------------------


def triton_kernel() -> Seen:
    """Run a short and a long prompt on the Triton kernel, in its interpreter, and report the texts
    and how likely the prompts are.
    """
    llm = engine()
    core_of(llm).executor.worker.runner.attention.backend = "triton"  # type: ignore[attr-defined]
    params = {"prompt_logprobs": 0}
    asks = {"the short prompt": Ask(ADD, 2, params=params), "the long prompt": Ask(LONGER, 2, params=params)}
    answers = serve(llm, asks)
    return {**texts(answers), **each_answer(answers, "log probability of", lambda answer: answer.prompt_logprob)}


def sliding_window() -> Seen:
    """Answer a short and a long prompt with a random-weight model whose layers see the last 8
    tokens.
    """
    config = json.loads((MODEL / "config.json").read_text())
    window = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**config, **window, "num_hidden_layers": 2}))
        llm = engine(model=folder, load_format="dummy", skip_tokenizer_init=True, attention_backend="naive")
    answers = serve(llm, {"the short prompt": Ask(prompt_of(1, 3), 4), "the long prompt": Ask(prompt_of(2, 30), 8)})
    return each_answer(answers, "tokens of", lambda answer: answer.token_ids)


def naive_attention() -> Seen:
    """Run one long prompt with `attention_backend="naive"`, first whole, then in chunks of 16
    tokens.
    """
    whole = serve(engine(attention_backend="naive"), {"the whole prompt": Ask(LONG, 12)})
    chunked = engine(attention_backend="naive", max_num_batched_tokens=16)
    return {**texts(whole), **texts(serve(chunked, {"the prompt in chunks": Ask(LONG, 12)}))}


# ---- lesson 04: many requests --------------------------------------------------------------------


def burst() -> Seen:
    """Send six prompts at once to an engine with a budget of 32 tokens per step."""
    llm = engine(max_num_batched_tokens=32, max_num_seqs=8, enable_prefix_caching=False)
    steps = recorded_steps(llm)
    serve(llm, {f"request {number}": Ask(prompt_of(number, 20), 4) for number in range(6)})
    return {
        "tokens of the largest step": max(sum(step.num_scheduled_tokens.values()) for step in steps),
        "steps": len(steps),
    }


def four_samples() -> Seen:
    """Draw four samples of one prompt with temperature 1 and a seed."""
    params = {"n": 4, "temperature": 1.0, "seed": 7, "output_kind": RequestOutputKind.FINAL_ONLY}
    answer = serve(engine(), {"A": Ask(CLASS, 12, params=params)})["A"]
    return {"different samples": len(set(answer.samples)), "samples": answer.samples}


def mixed_settings() -> Seen:
    """Run a long prompt, computed in chunks of 16 tokens, beside a greedy request and one with
    temperature 2.
    """
    llm = engine(long_prefill_token_threshold=16, enable_prefix_caching=False)
    hot = {"temperature": 2.0, "seed": 3}
    return texts(
        serve(llm, {"long prompt": Ask(LONGER), "temperature 2": Ask(ADD, 6, params=hot), "greedy": Ask(READ, 8)})
    )


def chunks() -> Seen:
    """Run a prompt of several chunks beside short ones, with a budget of 24 tokens per step."""
    llm = engine(max_num_batched_tokens=24, enable_prefix_caching=False)
    return texts(serve(llm, {"A": Ask(ADD), "the long prompt": Ask(LONGER, 8), "B": Ask(READ)}))


def stop_string() -> Seen:
    """Run a request that a stop string ends long before its 64 tokens."""
    llm = engine()
    answers = serve(llm, {"A": Ask(ADD, 64, params={"stop": ["\n"]})})
    return {**texts(answers), "ended by": answers["A"].finish_reason, **left_over(llm)}


def stop_across_tokens() -> Seen:
    """Run two requests with stop strings: one string is a single token of the answer, the other
    spans several.
    """
    asks = {"one token": Ask(ADD, params={"stop": ["def"]}), "several": Ask(ADD, params={"stop": ["b\n\ndef _"]})}
    answers = serve(engine(), asks)
    return {**texts(answers), **each_answer(answers, "the end of", lambda answer: answer.finish_reason)}


def stream_with_stops() -> Seen:
    """Record a stream with two stop strings, piece by piece."""
    params = {"stop": ["\n\ndef _parse", "}"], "output_kind": RequestOutputKind.DELTA}
    answer = serve(engine(), {"A": Ask(ADD, params=params)})["A"]
    return {"sent": "".join(answer.pieces), "ended by": answer.finish_reason, "pieces": answer.pieces}


def stream_of_characters() -> Seen:
    """Decode a text with accents and Japanese token by token, as in a stream."""
    tokenizer = load_tokenizer(MODEL)
    detokenizer = IncrementalDetokenizer(tokenizer, [], SamplingParams(detokenize=True))
    pieces, num_sent = [], 0
    for token_id in tokenizer.encode("# café, Größe, 日本語 ✓").ids:
        detokenizer.update([token_id])
        pieces.append(detokenizer.text[num_sent:])
        num_sent = len(detokenizer.text)
    detokenizer.finish()
    return {"sent": "".join(pieces) + detokenizer.text[num_sent:]}


# ---- lesson 05: the prefix cache and other levers ------------------------------------------------


def two_tenants() -> Seen:
    """Send the same prompt from one tenant, from another with a different `cache_salt`, and from
    the first again.
    """
    prompt = prompt_of(1, 40)
    asks = {
        "tenant 1": Ask(prompt, 4, salt="one"),
        "tenant 2": Ask(prompt, 4, at=6, salt="two"),
        "tenant 1 again": Ask(prompt, 4, at=12, salt="one"),
    }
    return hits(serve(engine(), asks))


def same_middle() -> Seen:
    """Run three prompts of two blocks; the third combines the first block of one with the second
    block of another.
    """
    first, second = prompt_of(1, 33), prompt_of(2, 33)
    third = [*first[:16], *second[16:]]
    answers = serve(engine(), {"A": Ask(first), "B": Ask(second, at=1), "C": Ask(third, at=20)})
    return {**texts(answers), **hits(answers)}


def prompt_again() -> Seen:
    """Send a prompt of exactly two blocks again, beside another prompt."""
    prompt, other = prompt_of(1, 32), prompt_of(2, 21)
    answers = serve(engine(), {"A": Ask(prompt, 8), "B": Ask(other, 12, at=9), "A again": Ask(prompt, 8, at=12)})
    return {**texts(answers), **hits(answers)}


def evictions() -> Seen:
    """Send a long prompt, let two strangers take some of its blocks, and send it again."""
    prompt = prompt_of(1, 97)
    asks = {"A": Ask(prompt, 2), **{f"stranger {n}": Ask(prompt_of(n, 33), 2, at=4 * n) for n in (2, 3)}}
    llm = engine(num_gpu_blocks_override=11, max_model_len=128)
    return hits(serve(llm, {**asks, "A again": Ask(prompt, 2, at=18)}))


def reset_between() -> Seen:
    """Reset the prefix cache between two rounds of the same requests."""
    llm = engine(num_gpu_blocks_override=9, max_model_len=96)
    asks = {name: Ask(prompt_of(number, 40), 4) for number, name in enumerate("AB")}
    serve(llm, asks)
    done = llm.reset_prefix_cache()
    answers = serve(llm, asks)
    return {"reset": done, **hits(answers), **texts(answers)}


def speculation() -> Seen:
    """Run greedy requests with up to four n-gram drafts per step, on text that repeats itself."""
    llm = drafting()
    answers = serve(llm, {"A": Ask(LOOP, 40), "B": Ask(CLASS, 40)})
    return {**texts(answers), **left_over(llm)}


def int8_cache() -> Seen:
    """Run greedy requests on an int8 cache with a scale for each token and head."""
    return texts(serve(engine(kv_cache_dtype="int8"), {"A": Ask(ADD), "B": Ask(READ), "C": Ask(CLASS)}))


def graphs() -> Seen:
    """Run decode steps as captured graphs, replayed by plain calls; one of four requests ends
    early.
    """
    llm = engine()
    core_of(llm).executor.worker.runner.capture_model(lambda function: function)  # type: ignore[attr-defined]
    asks = {"A": Ask(CLASS, 40), "B": Ask(READ, 40), "C": Ask(LOOP, 40), "D": Ask(ADD, 6)}
    return texts(serve(llm, asks))


def tight_pool() -> Seen:
    """Send a prompt with a long prefix hit again, when another request has nearly filled the pool."""
    llm = engine(num_gpu_blocks_override=11, max_model_len=128)
    prompt = prompt_of(1, 65)
    longer = [*prompt, *prompt_of(3, 30)]
    asks = {"A": Ask(prompt, 2), "B": Ask(prompt_of(2, 60), 30, at=4), "A again": Ask(longer, 2, at=12)}
    answers = serve(llm, asks)
    return {**texts(answers), **hits(answers), **left_over(llm)}


# ---- lesson 06: a server's front end -------------------------------------------------------------


def in_event_loop(work: Callable[[AsyncLLM], Awaitable[Seen]]) -> Seen:
    """Return what `work(engine)` observes in an event loop while the core runs in a thread."""

    async def run() -> Seen:
        args = EngineArgs(model=MODEL, device="cpu", max_model_len=256, num_gpu_blocks_override=65)
        llm = AsyncLLM(args, AsyncThreadClient(args))
        try:
            return await asyncio.wait_for(work(llm), 60)
        finally:
            await asyncio.to_thread(llm.shutdown)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, run()).result()


def deltas(max_tokens: int) -> SamplingParams:
    """Return the sampling parameters of a greedy stream."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


def slow_reader() -> Seen:
    """Send the same prompt from two clients; one reads each piece as it arrives, the other waits
    until all have arrived.
    """

    async def work(llm: AsyncLLM) -> Seen:
        names = ("the fast reader", "the slow reader")
        collectors = {name: await llm.add_request(name, {"prompt": ADD}, deltas(16)) for name in names}
        seen: Seen = {}
        for name, collector in collectors.items():
            text, finished = "", False
            while not finished:
                output = await collector.get()
                text, finished = text + output.outputs[0].text, output.finished
            seen[f"text of {name}"] = text
            while llm.has_unfinished_requests():
                await asyncio.sleep(0.005)
        return seen

    return in_event_loop(work)


def reader_leaves() -> Seen:
    """Let a client leave after two pieces of a 200-token answer, then check whether the pool still
    has blocks in use.
    """

    async def work(llm: AsyncLLM) -> Seen:
        stream = llm.generate({"prompt": ADD}, deltas(200), "A")
        pieces = [await anext(stream) for _ in range(2)]
        await stream.aclose()
        free = await llm.reset_prefix_cache()  # refused while any request holds a block
        return {"pieces read": len(pieces), "all blocks are free": free}

    return in_event_loop(work)


# ---- lesson 07: speculative decoding -------------------------------------------------------------


def drafting(lookup_min: int = 1, lookup_max: int = 2, **settings: Any) -> LLMEngine:
    """Start an engine with up to four n-gram drafts per step, found by suffixes of these lengths."""
    lengths = {"prompt_lookup_min": lookup_min, "prompt_lookup_max": lookup_max}
    return engine(speculative_config={"method": "ngram", "num_speculative_tokens": 4, **lengths}, **settings)


def wasted_drafts() -> Seen:
    """Run one request with drafts found by suffixes of two to four tokens; count the steps and
    their tokens.
    """
    llm = drafting(2, 4)
    steps = recorded_steps(llm)
    answers = serve(llm, {"A": Ask(READ, 60)})
    stats = core_of(llm).scheduler.spec_decoding_stats
    return {
        "steps": len(steps),
        "tokens computed after the prompt": sum(step.total_num_scheduled_tokens for step in steps[1:]),
        "draft tokens": stats.num_draft_tokens,
        "accepted": stats.num_accepted_tokens,
        **texts(answers),
    }


def ends_with_drafts() -> Seen:
    """Run requests for 9 to 14 tokens, with drafts."""
    asks = {f"the request for {count}": Ask(LOOP, count) for count in range(9, 15)}
    answers = serve(drafting(max_num_seqs=8), asks)
    return {**each_answer(answers, "tokens of", lambda answer: len(answer.token_ids)), **texts(answers)}


def seeded_twice() -> Seen:
    """Run three requests with temperature and a seed, on an engine with drafts and on one without."""
    asks = {f"seed {seed}": Ask(LOOP, 24, params={"temperature": 0.6, "seed": seed}) for seed in (1, 2, 3)}
    plain, drafted = serve(engine(), asks), serve(drafting(), asks)
    same = sum(plain[name].token_ids == drafted[name].token_ids for name in asks)
    return {"requests with the same tokens, with drafts and without": same, **texts(drafted)}


def drafts_to_the_end() -> Seen:
    """Let requests with drafts grow to the maximum length that the engine allows."""
    llm = drafting(max_model_len=64)
    assert llm.tokenizer is not None
    loop = [*llm.tokenizer.encode(LOOP).ids] * 3
    asks = {f"the prompt of {count}": Ask(loop[:count], 64 - count) for count in (32, 41, 50)}
    answers = serve(llm, asks)
    return {
        **each_answer(answers, "tokens of", lambda answer: len(answer.token_ids)),
        **texts(answers),
        **left_over(llm),
    }


def ahead_under_pressure() -> Seen:
    """Let requests with drafts outgrow a small pool, while each step is scheduled before the
    previous one has ended.
    """
    llm = drafting(async_scheduling=True, num_gpu_blocks_override=9, max_model_len=96)
    answers = serve(llm, {"A": Ask(READ, 32), "B": Ask(LOOP, 32), "C": Ask(ADD, 40)})
    return {**texts(answers), "preemptions": core_of(llm).scheduler.num_preemptions > 0, **left_over(llm)}


# ---- lesson 08: keys and values from elsewhere ---------------------------------------------------


@dataclass
class Orders(KVConnectorMetadata):
    """Blocks to fill with a prompt's keys and values and the name of their parcel, by request id."""

    loads: dict[str, tuple[list[int], str]]


class Courier(KVConnectorBase_V1):
    """Both sides of a connector that delivers keys and values `STEPS` steps after they were
    ordered.

    In `kv_transfer_params` a request names the parcel that holds its prompt's keys and values. A
    parcel has the prompt's blocks for each tensor of the cache. An order cannot be cancelled.
    """

    STEPS = 4

    def __init__(self, parcels: Mapping[str, list[torch.Tensor]], config: Any, role: KVConnectorRole) -> None:
        super().__init__(config, role)
        self.parcels, self.orders = parcels, Orders({})
        self.tensors: list[torch.Tensor] = []
        self.steps_left: dict[str, int] = {}
        self.loads: dict[str, tuple[list[int], str]] = {}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Offer the whole prompt, if there is a parcel and nothing is computed yet."""
        fits = request.kv_transfer_params is not None and num_computed_tokens == 0
        return (request.num_prompt_tokens, True) if fits else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Order the parcel."""
        if num_external_tokens and request.kv_transfer_params:
            table = [block.block_id for block in blocks][: -(-num_external_tokens // self.config.block_size)]
            self.orders.loads[request.request_id] = table, request.kv_transfer_params["parcel"]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the orders since the last step."""
        orders, self.orders = self.orders, Orders({})
        return orders

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Keep the cache's tensors."""
        self.tensors = [tensor for layer in kv_caches.values() for tensor in layer]

    def start_load_kv(self) -> None:
        """Bring each parcel one step nearer."""
        assert isinstance(self._connector_metadata, Orders)
        self.loads |= self._connector_metadata.loads
        self.steps_left |= dict.fromkeys(self._connector_metadata.loads, self.STEPS)
        self.steps_left = {name: left - 1 for name, left in self.steps_left.items()}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Unpack the parcels that arrive in this step into their blocks."""
        arrived = {name for name, left in self.steps_left.items() if left == 0}
        for name in arrived:
            del self.steps_left[name]
            table, parcel = self.loads.pop(name)
            for tensor, blocks in zip(self.tensors, self.parcels[parcel], strict=True):
                tensor[table] = blocks
        return set(), arrived

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no parcel arrives within a step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any) -> None:
        """Do nothing: nothing is sent."""

    def wait_for_save(self) -> None:
        """Do nothing: nothing is sent."""


def receiving(prompt: list[int], **settings: Any) -> LLMEngine:
    """Start an engine, and a parcel of a prompt's keys and values that another engine has computed
    for it.
    """
    sender = engine()
    table: list[int] = []
    serve(sender, {"A": Ask(prompt, 2)}, lambda: table.extend(block_tables_of(sender).get("A", ())))
    caches = core_of(sender).executor.worker.runner.named_kv_caches()  # type: ignore[attr-defined]
    blocks = table[: -(-len(prompt) // 16)]
    parcel = [tensor[blocks] for layer in caches.values() for tensor in layer]
    transfer = {"kv_connector": "ExampleConnector", "kv_load_failure_policy": "recompute"}
    parts = Parts(kv_connector=partial(Courier, {"prompt": parcel}))
    return engine(parts=parts, kv_transfer_config=transfer, **settings)


BY_COURIER = {"extra_args": {"kv_transfer_params": {"parcel": "prompt"}}}


def same_prompt_meanwhile() -> Seen:
    """Send the same prompt again while its keys and values are on their way from another engine."""
    prompt = prompt_of(1, 40)
    llm = receiving(prompt)
    answers = serve(llm, {"A": Ask(prompt, 6, params=BY_COURIER), "B": Ask(prompt, 6, at=1)})
    return {**texts(answers), **hits(answers), **left_over(llm)}


def gone_before_it_came() -> Seen:
    """Let a client leave while its prompt's keys and values are on their way; two strangers arrive
    and fill the pool.
    """
    prompt = prompt_of(1, 64)
    llm = receiving(prompt, num_gpu_blocks_override=9, max_model_len=64)
    steps = [0]

    def leave() -> None:
        steps[0] += 1
        if steps[0] == 2:
            llm.abort_request(["A"])

    strangers = {f"stranger {number}": Ask(prompt_of(number, 44), 12, at=2) for number in (2, 3)}
    answers = serve(llm, {"A": Ask(prompt[:-1], 1, params=BY_COURIER), **strangers}, leave)
    del answers["A"]
    return {**texts(answers), **left_over(llm)}


def shared_folder() -> Seen:
    """Let one engine save the keys and values of two prompts in a folder, and another engine find
    them there.
    """
    asks = {f"the prompt of {length}": Ask(prompt_of(length, length), 6) for length in (32, 37)}
    with tempfile.TemporaryDirectory() as folder:
        extra = {"shared_storage_path": folder}
        transfer = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra}
        serve(engine(kv_transfer_config=transfer), asks)
        llm = engine(kv_transfer_config=transfer)
        answers = serve(llm, asks)
    return {**texts(answers), **hits(answers), **left_over(llm)}


# ---- lesson 09: heads that share -----------------------------------------------------------------


def fewer_heads_than_gpus() -> Seen:
    """Count the tokens that 1 GiB of each GPU holds, for a model with 4 KV heads on more and more
    GPUs.
    """
    config = ModelConfig(
        num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4, head_dim=64, dtype="float16"
    )
    return {f"tokens of 1 GiB each, GPUs: {tp}": int(kv_cache_tokens(2**30, config, tp=tp)) for tp in (1, 2, 4, 8, 16)}


def groups_on_triton() -> Seen:
    """Run prompts of 20 and 40 tokens on the Triton kernel, in groups of two and three, and list
    the wrong rows.
    """
    seen: Seen = {}
    for length, group in ((20, 2), (40, 2), (20, 3), (40, 3)):
        torch.manual_seed(length)
        q, caches = torch.randn(length, 2 * group, 16), torch.randn(2, 3, 16, 2, 16)
        starts, lengths = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, length], [length]))
        arguments = q, *caches, starts, lengths, torch.tensor([[2, 0, 1]], dtype=torch.int32), 0.25
        result, right = (unified_attention(*arguments, backend=name) for name in ("triton", "naive"))
        wrong = ((result - right).abs() > 1e-4).flatten(1).any(dim=1).nonzero().flatten()
        seen[f"wrong of {length} tokens, groups of {group}"] = wrong.tolist()
    return seen


# ---- lesson 10: prompts in pieces ----------------------------------------------------------------


def short_behind_long() -> Seen:
    """Send a prompt of 120 tokens together with one of 10; a step has 32 tokens, at most 16 of them
    for one request.
    """
    sizes = {"max_num_batched_tokens": 32, "long_prefill_token_threshold": 16, "enable_prefix_caching": False}
    asks = {"the long prompt": Ask(prompt_of(1, 120), 2), "the short one": Ask(prompt_of(2, 10), 4)}
    return _steps_of_tokens(engine(**sizes), asks)


def whole_or_cut() -> Seen:
    """Send a prompt of 254 tokens while three chats run; chunked prefill is off, the threshold is
    64, a step has 256 tokens.
    """
    sizes = {"max_num_batched_tokens": 256, "long_prefill_token_threshold": 64, "enable_prefix_caching": False}
    chats = {f"chat {number}": Ask(prompt_of(number, 10), 30) for number in range(3)}
    llm = engine(enable_chunked_prefill=False, **sizes)
    return _steps_of_tokens(llm, {**chats, "the long prompt": Ask(prompt_of(9, 254), 2, at=2)})


def _steps_of_tokens(llm: LLMEngine, asks: Mapping[str, Ask]) -> Seen:
    """Return the steps after which each request had its first token and its last one."""
    steps = recorded_steps(llm)
    answers = serve(llm, asks)
    seen: Seen = {} if answers.raised is None else {"raised": answers.raised}
    for name, ask in asks.items():
        computed, token_steps = 0, []
        for number, step in enumerate(steps, start=1):
            scheduled = {inner.rpartition("-")[0]: count for inner, count in step.num_scheduled_tokens.items()}
            computed += scheduled.get(name, 0)
            if name in scheduled and computed >= len(ask.prompt):
                token_steps.append(number)
        if token_steps:
            seen[f"steps to the first and the last token of {name}"] = f"{token_steps[0]}, {token_steps[-1]}"
    return seen


# ---- lesson 11: memory that runs out -------------------------------------------------------------


def by_priority() -> Seen:
    """Send four requests, one after another, to 12 blocks of 4 slots, by priority; blocks run out
    again and again.
    """
    return _tight_steps("priority", 13, {"a": (9, 14, 3), "b": (11, 12, 0), "c": (9, 14, 2), "d": (10, 13, 1)})


def in_turn() -> Seen:
    """Send four requests, then three short ones, to 12 blocks of 4 slots, first come, first served."""
    asks = dict.fromkeys("abcd", (9, 14, 0)) | {f"short {number}": (6, 2, 0) for number in range(3)}
    return _tight_steps("fcfs", 13, asks)


def _tight_steps(policy: str, num_blocks: int, asks: Mapping[str, tuple[int, int, int]]) -> Seen:
    """Return when each request (prompt, answer, priority) ended, how often it was preempted, and
    the steps that gave a running request no token.
    """
    limits = SchedulerConfig(max_model_len=24, max_num_batched_tokens=32, max_num_seqs=8, policy=policy)
    pool = CacheConfig(num_gpu_blocks=num_blocks, block_size=4, enable_prefix_caching=False)
    scheduler, ends, preempted, idle = Scheduler(limits, pool), {}, dict.fromkeys(asks, 0), dict.fromkeys(asks, 0)
    coming = [
        Request(name, [0] * prompt, max_tokens=output, priority=priority, arrival_time=float(at))
        for at, (name, (prompt, output, priority)) in enumerate(asks.items())
    ]
    for number in range(1, MOST_STEPS):
        if coming:
            scheduler.add_request(coming.pop(0))
        step, live = scheduler.schedule(), dict(scheduler.requests)
        for request in scheduler.running:
            idle[request.request_id] += request.request_id not in step.num_scheduled_tokens
        for name in step.preempted_req_ids:
            preempted[name] += 1
        done = [name for name in step.num_scheduled_tokens if live[name].num_computed_tokens == live[name].num_tokens]
        scheduler.update_from_output(step, ModelRunnerOutput({name: [1] for name in done}))
        ends |= {name: number for name in live if name not in scheduler.requests}
        if not coming and not scheduler.has_unfinished_requests():
            break
    seen: Seen = {f"{name} ends in step": ends.get(name, "never") for name in asks}
    seen |= {f"times that {name} is preempted": count for name, count in preempted.items()}
    return seen | {"steps in which a running request got no token": sum(idle.values())}


# ---- lesson 12: adapters -------------------------------------------------------------------------

TOTAL = "def total(items, start):\n    result = start\n    for item in items:\n"


def trained(name: str, number: int, called: str = "") -> LoRARequest:
    """Return one of the adapters beside the model, under its own name or the name `called`."""
    return LoRARequest(called or name, number, str(MODEL.parent / "adapters" / name))


def with_slots(slots: int, **settings: Any) -> LLMEngine:
    """Start an engine with slots of rank 16, and host memory for four adapters."""
    return engine(enable_lora=True, max_loras=slots, max_lora_rank=16, max_cpu_loras=4, **settings)


def one_name_two_folders() -> Seen:
    """Replace a customer's adapter by one of the same name in another folder, and send the same
    prompt again.
    """
    old, new = trained("braces", 1, "customer"), trained("doctest", 2, "customer")
    prompt = "def add(a, b):\n    return a + b\n\n\ndef total(items):"
    asks = {"the old one": Ask(prompt, adapter=old), "the new one": Ask(prompt, adapter=new, at=30)}
    answers = serve(with_slots(2), asks)
    return {**texts(answers), **hits(answers)}


def three_for_two_slots() -> Seen:
    """Send three requests with different adapters together, then one after the other, to an engine
    with two slots.
    """
    adapters = [trained(name, number) for number, name in enumerate(("braces", "doctest", "stubs"), start=1)]
    together = {f"{adapter.lora_name}, together": Ask(TOTAL, adapter=adapter) for adapter in adapters}
    alone = {
        f"{adapter.lora_name}, alone": Ask(TOTAL, adapter=adapter, at=60 + 20 * adapter.lora_int_id)
        for adapter in adapters
    }
    return texts(serve(with_slots(2, enable_prefix_caching=False), {**together, **alone}))


def large_then_small() -> Seen:
    """Send requests that use a rank-8 adapter, then a rank-16 one, then the first again, all in one
    slot.
    """
    small, large = trained("doctest", 1), trained("braces", 2)
    order = (("the small one, first", small, 0), ("the large one", large, 30), ("the small one, again", small, 60))
    asks = {name: Ask(TOTAL, adapter=adapter, at=at) for name, adapter, at in order}
    return texts(serve(with_slots(1, enable_prefix_caching=False), asks))
