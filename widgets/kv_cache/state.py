"""Compute the state of lesson 01's widget: a GPU's memory ledger, and its KV cache filled with
requests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate, cycle, islice, takewhile
from typing import Any

from minivllm import memory
from minivllm.config import ModelConfig
from minivllm.config.checks import is_number, require
from minivllm.memory import KVGroups, MemoryLedger, max_concurrency
from minivllm.memory.bytes_per_token import DTYPE_BYTES
from minivllm.memory.kv_layers import FullLayer
from minivllm_lab.checks.bounded import bounded
from minivllm_simulate.hardware import Hardware, get_hardware
from minivllm_simulate.known_models import CONFIGS, HYBRIDS, find_model
from minivllm_simulate.memory import memory_ledger, num_parameters
from minivllm_simulate.workloads import FileWorkload, Workload, workload

CONTEXTS = tuple(sorted([*(2**power for power in range(8, 19)), *(3 * 2**power for power in range(7, 17))]))
"""256 to 256K tokens, two to a doubling: up to the longest context of a known model."""
SAMPLED_REQUESTS, MOST_ROWS = 4000, 20_000
MOST_SLOTS_DRAWN = 100
PATIENCE = 1.0
"""CPU seconds that the reader's function may take."""
START = {
    "model": "meta-llama/Llama-3.1-8B", "other_model": "", "gpu": "L4", "tp": 1, "kv_dtype": "auto",
    "utilization": 0.92, "max_model_len": 2048, "requests": "sharegpt", "file": "",
}  # fmt: skip
CountsBytes = Callable[..., Any]
"""`kv_bytes_per_token(config, bytes_per_element) -> int`, as in the exercise."""


@dataclass(frozen=True)
class State:
    """One configuration and its results. Bytes are per GPU; tokens and requests are for all GPUs
    together.
    """

    name: str
    """The model's name for vLLM."""
    hardware: Hardware
    tp: int
    kv_dtype: str
    utilization: float
    max_model_len: int
    model_limit: int
    """The longest context that the model supports; 0 if its config does not say."""
    parameters: int
    workload_title: str
    needs: tuple[tuple[str, int], ...]
    """(name, bytes) of everything that takes memory before the KV cache."""
    ledger: MemoryLedger | None
    """None where `needs` exceed what the engine may use."""
    bytes_per_token: float
    """Bytes per token on one GPU, averaged over a request of `max_model_len` tokens where layers
    differ; by the reader's function if there is one.
    """
    counted_bytes: int
    """The same by the engine's count."""
    slots: int
    """Requests that fit when each reserves `max_model_len` tokens; 0 where vLLM refuses to
    start.
    """
    lengths: tuple[int, ...]
    """Final tokens of the first requests in those slots, at most MOST_SLOTS_DRAWN."""
    too_long: float
    """The share of requests longer than `max_model_len`, which are refused."""
    mean_length: float
    """Mean tokens of the other requests; 0 where there are none."""
    longest: int
    """Tokens of the longest request that fits; 0 where the model leaves no room."""
    contexts: tuple[int, ...]
    """Lengths at which vLLM starts; the last is the longest."""
    concurrency: tuple[float, ...]
    """Requests that would fit if each reserved each of `contexts`."""
    mean_lengths: tuple[float, ...]
    """Mean tokens of the requests up to each of `contexts`; 0 where there are none."""

    @property
    def model(self) -> str:
        """Return the model's name without its owner."""
        return self.name.rstrip("/").split("/")[-1]

    @property
    def needed(self) -> int:
        """Return the bytes taken before the KV cache."""
        return sum(size for _, size in self.needs)

    @property
    def tokens(self) -> int:
        """Return the tokens that fit into the KV cache."""
        return self.ledger.tokens if self.ledger else 0

    @property
    def wall(self) -> int:
        """Return the longest `max_model_len` with which vLLM starts."""
        return self.contexts[-1] if self.contexts else 0

    @property
    def beyond_model(self) -> bool:
        """Return whether `max_model_len` exceeds the model's limit, so that vLLM refuses to
        start.
        """
        return bool(self.model_limit) and self.max_model_len > self.model_limit

    @property
    def fits(self) -> bool:
        """Return whether one request of `max_model_len` tokens fits."""
        return self.max_model_len <= self.longest

    @property
    def starts(self) -> bool:
        """Return whether vLLM starts."""
        return self.fits and not self.beyond_model

    @property
    def right_bytes(self) -> bool:
        """Return whether the reader's function agrees with the engine."""
        return self.bytes_per_token == self.counted_bytes

    @property
    def at_own_length(self) -> float:
        """Return how many requests would fit if each held only its own tokens; 0 where vLLM
        refuses to start.
        """
        return self.tokens / self.mean_length if self.mean_length and self.starts else 0.0

    @property
    def reserved(self) -> float:
        """Return the share of the KV cache that full slots reserve."""
        return self.slots * self.max_model_len / self.tokens if self.slots else 0.0

    @property
    def held(self) -> float:
        """Return the share of the KV cache that ever holds a token when all slots are full."""
        return self.slots * self.mean_length / self.tokens if self.slots else 0.0


def sweep(
    model: str = START["model"],
    other_model: str = "",
    gpu: str = START["gpu"],
    tp: int = 1,
    kv_dtype: str = "auto",
    utilization: float = START["utilization"],
    max_model_len: int = START["max_model_len"],
    requests: str = START["requests"],
    file: str = "",
    kv_bytes_per_token: CountsBytes | None = None,
) -> State:
    """Divide up the memory of one GPU, and fill its KV cache with requests that each reserve
    `max_model_len` tokens.

    Args:
        model: A well-known model.
        other_model: A local directory or a model on the Hugging Face Hub, which replaces `model`
            unless empty.
        gpu: A name in the hardware table.
        tp: GPUs that share one copy of the model.
        kv_dtype: The cache's type; "auto" is the model's.
        utilization: vLLM's `gpu_memory_utilization`.
        max_model_len: The longest request, in tokens.
        requests: A workload of `minivllm_simulate.workloads`.
        file: A CSV file of request lengths, which replaces `requests` unless empty.
        kv_bytes_per_token: The reader's function, which replaces the engine's count.

    Raises:
        MinivllmError: There is no such model or file, or the model's memory cannot be counted.
    """
    name = _full_name(other_model.strip() or model)
    config, hardware, kind = _model(name), get_hardware(gpu), workload(file.strip() or requests)
    needs, ledger, kv = _shared_out(name, gpu, tp, kv_dtype, utilization)
    ledger = ledger and replace(ledger, max_model_len=max_model_len)
    counted = kv.bytes_per_token or round(kv.blocks_per_request(max_model_len) * kv.block_bytes / max_model_len)
    per_token: float = counted
    if kv_bytes_per_token:
        per_token = _own_bytes(kv_bytes_per_token, config, kv_dtype, counted)
        ledger = ledger and _with_bytes(ledger, per_token)
    longest = replace(ledger, max_model_len=CONTEXTS[-1]).longest_request if ledger else 0
    wall = min(longest, CONTEXTS[-1], config.max_position_embeddings or CONTEXTS[-1])
    contexts = (*(context for context in CONTEXTS if context < wall), *[wall][: wall >= CONTEXTS[0]])
    state = State(
        name=name,
        hardware=hardware,
        tp=tp,
        kv_dtype=kv_dtype,
        utilization=utilization,
        max_model_len=max_model_len,
        model_limit=config.max_position_embeddings,
        parameters=num_parameters(config),
        workload_title=kind.title,
        needs=needs,
        ledger=ledger,
        bytes_per_token=per_token,
        counted_bytes=counted,
        slots=0,
        lengths=(),
        too_long=1 - _share_up_to(max_model_len, kind),
        mean_length=_mean_up_to(max_model_len, kind),
        longest=longest,
        contexts=contexts,
        concurrency=tuple(ledger.concurrency_of(context) if ledger else 0.0 for context in contexts),
        mean_lengths=tuple(_mean_up_to(context, kind) for context in contexts),
    )
    slots = int(max_concurrency(state.tokens, max_model_len)) if state.starts else 0
    return replace(state, slots=slots, lengths=_first_lengths(slots, max_model_len, kind))


def _full_name(name: str) -> str:
    """Add the owner to a well-known model's name."""
    known = (*CONFIGS, *HYBRIDS)
    return next((full for full in known if name.lower() in (full.lower(), full.split("/")[1].lower())), name)


@cache
def _model(name: str) -> ModelConfig:
    return find_model(name)


@lru_cache(maxsize=128)
def _shared_out(
    name: str, gpu: str, tp: int, kv_dtype: str, utilization: float
) -> tuple[tuple[tuple[str, int], ...], MemoryLedger | None, KVGroups]:
    """Return the memory taken before the KV cache, the ledger unless there is no room for a KV
    cache, and the groups of layers.
    """
    config, hardware = _model(name), get_hardware(gpu)
    settings: dict[str, Any] = {"max_model_len": 1, "tp": tp, "kv_dtype": kv_dtype, "check": False}
    roomy = memory_ledger(config, replace(hardware, memory_bytes=2**60), **settings)
    before_cache = takewhile(lambda row: row.name != "KV cache", roomy.rows)
    needs = tuple((row.name, row.bytes) for row in before_cache)
    if sum(size for _, size in needs) + roomy.kv.block_bytes > int(hardware.memory_bytes * utilization):
        return needs, None, roomy.kv
    return needs, memory_ledger(config, hardware, gpu_memory_utilization=utilization, **settings), roomy.kv


def _with_bytes(ledger: MemoryLedger, per_token: float) -> MemoryLedger | None:
    """Return the ledger with this many bytes per token, or None if not even one block fits."""
    block_bytes = max(1, round(per_token)) * ledger.block_size
    changed = replace(ledger, kv=KVGroups((FullLayer(ledger.block_size, block_bytes),), block_bytes))
    return changed if changed.num_blocks else None


def _own_bytes(own: CountsBytes, config: ModelConfig, kv_dtype: str, counted: int) -> float:
    """Count the bytes per token with the reader's function; this function adds the scales and the
    split over GPUs.

    Raises:
        MinivllmError: The function returns no number above 0, or does not end.
    """
    element = DTYPE_BYTES.get(memory.cache_dtype(config, kv_dtype), 2)
    with bounded(PATIENCE, "your kv_bytes_per_token"):
        count = own(config, element)
    fits = is_number(count) and count > 0
    require(fits, f"your kv_bytes_per_token returned {count!r}, but it must return a number of bytes above 0")
    whole = memory.kv_bytes_per_token(config, {4: "float32", 2: "bfloat16", 1: "fp8"}[element])
    return counted if count == whole else count * counted / whole


@lru_cache(maxsize=16)
def _sample(kind: Workload) -> tuple[list[int], list[int], list[int]]:
    """Return request lengths in order of arrival, the same lengths sorted, and the running sums of
    the sorted ones.
    """
    own = kind.table if isinstance(kind, FileWorkload) else None
    count = min(MOST_ROWS, len(own.prompts)) if own else SAMPLED_REQUESTS
    arriving = [request.total for request in kind.sample(count)]
    ordered = sorted(arriving)
    return arriving, ordered, [0, *accumulate(ordered)]


def _share_up_to(longest: int, kind: Workload) -> float:
    _, ordered, _ = _sample(kind)
    return bisect_right(ordered, longest) / len(ordered)


def _mean_up_to(longest: int, kind: Workload) -> float:
    _, ordered, sums = _sample(kind)
    count = bisect_right(ordered, longest)
    return sums[count] / count if count else 0.0


@lru_cache(maxsize=64)
def _first_lengths(slots: int, longest: int, kind: Workload) -> tuple[int, ...]:
    """Return the lengths of the first requests that are no longer than `longest`, one for each slot
    that is drawn.
    """
    fitting = [length for length in _sample(kind)[0] if length <= longest]
    return tuple(islice(cycle(fitting), min(slots, MOST_SLOTS_DRAWN)))
