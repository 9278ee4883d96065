"""The museum's workloads: each function drives an engine and returns its observations.

A workload imports only the engine (`minivllm`), since it also runs on copies that consist of the
engine alone. It is deterministic: on the sound engine it always returns the same observations. The
first paragraph of its docstring tells the learner what it does.

As a script, the module runs workloads on the `minivllm` that Python finds first, within a limit of
CPU time, and prints their observations as JSON:

    PYTHONPATH=out/bugs/07 python -P vllm/minivllm_lab/museum/workloads.py 60 shared_prompt
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minivllm.config import ModelConfig
from minivllm.core.lora_request import LoRARequest
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import SchedulerOutput
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
    priority: int = 0
    params: dict[str, Any] = field(default_factory=dict)

    def add_to(self, llm: LLMEngine, name: str) -> None:
        """Queue the request; its text is streamed."""
        prompt: dict[str, Any] = {"prompt" if isinstance(self.prompt, str) else "prompt_token_ids": self.prompt}
        if self.salt is not None:
            prompt["cache_salt"] = self.salt
        params = greedy(self.max_tokens, **self.params)
        llm.add_request(name, prompt, params, lora_request=self.adapter, priority=self.priority)  # type: ignore[arg-type]


def greedy(max_tokens: int, **settings: Any) -> SamplingParams:
    """Return the sampling parameters of a greedy stream that does not end by itself."""
    defaults = {"temperature": 0.0, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA}
    return SamplingParams(max_tokens=max_tokens, **{**defaults, **settings})


@dataclass
class Answer:
    """A request's stream so far, and the steps that added to it."""

    texts: dict[int, str] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    prompt_logprob: float | None = None

    def take_in(self, output: RequestOutput, step: int) -> None:
        """Add what a step has brought."""
        self.steps.append(step)
        self.num_cached_tokens = output.num_cached_tokens
        for completion in output.outputs:
            self.texts[completion.index] = self.texts.get(completion.index, "") + completion.text
            self.token_ids += completion.token_ids
            self.finish_reason = completion.finish_reason
        if output.prompt_logprobs:
            logprobs = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry]
            self.prompt_logprob = round(sum(logprobs), 1)

    def seen(self, name: str) -> Seen:
        """Return what a client of the request `name` sees."""
        texts = list(self.texts.values())
        first_and_last = [*self.steps[:1], *self.steps[-1:]]
        return {
            f"text of {name}": (texts[0] if len(texts) == 1 else texts) or self.token_ids,
            f"number of tokens of {name}": len(self.token_ids),
            f"steps of the first and the last token of {name}": first_and_last,
            f"cached tokens of {name}": self.num_cached_tokens,
            f"end of {name}": self.finish_reason,
            f"log probability of {name}": self.prompt_logprob,
        }


def engine(**settings: Any) -> LLMEngine:
    """Start a small engine on the embedded model: 64 blocks of 16 slots, at most 4 requests at
    once.
    """
    defaults = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 4, "num_gpu_blocks_override": 65}
    return LLMEngine(EngineArgs(**{"model": MODEL, **defaults, **settings}))


def core_of(llm: LLMEngine) -> EngineCore:
    """Return the core of an engine in this process."""
    return llm.engine_core.engine_core  # type: ignore[attr-defined]


def scheduler_of(llm: LLMEngine) -> Scheduler:
    """Return the scheduler of an engine in this process."""
    return core_of(llm).scheduler


def serve(llm: LLMEngine, asks: Mapping[str, Ask], after_step: Callable[[], None] = lambda: None) -> Seen:
    """Run all requests until they end, for at most `MOST_STEPS` steps, or until the first error;
    return what their clients see, and what the engine has done and still holds.
    """
    answers = {name: Answer() for name in asks}
    steps = recorded_steps(llm)
    last = max(ask.at for ask in asks.values())
    raised: Seen = {}
    skipped = 0
    try:
        for step in range(MOST_STEPS):
            for name, ask in asks.items():
                if ask.at == step:
                    ask.add_to(llm, name)
            if llm.has_unfinished_requests():
                for output in llm.step():
                    answers[output.request_id].take_in(output, step + 1)
                running = [request.request_id for request in scheduler_of(llm).running]
                skipped += sum(name not in steps[-1].num_scheduled_tokens for name in running)
                after_step()
            elif step >= last:
                break
    except Exception as error:
        raised = {"raised": f"{type(error).__name__}: {error}"}
    seen_by_clients = [answer.seen(name) for name, answer in answers.items()]
    work = {"times that a running request was skipped": skipped, **work_of(llm, steps)}
    return {key: value for seen in (raised, *seen_by_clients, work) for key, value in seen.items()}


def work_of(llm: LLMEngine, steps: list[SchedulerOutput]) -> Seen:
    """Return what the engine has done in these steps, and what it still holds."""
    scheduler = scheduler_of(llm)
    pool, drafts = scheduler.kv_cache_manager.block_pool, scheduler.spec_decoding_stats
    return {
        "steps": len(steps),
        "tokens computed": sum(step.total_num_scheduled_tokens for step in steps),
        "tokens of the largest step": max((step.total_num_scheduled_tokens for step in steps), default=0),
        "requests at once": max((len(step.num_scheduled_tokens) for step in steps), default=0),
        "draft tokens": drafts.num_draft_tokens,
        "accepted draft tokens": drafts.num_accepted_tokens,
        "preemptions": scheduler.num_preemptions,
        "requests still running": len(scheduler.running),
        "requests still waiting": len(scheduler.waiting),
        "blocks still held": pool.num_usable_blocks - pool.get_num_free_blocks(),
    }


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


def block_tables_of(llm: LLMEngine) -> dict[str, list[int]]:
    """Return the block tables by request name; the core's own ids are that name, "-" and a number."""
    manager = scheduler_of(llm).kv_cache_manager
    return {inner.rpartition("-")[0]: manager.get_block_ids(inner) for inner in manager.req_to_blocks}


def prompt_of(number: int, length: int) -> list[int]:
    """Return a prompt of `length` token ids that shares no block with the prompts of other numbers."""
    return [(37 * number + 11 * position + position * position) % 4000 + 5 for position in range(length)]


# ---- lesson 01: one request, token by token ------------------------------------------------------


def one_request() -> Seen:
    """Run one greedy request alone on the engine."""
    return serve(engine(), {"A": Ask(ADD, 12)})


def three_lengths() -> Seen:
    """Start three greedy requests of different lengths together."""
    return serve(engine(), {"A": Ask(ADD, 7), "B": Ask(READ, 12), "C": Ask(CLASS)})


def cache_ledger() -> Seen:
    """Compare the ledger's bytes per token with the tensors that the engine allocates."""
    config, seen = ModelConfig.from_pretrained(MODEL), Seen()
    for dtype in ("auto", "int8"):
        caches = allocate_kv_caches(config, 8, 16, torch.device("cpu"), torch.bfloat16, dtype)
        parts = [part for cache in caches for part in cache if part is not None]
        seen[f"bytes of a token, {dtype}: in the tensors"] = sum(part.nbytes for part in parts) // (8 * 16)
        seen[f"bytes of a token, {dtype}: in the ledger"] = kv_bytes_per_token(config, dtype)
    return {**seen, "blocks of 64 MiB, by the ledger": kv_cache_tokens(64 * 2**20, config) // 16}


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
        of_strangers = {block for name in strangers for block in tables.get(name, ())}
        shared.update(of_strangers.intersection(tables.get("B", ())))

    seen = serve(llm, {**asks, **strangers}, look)
    return {"blocks of B that a stranger held at the same time": sorted(shared), **seen}


def preemption() -> Seen:
    """Let three requests outgrow a pool of eight blocks: the last one loses its blocks and runs
    again later.
    """
    llm = engine(num_gpu_blocks_override=9, max_model_len=96)
    return serve(llm, {"A": Ask(READ, 32), "B": Ask(LOOP, 32), "C": Ask(ADD, 40)})


def rows_reused() -> Seen:
    """Run five requests of different lengths on an engine that runs two at once."""
    prompts = {"A": LONG, "B": ADD, "C": CLASS, "D": READ, "E": LOOP}
    llm = engine(max_num_seqs=2, enable_prefix_caching=False)
    return serve(llm, {name: Ask(prompt) for name, prompt in prompts.items()})


def many_short_requests() -> Seen:
    """Run ten short requests, one after the other, on an engine that runs four at once."""
    return serve(engine(), {f"request {number}": Ask(ADD, 2, at=3 * number) for number in range(10)})


def block_tables() -> Seen:
    """Inspect the pool before the first request, then run two requests."""
    llm = engine(num_gpu_blocks_override=9, max_model_len=96)
    usage = {"usage before the first request": f"{scheduler_of(llm).kv_cache_manager.usage:.1%}"}
    return usage | serve(llm, {"A": Ask(READ), "B": Ask(CLASS)})


def full_house() -> Seen:
    """Send requests of two blocks each to a pool that has room for four of them."""
    llm = engine(num_gpu_blocks_override=9, max_model_len=96, block_size=16)
    return serve(llm, {f"request {number}": Ask(prompt_of(number, 17), 16) for number in range(6)})


# ---- lesson 03: attention ------------------------------------------------------------------------


def triton_kernel() -> Seen:
    """Run a short and a long prompt on the Triton kernel, in its interpreter, and report the texts
    and how likely the prompts are.
    """
    llm = engine()
    core_of(llm).executor.worker.runner.attention.backend = "triton"  # type: ignore[attr-defined]
    params = {"prompt_logprobs": 0}
    return serve(
        llm, {"the short prompt": Ask(ADD, 2, params=params), "the long prompt": Ask(LONG + LOOP, 2, params=params)}
    )


def sliding_window() -> Seen:
    """Answer a short and a long prompt with a random-weight model whose layers see the last 8
    tokens.
    """
    config = json.loads((MODEL / "config.json").read_text())
    window = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**config, **window, "num_hidden_layers": 2}))
        llm = engine(model=folder, load_format="dummy", skip_tokenizer_init=True, attention_backend="naive")
    return serve(llm, {"the short prompt": Ask(prompt_of(1, 3), 4), "the long prompt": Ask(prompt_of(2, 30), 4)})


def naive_attention() -> Seen:
    """Run one long prompt with `attention_backend="naive"`, first whole, then in chunks of 16
    tokens.
    """
    whole = serve(engine(attention_backend="naive"), {"the whole prompt": Ask(LONG, 12)})
    chunked = engine(attention_backend="naive", max_num_batched_tokens=16)
    return whole | serve(chunked, {"the prompt in chunks": Ask(LONG, 12)})


# ---- lesson 04: many requests --------------------------------------------------------------------


def burst() -> Seen:
    """Send six prompts at once to an engine with a budget of 32 tokens per step."""
    llm = engine(max_num_batched_tokens=32, max_num_seqs=8, enable_prefix_caching=False)
    return serve(llm, {f"request {number}": Ask(prompt_of(number, 20), 4) for number in range(6)})


def four_samples() -> Seen:
    """Draw four samples of one prompt with temperature 1 and a seed."""
    return serve(engine(), {"A": Ask(CLASS, 12, params={"n": 4, "temperature": 1.0, "seed": 7})})


def mixed_settings() -> Seen:
    """Run a long prompt, computed in chunks of 16 tokens, beside a greedy request and one with
    temperature 2.
    """
    llm = engine(long_prefill_token_threshold=16, enable_prefix_caching=False)
    hot = Ask(ADD, 6, params={"temperature": 2.0, "seed": 3})
    return serve(llm, {"long prompt": Ask(LONGER), "temperature 2": hot, "greedy": Ask(READ, 8)})


def chunks() -> Seen:
    """Run a prompt of several chunks beside short ones, with a budget of 24 tokens per step."""
    llm = engine(max_num_batched_tokens=24, enable_prefix_caching=False)
    return serve(llm, {"A": Ask(ADD), "the long prompt": Ask(LONGER, 8), "B": Ask(READ)})


def stop_string() -> Seen:
    """Run a request that a stop string ends long before its 64 tokens."""
    return serve(engine(), {"A": Ask(ADD, 64, params={"stop": ["\n"]})})


def stop_across_tokens() -> Seen:
    """Run two requests with stop strings: one string is a single token of the answer, the other
    spans several.
    """
    asks = {"one token": Ask(ADD, params={"stop": ["def"]}), "several": Ask(ADD, params={"stop": ["b\n\ndef _"]})}
    return serve(engine(), asks)


def stream_with_stops() -> Seen:
    """Stream an answer with two stop strings."""
    return serve(engine(), {"A": Ask(ADD, params={"stop": ["\n\ndef _parse", "}"]})})


def stream_of_characters() -> Seen:
    """Decode a text with accents and Japanese token by token, as in a stream."""
    tokenizer = load_tokenizer(MODEL)
    detokenizer = IncrementalDetokenizer(tokenizer, [], SamplingParams(detokenize=True))
    sent = ""
    for token_id in tokenizer.encode("# café, Größe, 日本語 ✓").ids:
        detokenizer.update([token_id])
        sent += detokenizer.text[len(sent) :]
    detokenizer.finish()
    return {"sent": sent + detokenizer.text[len(sent) :]}


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
    return serve(engine(), asks)


def same_middle() -> Seen:
    """Run three prompts of two blocks; the third combines the first block of one with the second
    block of another.
    """
    first, second = prompt_of(1, 33), prompt_of(2, 33)
    third = [*first[:16], *second[16:]]
    return serve(engine(), {"A": Ask(first), "B": Ask(second, at=1), "C": Ask(third, at=20)})


def prompt_again() -> Seen:
    """Send a prompt of exactly two blocks again, beside another prompt."""
    prompt, other = prompt_of(1, 32), prompt_of(2, 21)
    return serve(engine(), {"A": Ask(prompt, 8), "B": Ask(other, 12, at=9), "A again": Ask(prompt, 8, at=12)})


def evictions() -> Seen:
    """Send a long prompt, let two strangers take some of its blocks, and send it again."""
    prompt = prompt_of(1, 97)
    strangers = {f"stranger {number}": Ask(prompt_of(number, 33), 2, at=4 * number) for number in (2, 3)}
    llm = engine(num_gpu_blocks_override=11, max_model_len=128)
    return serve(llm, {"A": Ask(prompt, 2), **strangers, "A again": Ask(prompt, 2, at=18)})


def reset_between() -> Seen:
    """Reset the prefix cache between two rounds of the same requests."""
    llm = engine(num_gpu_blocks_override=9, max_model_len=96)
    asks = {name: Ask(prompt_of(number, 40), 4) for number, name in enumerate("AB")}
    serve(llm, asks)
    return {"reset": llm.reset_prefix_cache(), **serve(llm, asks)}


def speculation() -> Seen:
    """Run greedy requests with up to four n-gram drafts per step, on text that repeats itself."""
    return serve(drafting(), {"A": Ask(LOOP, 40), "B": Ask(CLASS, 40)})


def int8_cache() -> Seen:
    """Run greedy requests on an int8 cache with a scale for each token and head."""
    return serve(engine(kv_cache_dtype="int8"), {"A": Ask(ADD), "B": Ask(READ), "C": Ask(CLASS)})


def graphs() -> Seen:
    """Run decode steps as captured graphs, replayed by plain calls; one of four requests ends
    early.
    """
    llm = engine()
    runner = core_of(llm).executor.worker.runner  # type: ignore[attr-defined]
    runner.cuda_graphs.capture(lambda function: function, runner.model, runner.attention, runner.settings, runner.lora)
    return serve(llm, {"A": Ask(CLASS, 40), "B": Ask(READ, 40), "C": Ask(LOOP, 40), "D": Ask(ADD, 6)})


def tight_pool() -> Seen:
    """Send a prompt with a long prefix hit again, when another request has nearly filled the pool."""
    llm = engine(num_gpu_blocks_override=11, max_model_len=128)
    prompt = prompt_of(1, 65)
    longer = [*prompt, *prompt_of(3, 30)]
    return serve(llm, {"A": Ask(prompt, 2), "B": Ask(prompt_of(2, 60), 30, at=4), "A again": Ask(longer, 2, at=12)})


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


def slow_reader() -> Seen:
    """Send the same prompt from two clients; one reads each piece as it arrives, the other waits
    until all have arrived.
    """

    async def work(llm: AsyncLLM) -> Seen:
        names = ("the fast reader", "the slow reader")
        collectors = {name: await llm.add_request(name, {"prompt": ADD}, greedy(16)) for name in names}
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
        stream = llm.generate({"prompt": ADD}, greedy(200), "A")
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
    return serve(drafting(2, 4), {"A": Ask(READ, 60)})


def ends_with_drafts() -> Seen:
    """Run requests for 9 to 14 tokens, with drafts."""
    return serve(drafting(max_num_seqs=8), {f"the request for {count}": Ask(LOOP, count) for count in range(9, 15)})


def seeded_twice() -> Seen:
    """Run three requests with temperature and a seed, on an engine with drafts and on one without."""
    asks = {f"seed {seed}": Ask(LOOP, 24, params={"temperature": 0.6, "seed": seed}) for seed in (1, 2, 3)}
    plain = serve(engine(), {f"{name}, no drafts": ask for name, ask in asks.items()})
    return plain | serve(drafting(), {f"{name}, drafts": ask for name, ask in asks.items()})


def drafts_to_the_end() -> Seen:
    """Let requests with drafts grow to the maximum length that the engine allows."""
    llm = drafting(max_model_len=64)
    assert llm.tokenizer is not None
    loop = [*llm.tokenizer.encode(LOOP).ids] * 3
    return serve(llm, {f"the prompt of {count}": Ask(loop[:count], 64 - count) for count in (32, 41, 50)})


def ahead_under_pressure() -> Seen:
    """Let requests with drafts outgrow a small pool, while each step is scheduled before the
    previous one has ended.
    """
    llm = drafting(async_scheduling=True, num_gpu_blocks_override=9, max_model_len=96)
    seen = serve(llm, {"A": Ask(READ, 32), "B": Ask(LOOP, 32), "C": Ask(ADD, 40)})
    # How the steps are cut depends on how fast each of them ends.
    return {
        name: value for name, value in seen.items() if name.startswith(("raised", "text", "number", "end", "blocks"))
    }


# ---- lesson 08: keys and values from elsewhere ---------------------------------------------------


def shared_folder() -> Seen:
    """Let one engine save the keys and values of two prompts in a folder, and another engine find
    them there.
    """
    asks = {f"the prompt of {length}": Ask(prompt_of(length, length), 6) for length in (32, 37)}
    with tempfile.TemporaryDirectory() as folder:
        extra = {"shared_storage_path": folder}
        transfer = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra}
        serve(engine(kv_transfer_config=transfer), asks)
        return serve(engine(kv_transfer_config=transfer), asks)


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
    llm = engine(max_num_batched_tokens=32, long_prefill_token_threshold=16, enable_prefix_caching=False)
    return serve(llm, {"the long prompt": Ask(prompt_of(1, 120), 2), "the short one": Ask(prompt_of(2, 10), 4)})


def whole_or_cut() -> Seen:
    """Send a prompt of 254 tokens while three chats run; chunked prefill is off, the threshold is
    64, a step has 256 tokens.
    """
    llm = engine(
        enable_chunked_prefill=False, max_num_batched_tokens=256, long_prefill_token_threshold=64,
        enable_prefix_caching=False,
    )  # fmt: skip
    chats = {f"chat {number}": Ask(prompt_of(number, 10), 30) for number in range(3)}
    return serve(llm, {**chats, "the long prompt": Ask(prompt_of(9, 254), 2, at=2)})


# ---- lesson 11: memory that runs out -------------------------------------------------------------


def twelve_small_blocks(policy: str) -> LLMEngine:
    """Start an engine with 12 blocks of 4 slots."""
    return engine(
        scheduling_policy=policy, block_size=4, num_gpu_blocks_override=13, max_model_len=24, max_num_seqs=8,
        max_num_batched_tokens=32, enable_prefix_caching=False,
    )  # fmt: skip


def by_priority() -> Seen:
    """Send four requests, one after another, to 12 blocks of 4 slots, by priority; blocks run out
    again and again.
    """
    asks = {"a": (9, 14, 3), "b": (11, 12, 0), "c": (9, 14, 2), "d": (10, 13, 1)}
    return serve(
        twelve_small_blocks("priority"),
        {
            name: Ask(prompt_of(at, prompt), output, at, priority=priority)
            for at, (name, (prompt, output, priority)) in enumerate(asks.items())
        },
    )


def in_turn() -> Seen:
    """Send four requests, then three short ones, to 12 blocks of 4 slots, first come, first served."""
    asks = {name: Ask(prompt_of(at, 9), 14, at) for at, name in enumerate("abcd")}
    asks |= {f"short {number}": Ask(prompt_of(4 + number, 6), 2, 4 + number) for number in range(3)}
    return serve(twelve_small_blocks("fcfs"), asks)


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
    return serve(
        with_slots(2), {"the old one": Ask(prompt, adapter=old), "the new one": Ask(prompt, adapter=new, at=30)}
    )


def three_for_two_slots() -> Seen:
    """Send three requests with different adapters together, then one after the other, to an engine
    with two slots.
    """
    asks = {}
    for number, name in enumerate(("braces", "doctest", "stubs"), start=1):
        adapter = trained(name, number)
        asks[f"{name}, together"] = Ask(TOTAL, adapter=adapter)
        asks[f"{name}, alone"] = Ask(TOTAL, adapter=adapter, at=60 + 20 * number)
    return serve(with_slots(2, enable_prefix_caching=False), asks)


def large_then_small() -> Seen:
    """Send requests that use a rank-8 adapter, then a rank-16 one, then the first again, all in one
    slot.
    """
    small, large = trained("doctest", 1), trained("braces", 2)
    order = (("the small one, first", small, 0), ("the large one", large, 30), ("the small one, again", small, 60))
    asks = {name: Ask(TOTAL, adapter=adapter, at=at) for name, adapter, at in order}
    return serve(with_slots(1, enable_prefix_caching=False), asks)


# ---- as a script ---------------------------------------------------------------------------------


def observe(name: str) -> Seen:
    """Return a workload's observations, or only the error if it fails."""
    try:
        return globals()[name]()
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"}


def main(seconds: int, names: list[str]) -> None:
    """Print these workloads' observations as the last line; the operating system kills the process
    after `seconds` of CPU time.
    """
    import resource  # not on Windows, where the rest of the museum works

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    torch.set_num_threads(1)
    print(json.dumps({name: observe(name) for name in names}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
