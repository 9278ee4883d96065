"""The gain of each optimization, from a switch per lever, the engine's own scheduler, and a cost
per step. *Modelled*.

`throughput(levers, model, gpu, workload)` runs the workload to completion. The scheduler and the
block pool are the real ones; a lever changes their settings (batching, chunks, block size, pool),
the model (GQA, dtypes), or the cost of a step (kernels, graphs, GPUs). All requests are present at
the start, so the figure is offline throughput.

With everything off, the server is the simplest one to write: each step recomputes whole contexts in
16 bits, with a KV head for every query head, in batches that no request can join. `LADDER` switches
on one lever after another, in the order in which folklore ranks them.

Each constant below comes from one published measurement, cited beside it; `KNOWN_ERROR` is the
model's error on others. The model leaves out sampling, drafting, the tokenizer and a drop in clock
under load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from minivllm.config import CacheConfig, DraftingConfig, ModelConfig, SchedulerConfig
from minivllm.memory import MemoryLedger, serving_dtype
from minivllm_simulate.cost_model import RooflineCost, StepShape
from minivllm_simulate.hardware import Hardware
from minivllm_simulate.memory import memory_ledger, parameter_groups, rotary_table_bytes, routed_parameters
from minivllm_simulate.offline import OfflineRun, run_offline
from minivllm_simulate.virtual_clock import SimulatedRequest
from minivllm_simulate.workloads import WORKLOADS, RequestLengths

BLOCK_SIZE, TOKEN_BUDGET = 16, 8192

EAGER_LAYER_SECONDS = (1 / 207.7 - 1 / 766.6) / 12
"""Host time to launch one layer's kernels: 0.29 ms. deepspeedai/DeepSpeed#8352: vLLM, GPT-2 (12
layers), batch 1, on an H200: 207.7 tokens/s eager, 766.6 with graphs. A step is then as long as the
slower of host and device.
"""
LARGEST_GRAPH = 512
"""Tokens of the largest step that is captured; vLLM's default. Larger steps run eager, hidden
behind their own work.
"""

ALL_REDUCE_SECONDS = 1e-5
"""The time of one all-reduce beyond its bytes. It puts Llama-2-7B on 2, 4 and 8 A100 at the scaling that
gpt-fast's README gives (1.61, 2.42 and 3.13 times one GPU) within 4 %.
"""

WEIGHT_BYTES = {16: 2.0, 8: 1.0, 4: 0.5 + 2 / 128}
"""The size of one weight by its bits: 4 bits share a 16-bit scale among 128; a scale for each row of
int8 weighs nothing.
"""
READ_RATE = {16: 1.0, 8: 1069.20 / 1397.31, 4: 862.69 / 1397.31}
"""Bandwidth that weight-only kernels reach, against 16 bits: gpt-fast's README, Llama-2-7B on an
A100.
"""
MATMUL_RATE = {16: 1.0, 8: 7120 / 10338, 4: 9612 / 10338}
"""Rate of matrix products whose weights are dequantized on the way, where arithmetic is the limit.
End to end, Qwen3-8B on an A100, 1000 ShareGPT prompts (gpustack's documentation, impact of
quantization): GPTQ int8 and AWQ against bf16.
"""

DECODE_ERROR, KNOWN_ERROR = "median error 8 %", "median error 8 to 18 %"
"""The model's error on decodes, and on decodes and prefills of a thousand tokens and more: the median of
|modelled − measured| / measured over published figures that calibrate nothing, as `tools/lever_checks.py`
computes it. Print one of them beside every prediction.
"""


@dataclass(frozen=True, kw_only=True)
class Levers:
    """A server's optimizations, each off until it is switched on.

    - `kv_cache`: off, every step computes whole contexts again, and as many requests run as have
      contexts of `max_model_len` that fit into the token budget.
    - `paging`: off, each request reserves one block of `max_model_len` tokens.
    - `continuous_batching`: off, requests are admitted into an empty batch only.
    - `flash_attention`: off, keys and values are gathered from their blocks and scores stored in
      device memory.
    - `gqa`: off, the model has as many key-value heads as query heads.
    - `chunked_prefill`: off, a prompt waits until it fits into what is left of a step's budget.
    - `prefix_caching`: needs `kv_cache` and `paging`; without them it finds nothing.
    - `kv_dtype`: "auto" is 16 bits; "int8" or "fp8" halve the cache. Arithmetic stays in 16 bits.
    - `weight_bits`: 16, 8 or 4, of the linear layers; embedding, norms and head stay in 16.
      Weight-only.
    - `speculative_tokens`: drafts per request and step, at no cost (n-gram lookup), verified
      exactly.
    - `tensor_parallel`: equal GPUs that share the model. The figure is of all of them together.
    - `cuda_graphs`: off, the host launches every kernel of every step.
    """

    kv_cache: bool = False
    paging: bool = False
    continuous_batching: bool = False
    flash_attention: bool = False
    gqa: bool = False
    chunked_prefill: bool = False
    prefix_caching: bool = False
    kv_dtype: str = "auto"
    weight_bits: int = 16
    speculative_tokens: int = 0
    tensor_parallel: int = 1
    cuda_graphs: bool = False


SERVING = Levers(
    kv_cache=True, paging=True, continuous_batching=True, flash_attention=True, gqa=True, chunked_prefill=True,
    cuda_graphs=True,
)  # fmt: skip
"""The levers that every serving engine has."""


class Lever(NamedTuple):
    """A rung of the ladder: a field of `Levers` and the value that switches it on."""

    field: str
    title: str
    on: bool | int | str = True

    def pull(self, levers: Levers) -> Levers:
        """Return a copy of the levers with this one on."""
        return replace(levers, **{self.field: self.on})


LADDER = (
    Lever("kv_cache", "KV cache"),
    Lever("paging", "paging"),
    Lever("continuous_batching", "continuous batching"),
    Lever("flash_attention", "flash attention"),
    Lever("gqa", "grouped-query attention"),
    Lever("chunked_prefill", "chunked prefill"),
    Lever("prefix_caching", "prefix caching"),
    Lever("kv_dtype", "8-bit KV cache", "fp8"),
    Lever("weight_bits", "4-bit weights", 4),
    Lever("speculative_tokens", "speculation, 3 drafts", 3),
    Lever("tensor_parallel", "tensor parallel, 2 GPUs", 2),
    Lever("cuda_graphs", "CUDA graphs"),
)
"""The folklore's ranking, without what adds no throughput on one engine (preemption,
disaggregation, LoRA); the KV cache, which the list takes for granted, comes first.
"""


@dataclass(frozen=True, eq=False)
class LeverWorkload:
    """Requests that all arrive at the start, and the server's limits.

    `max_model_len` is what a request may reserve, `max_num_seqs` how many may run at once,
    `acceptance` the chance that a draft is accepted when those before it were.
    """

    name: str
    title: str
    requests: tuple[SimulatedRequest, ...]
    max_model_len: int = 4096
    max_num_seqs: int = 256
    acceptance: float = 0.6

    @cached_property
    def output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(request.output_tokens for request in self.requests)


class LeverResult(NamedTuple):
    """Results of a workload; times are modelled, counts come from the scheduler and the block pool."""

    tokens_per_second: float
    """Output tokens, of all GPUs together."""
    seconds: float
    steps: int
    mean_batch: float
    """Requests in a step."""
    kv_tokens: int
    """Tokens that the KV cache holds, of whomever; 0 without one."""
    slots: int
    """Requests of `max_model_len` tokens that fit: what runs at once at most without paging."""
    computed_tokens: int
    """Tokens that went through the model, prompts, drafts and what is computed again included."""
    prefix_hit_rate: float
    """Share of the prompt tokens that the prefix cache held."""
    preemptions: int
    gpus: int
    inter_token_latency: float
    """Mean seconds between a request's tokens, the first one counted from when the request is
    admitted. A step that accepts drafts gives several. Times `tokens_per_second` it is the mean
    number of requests in the batch.
    """


@dataclass(frozen=True)
class LeverCost:
    """The cost of a step under these levers: linear layers, attention, communication between GPUs,
    or the host's launches.

    The parts run one after the other, each as long as the slower of its bytes and its operations.
    """

    roofline: RooflineCost
    read_rate: float
    matmul_rate: float
    score_bytes_per_pair: int
    """Moved for each (query, key) pair where scores are stored: written, read, written, read."""
    gather_bytes_per_key: int
    """Moved for each key that is first copied out of its block: read and written, in 16 bits."""
    host_seconds: float
    """Host seconds to launch every kernel of a step."""
    graphs: bool
    all_reduces: int
    all_reduce_bytes_per_token: float
    """Bytes that each GPU sends per token in one all-reduce."""
    link: float
    """Bytes per second that a GPU sends to the others."""

    @classmethod
    def of(cls, levers: Levers, model: ModelConfig, gpu: Hardware) -> LeverCost:
        """Return the cost of these levers; `model` is the result of `lever_model`."""
        tp, size = levers.tensor_parallel, WEIGHT_BYTES[levers.weight_bits]
        plain = RooflineCost.of(model, gpu, kv_dtype=levers.kv_dtype, tp=tp)
        roofline = replace(
            plain,
            weight_bytes=lever_weight_bytes(levers, model),
            vision_bytes=size * parameter_groups(model, tp).get("vision", 0),
            expert_bytes=size * routed_parameters(model, tp),
            # Each draft is verified, so each goes through the head as the sampled token does.
            flops_per_request=plain.flops_per_request * (1 + levers.speculative_tokens),
        )
        heads = model.num_attention_heads // tp
        gathers = levers.kv_cache and levers.paging and not levers.flash_attention
        full_width = RooflineCost.of(model, gpu, kv_dtype=serving_dtype(model), tp=tp).kv_bytes_per_token
        return cls(
            roofline=roofline,
            read_rate=READ_RATE[levers.weight_bits],
            matmul_rate=MATMUL_RATE[levers.weight_bits],
            score_bytes_per_pair=0 if levers.flash_attention else 4 * 2 * heads * model.num_hidden_layers,
            gather_bytes_per_key=2 * full_width if gathers else 0,
            host_seconds=model.num_hidden_layers * EAGER_LAYER_SECONDS,
            graphs=levers.cuda_graphs,
            all_reduces=2 * model.num_hidden_layers if tp > 1 else 0,
            all_reduce_bytes_per_token=2 * (tp - 1) / tp * model.hidden_size * 2,
            link=(gpu.nvlink or gpu.pcie) / 2,
        )

    def weight_seconds(self, num_tokens: int) -> float:
        """Return the seconds to read the weights once; of the experts, only those that the tokens
        choose.
        """
        return self.roofline.memory_seconds(self.roofline.weight_bytes_read(num_tokens)) / self.read_rate

    def linear_seconds(self, shape: StepShape) -> float:
        """Return the seconds of the linear layers: the larger of reading the weights and two
        operations per token and weight.
        """
        cost = self.roofline
        computed = cost.flops_per_token * shape.num_tokens + cost.flops_per_request * shape.num_reqs
        return max(self.weight_seconds(shape.num_tokens), cost.arithmetic_seconds(computed) / self.matmul_rate)

    def attention_seconds(self, shape: StepShape) -> float:
        """Return the seconds of attention: the larger of moving keys and any stored scores, and
        four operations per pair and head dimension.
        """
        cost = self.roofline
        moved = cost.kv_bytes_per_token * (shape.num_keys + shape.num_tokens)
        moved += self.score_bytes_per_pair * shape.num_pairs + self.gather_bytes_per_key * shape.num_keys
        return max(cost.memory_seconds(moved), cost.arithmetic_seconds(cost.flops_per_pair * shape.num_pairs))

    def link_seconds(self, shape: StepShape) -> float:
        """Return the seconds of two all-reduces per layer."""
        sent = self.all_reduce_bytes_per_token * shape.num_tokens
        return self.all_reduces * (ALL_REDUCE_SECONDS + sent / self.link) if self.all_reduces else 0.0

    def seconds(self, shape: StepShape) -> float:
        """Return the modelled seconds of one step of this shape."""
        device = self.linear_seconds(shape) + self.attention_seconds(shape) + self.link_seconds(shape)
        launches = 0.0 if self.graphs and shape.num_tokens <= LARGEST_GRAPH else self.host_seconds
        return self.roofline.step_overhead + max(device, launches)


def lever_model(levers: Levers, model: ModelConfig) -> ModelConfig:
    """Return the model itself or, without `gqa`, a variant with a KV head for every query head."""
    return model if levers.gqa else replace(model, num_key_value_heads=model.num_attention_heads)


def lever_weight_bytes(levers: Levers, model: ModelConfig) -> int:
    """Return the bytes of the weights on one GPU, with the linear layers in `weight_bits`."""
    groups = parameter_groups(model, levers.tensor_parallel)
    plain = sum(groups.pop(name) for name in ("embedding", "norm", "head"))
    return round(plain * WEIGHT_BYTES[16] + sum(groups.values()) * WEIGHT_BYTES[levers.weight_bits])


def lever_ledger(levers: Levers, model: ModelConfig, gpu: Hardware, workload: LeverWorkload) -> MemoryLedger:
    """Return the memory use of one GPU under these levers; `model` is the result of `lever_model`.

    Raises:
        MinivllmError: the weights leave no room for one request of `max_model_len` tokens.
    """
    return memory_ledger(
        model, gpu, max_model_len=workload.max_model_len, tp=levers.tensor_parallel, kv_dtype=levers.kv_dtype,
        weights=lever_weight_bytes(levers, model) + rotary_table_bytes(model), block_size=BLOCK_SIZE,
        max_num_batched_tokens=_token_budget(levers, workload), max_num_seqs=workload.max_num_seqs,
        cuda_graphs=None if levers.cuda_graphs else 0, check=levers.kv_cache,
    )  # fmt: skip


def throughput(levers: Levers, model: ModelConfig, gpu: Hardware, workload: LeverWorkload) -> LeverResult:
    """Return a workload's modelled output tokens per second, and the counts that they come from.

    Args:
        levers: what is switched on.
        model: the shape of a model, with GQA if it has it.
        gpu: an entry of the hardware table; `tensor_parallel` such GPUs are used.
        workload: requests that are all present at the start.

    Raises:
        MinivllmError: the model does not fit on the GPU, heads cannot be divided over the GPUs, or
            a request is too long.
    """
    sibling = lever_model(levers, model)
    ledger = lever_ledger(levers, sibling, gpu, workload)
    cost = LeverCost.of(levers, sibling, gpu)
    slots = ledger.usable_blocks * BLOCK_SIZE // workload.max_model_len
    plan = _scheduled(
        workload,
        _scheduler_config(levers, workload),
        _cache_config(levers, ledger, slots, workload),
        levers.kv_cache,
        workload.acceptance if levers.speculative_tokens else 0.0,
    )
    times = [stretch.seconds(cost) for stretch in plan.stretches]
    waited = sum(time * stretch.first.num_reqs for time, stretch in zip(times, plan.stretches, strict=True))
    seconds, prompts = sum(times), sum(request.prompt_tokens for request in workload.requests)
    return LeverResult(
        tokens_per_second=workload.output_tokens / seconds, seconds=seconds, steps=plan.num_steps,
        mean_batch=plan.request_steps / plan.num_steps,
        kv_tokens=ledger.usable_blocks * BLOCK_SIZE if levers.kv_cache else 0, slots=slots if levers.kv_cache else 0,
        computed_tokens=plan.computed_tokens, prefix_hit_rate=plan.prefix_hits / prompts, preemptions=plan.preemptions,
        gpus=levers.tensor_parallel, inter_token_latency=waited / workload.output_tokens,
    )  # fmt: skip


def _token_budget(levers: Levers, workload: LeverWorkload) -> int:
    """Return the token budget of a step; without chunked prefill, the longest prompt must fit into
    one step.
    """
    return TOKEN_BUDGET if levers.chunked_prefill else max(TOKEN_BUDGET, workload.max_model_len)


def _scheduler_config(levers: Levers, workload: LeverWorkload) -> SchedulerConfig:
    budget, seats = _token_budget(levers, workload), workload.max_num_seqs
    if not levers.kv_cache:
        seats = min(seats, max(1, budget // workload.max_model_len))
    return SchedulerConfig(
        max_model_len=workload.max_model_len,
        max_num_seqs=seats,
        # No request joins a static batch later, so the first step must prefill all its requests.
        max_num_batched_tokens=budget if levers.continuous_batching else seats * workload.max_model_len,
        enable_chunked_prefill=levers.chunked_prefill,
        drafting=DraftingConfig(num_speculative_tokens=levers.speculative_tokens),
        static_batching=not levers.continuous_batching,
    )


def _cache_config(levers: Levers, ledger: MemoryLedger, slots: int, workload: LeverWorkload) -> CacheConfig:
    """Return the pool, no larger than the workload could ever use, so that scheduling does not
    depend on the GPU if its memory is ample.
    """
    if not levers.kv_cache or not levers.paging:
        fit = slots if levers.kv_cache else workload.max_num_seqs
        return CacheConfig(
            num_gpu_blocks=1 + min(fit, len(workload.requests)),
            block_size=workload.max_model_len,
            enable_prefix_caching=False,
        )
    longest = (
        request.prompt_tokens + request.output_tokens + levers.speculative_tokens for request in workload.requests
    )
    wanted = sum(-(-length // BLOCK_SIZE) + 1 for length in longest)
    return CacheConfig(
        num_gpu_blocks=1 + min(ledger.usable_blocks, wanted),
        block_size=BLOCK_SIZE,
        enable_prefix_caching=levers.prefix_caching,
    )


@lru_cache(maxsize=512)
def _scheduled(
    workload: LeverWorkload, config: SchedulerConfig, cache: CacheConfig, kv_cache: bool, acceptance: float
) -> OfflineRun:
    shape_of = StepShape.of if kv_cache else StepShape.without_cache
    return run_offline(workload.requests, config, cache, acceptance=acceptance, shape_of=shape_of)


LONGEST_PROMPT, LONGEST_ANSWER = 2048, 1024


def shared_chat(count: int, system_tokens: int = 512, shorter: int = 1) -> LeverWorkload:
    """Return chats with one system prompt, question lengths as in ShareGPT, and answers divided by
    `shorter`.
    """
    system = tuple(range(1, system_tokens + 1))
    requests = []
    for index, request in enumerate(WORKLOADS["sharegpt"].sample(count)):
        prompt = (*system, -1 - index, *[0] * (min(request.prompt_tokens, LONGEST_PROMPT) - 1))
        requests.append(SimulatedRequest(len(prompt), _answer(request, shorter), prompt_token_ids=prompt))
    return LeverWorkload("shared-chat", f"{count} chats behind one system prompt", tuple(requests))


def long_and_short(count: int, shorter: int = 1) -> LeverWorkload:
    """Return three chats with ShareGPT's lengths for every completion with the Azure code trace's
    lengths; none share a prefix.
    """
    chats, codes = (iter(WORKLOADS[name].sample(count)) for name in ("sharegpt", "azure-code"))
    drawn = [next(codes if index % 4 == 3 else chats) for index in range(count)]
    requests = [SimulatedRequest(min(request.prompt_tokens, 3072), _answer(request, shorter)) for request in drawn]
    return LeverWorkload("long-and-short", f"{count} long and short requests", tuple(requests))


def _answer(request: RequestLengths, shorter: int) -> int:
    return max(1, min(request.output_tokens, LONGEST_ANSWER) // shorter)
