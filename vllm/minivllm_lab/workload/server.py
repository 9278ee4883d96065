"""A vLLM server as this prediction sees it: what its steps cost, by generation of engine, and its defaults.

A step costs what its bytes and operations take on the GPU, plus what no roofline knows: gaps between the
kernels of a layer, all-reduces, and the host. The constants are the best fit to the rows of
`published.toml` whose role is "calibration" (`benchmarks/workload_fit.py`); the other rows say how far off the
predictions are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.config.checks import require
from minivllm.config.units import GIB
from minivllm.memory import MemoryLedger
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.hardware import Hardware
from minivllm_simulate.levers import SERVING, LeverCost
from minivllm_simulate.memory import memory_ledger
from minivllm_simulate.steady import Steady

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Constants:
    """Constants that the calibration rows determine, in seconds or as a share of the data sheet's rate."""

    memory: float = 0.9
    """Share of the bandwidth that a decode's reads reach, and the same on GPUs before Hopper."""
    ampere_memory: float = 0.8
    ampere: float = 0.55
    """Share of the operations that a prefill reaches on GPUs before Hopper."""
    hopper: float = 0.63
    layer: float = 47e-6
    """Gaps between the kernels of one layer."""
    rank: float = 1.155e-3
    """The host's seconds a step to reach the other ranks, with tensor parallelism."""


CONSTANTS = Constants()


@dataclass(frozen=True)
class Generation:
    """The time that the host of one generation of engines adds; `since` is its first minor version (0.x)."""

    name: str
    since: int
    step: float
    """Seconds a step."""
    request: float
    """Seconds a request and step. Asynchronous scheduling hides the host's part behind the GPU's."""
    first: float
    """Seconds between a request's arrival and its first step, and back: HTTP, tokenizer, queues."""


GENERATIONS = (
    Generation("V0", 6, 1.1e-3, 9e-6, 22e-3),
    Generation("V1", 8, 0.35e-3, 90e-6, 53.6e-3),
    Generation("V1 with asynchronous scheduling", 14, 0.0, 0.0, 16e-3),
)
OLDEST, NEWEST = 6, 33

SMALL_SENT, SMALL_RATE = 1e-5, 55e9
LARGE_SENT, LARGE_SHARE = 3e-5, 0.7
NVLINK4 = 450e9
"""An all-reduce is as fast as the better of two kernels. The small one takes 9 to 10 µs, and sends 50 to 59 GB/s, by
vLLM's column in sgl-project/sglang#2904 (H100, NVLink 4; 256 KiB to 1 MiB over 2, 4 and 8 GPUs). The large one,
NCCL's, is assumed to take three times as long to begin, and to reach 70 % of the link.
"""


def minor_version(version: str) -> int:
    """Return the minor version of, say, "0.11.0".

    Raises:
        MinivllmError: it is not a version from 0.6 to 0.33.
    """
    parts = version.removeprefix("v").split(".")
    minor = int(parts[1]) if len(parts) > 1 and parts[0] == "0" and parts[1].isdigit() else -1
    known = f"0.{OLDEST} to 0.{NEWEST}"
    require(OLDEST <= minor <= NEWEST, f"vLLM {version!r} is not a version that can be predicted: {known}")
    return minor


@dataclass(frozen=True)
class StepCost:
    """The cost of a step: the device's part from `LeverCost`, and what is missing there."""

    device: LeverCost
    fixed: float
    """Seconds that do not depend on the batch: the gaps between kernels, and the host."""
    request: float
    """Seconds of the host a request."""

    @classmethod
    def of(
        cls, model: ModelConfig, gpu: Hardware, tp: int, kv_dtype: str, host: Generation, constants: Constants
    ) -> StepCost:
        """Return the cost of a model's steps on `tp` GPUs, under the engine's `host`."""
        cost = LeverCost.of(replace(SERVING, tensor_parallel=tp, kv_dtype=kv_dtype), model, gpu)
        # A step looks up a few rows of the embedding; the head is read whole.
        unread = 0 if model.tie_word_embeddings else 2 * model.vocab_size * model.hidden_size // tp
        new = "float8" in gpu.flops
        roofline = replace(
            cost.roofline,
            weight_bytes=cost.roofline.weight_bytes - unread,
            memory_efficiency=constants.memory if new else constants.ampere_memory,
            arithmetic_efficiency=constants.hopper if new else constants.ampere,
        )
        fixed = model.num_hidden_layers * constants.layer + host.step + (constants.rank if tp > 1 else 0)
        return cls(replace(cost, roofline=roofline), fixed, host.request)

    def seconds(self, shape: StepShape) -> float:
        """Return the modelled seconds of one step of this shape."""
        device = self.device.linear_seconds(shape) + self.device.attention_seconds(shape) + self.link_seconds(shape)
        return device + self.fixed + self.request * shape.num_reqs

    def link_seconds(self, shape: StepShape) -> float:
        """Return the seconds of two all-reduces per layer, each by the faster kernel."""
        sent = self.device.all_reduce_bytes_per_token * shape.num_tokens
        small = SMALL_SENT + sent / (SMALL_RATE * min(1.0, self.device.link / NVLINK4))
        return self.device.all_reduces * min(small, LARGE_SENT + sent / (LARGE_SHARE * self.device.link))


@dataclass(frozen=True)
class Server:
    """`vllm serve` of one model: its GPUs, its version, and the flags that matter here; None is a flag left out."""

    model: ModelConfig
    gpu: Hardware
    tp: int = 1
    version: str = "0.33"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    kv_dtype: str = "auto"
    constants: Constants = CONSTANTS
    hosts: tuple[Generation, ...] = GENERATIONS

    @property
    def large(self) -> bool:
        """Whether vLLM takes the defaults of a large GPU: 70 GiB or more, and not an A100."""
        return self.gpu.memory_bytes >= 70 * GIB and not self.gpu.name.startswith("A100")

    @property
    def seats(self) -> int:
        """Requests that run at once at most."""
        return self.max_num_seqs or (1024 if self.large and self.host.since >= 8 else 256)

    @property
    def budget(self) -> int:
        """Tokens of a step at most. V0 computed a prompt whole, in a step as long as the longest prompt."""
        return self.max_num_batched_tokens or (8192 if self.large or self.host.since < 8 else 2048)

    @cached_property
    def host(self) -> Generation:
        """The generation of the engine."""
        return [each for each in self.hosts if each.since <= minor_version(self.version)][-1]

    @property
    def prompts_alone(self) -> bool:
        """Return whether prompts run in steps of their own: V0's default for requests of up to 32K."""
        return self.host.since < 8 and (self.max_model_len or self.model.max_position_embeddings or 0) <= 1 << 15

    @property
    def utilization(self) -> float:
        """The share of the GPU's memory that vLLM may use: 0.9 through 0.19, and 0.92 since."""
        return self.gpu_memory_utilization or (0.92 if minor_version(self.version) >= 20 else 0.9)

    @cached_property
    def cost(self) -> StepCost:
        """The cost of its steps."""
        return StepCost.of(self.model, self.gpu, self.tp, self.kv_dtype, self.host, self.constants)

    @cached_property
    def ledger(self) -> MemoryLedger:
        """The memory of one of its GPUs.

        Raises:
            MinivllmError: the model does not fit.
        """
        return memory_ledger(
            self.model, self.gpu, max_model_len=self.max_model_len, tp=self.tp, kv_dtype=self.kv_dtype,
            gpu_memory_utilization=self.utilization, max_num_seqs=min(self.seats, 256),
            max_num_batched_tokens=self.budget,
        )  # fmt: skip

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.ledger.usable_blocks * BLOCK_SIZE

    def configs(self, longest: int, most_tokens: int) -> tuple[SchedulerConfig, CacheConfig]:
        """Return the scheduler's and the cache's configs for requests of at most `longest` tokens; the pool has no
        more blocks than `most_tokens` could use.
        """
        scheduler = SchedulerConfig(
            max_model_len=longest, max_num_seqs=self.seats, max_num_batched_tokens=max(self.budget, self.seats)
        )
        blocks = min(self.kv_tokens, most_tokens + longest) // BLOCK_SIZE
        return scheduler, CacheConfig(num_gpu_blocks=1 + blocks, block_size=BLOCK_SIZE, enable_prefix_caching=False)


def capacity(server: Server, prompt: float, output: float) -> float:
    """Return the knee: the requests a second, with these mean lengths, from which the queue grows without end."""
    steady = Steady.within(
        server.cost, prompt, output, seats=server.seats, kv_tokens=server.kv_tokens, budget=server.budget
    )
    return steady.capacity()
