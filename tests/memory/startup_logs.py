"""What vLLM printed at start-up on other people's machines: the figures that the memory arithmetic must reproduce.

Sources are GitHub issues (owner/repository#number) or logs found in public repositories. GiB are as printed, rounded to
two decimals (weights to four), so the true figure is within half of the last one. Only logs of one GPU, or of a group
whose figure is of the GPU that decided, are listed: the others print the memory of one GPU and the tokens of another.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class CapacityLog:
    """ "Available KV cache memory: X GiB", "GPU KV cache size: N tokens", "Maximum concurrency for M ...: Y x"."""

    source: str
    model: str
    kv_gib: float
    tokens: int | None
    max_model_len: int | None = None
    concurrency: float | None = None
    tp: int = 1
    kv_dtype: str = "auto"


CAPACITY = (
    CapacityLog("vllm-project/vllm#10517, 20k", "Llama-3.1-8B", 3.81, 1952 * 16, 20000, 1.56),
    CapacityLog("vllm-project/vllm#10517, 29k", "Llama-3.1-8B", 2.89, 23648, 29000, 0.82),
    CapacityLog("vllm-project/vllm#12330", "Meta-Llama-3-8B", 11.12, 5691 * 16, 8192, 11.12),
    CapacityLog("vllm-project/vllm#24577", "Qwen3-0.6B", 69.66, 652144, 4096, 159.21),
    CapacityLog("LMCache/LMCache#1739", "Qwen3-14B", 6.51, 42656, 32768, 1.30),
    CapacityLog("a repository's log, Qwen3-14B, 46 GB GPU", "Qwen3-14B", 11.06, 72496, 40960, 1.77),
    CapacityLog("a repository's log, Qwen3-14B, 46 GB GPU", "Qwen3-14B", 11.00, 72064, 40960, 1.76),
    CapacityLog("a repository's log, T4, vLLM 0.7.2", "Qwen2.5-1.5B", 2.36, 5519 * 16, 32768, 2.69),
    CapacityLog("a repository's log, DGX Spark", "Qwen2.5-1.5B", 0.56, 20992),
    CapacityLog("a repository's log, Qwen2.5-Math-1.5B", "Qwen2.5-1.5B", 15.52, 36332 * 16, 4096, 141.92),
    CapacityLog("a repository's log, 24 GB GPU", "Llama-3.1-8B", 4.60, 37696, 131072, 0.29),
    CapacityLog("a repository's log, RTX 4070", "Llama-3.2-3B", 2.38, 1395 * 16, 10000, 2.23),
    CapacityLog("a repository's log, DeepSeek-R1-0528-Qwen3-8B", "Qwen3-8B", 14.49, None, 65536, 6.44, tp=4),
)


@dataclass(frozen=True)
class HybridLog:
    """The same lines of a model whose layers differ, and what decides besides: the step, and how versions counted.

    Until v0.19 or so "GPU KV cache size" was blocks // groups * block size; since then it is
    concurrency * length. Tokens of steps in flight counted once before async scheduling was taken
    into account. A request takes one state block for each group of linear-attention layers without
    a prefix cache, and two with one.
    """

    source: str
    model: str
    kv_gib: float
    tokens: int
    max_model_len: int
    concurrency: float
    tp: int = 1
    kv_dtype: str = "auto"
    max_num_batched_tokens: int = 8192
    steps_in_flight: int = 1
    states: int | None = None
    by_groups: bool = False
    """Whether `tokens` is the older figure."""


HYBRID = (
    HybridLog(
        "a public log, vLLM 0.10.2, 192 GB AMD GPU", "gemma-3-27b-it", 109.86, 205696, 4096, 50.05,
        by_groups=True,
    ),
    HybridLog("a public log, vLLM 0.23.0, MI300X", "gemma-3-4b-it", 162.84, 1217591, 8192, 148.63),
    HybridLog(
        "a public log, vLLM 0.10.2, two H200", "Qwen3-Next-80B-A3B-Instruct", 44.59, 973760, 262144, 14.77,
        tp=2, states=1, by_groups=True,
    ),
    HybridLog(
        "a public log, vLLM 0.13.0, two L40S", "Qwen3-Next-80B-A3B-Instruct", 17.58, 767552, 32768, 84.29, tp=2,
        kv_dtype="fp8", states=1, by_groups=True,
    ),
    HybridLog("noonghunna/club-3090#612, vLLM 0.24.0", "Qwen3.6-35B-A3B", 5.98, 567978, 131072, 4.33, kv_dtype="fp8"),
    HybridLog("noonghunna/club-3090#652, vLLM 0.24.0", "Qwen3.6-35B-A3B", 6.01, 569878, 131072, 4.35, kv_dtype="fp8"),
    HybridLog(
        "mitchross/talos-argocd-proxmox#1995, Qwen3.8-27B-FP8", "Qwen3.5-27B", 4.99, 302921, 131072, 2.31, tp=2,
        kv_dtype="fp8",
    ),
    HybridLog("a public log, vLLM 0.26.0, L40S, Qwen3.8-27B", "Qwen3.5-27B", 8.82, 141036, 131072, 1.08, states=1),
    HybridLog("a public log, vLLM 0.26.0, L40S, Qwen3.8-27B", "Qwen3.5-27B", 9.75, 155600, 131072, 1.19, states=1),
    HybridLog(
        "loftllc.dev/en/docs/tech/llm-research/llama-4-scout-17b-16e-cpu-vs-gpu-benchmark, vLLM 0.14.0rc1",
        "Llama-4-Scout", 20.2, 110256, 110256, 1.0,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class NeededLog:
    """ "To serve at least one request with the model's max seq len (M), X GiB KV cache is needed"."""

    source: str
    model: str
    max_model_len: int
    needed_gib: float
    tp: int = 1


NEEDED = (
    NeededLog("vllm-project/vllm#34076, Qwen3-Coder-30B-A3B", "Qwen3-30B-A3B", 262144, 24.0),
    NeededLog("vllm-project/vllm#15871, multi-head latent attention", "DeepSeek-V2-Lite", 32768, 0.95),
)


@dataclass(frozen=True)
class WeightLog:
    """ "Model loading took X GiB"."""

    source: str
    model: str
    gib: float


WEIGHTS = (
    WeightLog("vllm-project/vllm#24577", "Qwen3-0.6B", 1.1201),
    WeightLog("vllm-project/vllm#10517", "Llama-3.1-8B", 14.9888),
    WeightLog("vllm-project/vllm#12330", "Meta-Llama-3-8B", 14.9595),
    WeightLog("a repository's log, 46 GB GPU", "Qwen3-14B", 27.5185),
)


@dataclass(frozen=True)
class ProfileLog:
    """The whole share-out of a GPU: "total_gpu_memory (T GiB) x gpu_memory_utilization (u)", and what takes it."""

    source: str
    model: str
    total: float
    utilization: float
    weights: float
    non_torch: float
    activations: float
    kv: float
    blocks: int


PROFILES = (
    ProfileLog("vllm-project/vllm#12330", "Meta-Llama-3-8B", 39.50, 0.90, 14.96, 0.10, 9.37, 11.12, 5691),
    ProfileLog("a repository's log, T4", "Qwen2.5-1.5B", 14.56, 0.50, 2.89, 0.01, 2.02, 2.36, 5519),
    ProfileLog("a repository's log, Qwen2.5-Math", "Qwen2.5-1.5B", 22.06, 0.90, 2.88, 0.05, 1.40, 15.52, 36332),
    ProfileLog("a repository's log, 24 GB GPU", "Llama-3.1-8B", 22.07, 0.90, 14.99, 0.05, 0.22, 4.60, 2356),
)


@dataclass(frozen=True)
class ActivationLog:
    """ "PyTorch activation peak memory takes X GiB", where the size of the profiled step is known."""

    source: str
    model: str
    max_num_batched_tokens: int
    max_num_seqs: int
    gib: float


ACTIVATIONS = (
    ActivationLog("a book's example, H100 or A100", "Meta-Llama-3-8B", 8192, 256, 1.19),
    ActivationLog("a repository's log, Qwen2.5-Math", "Qwen2.5-1.5B", 4096, 256, 1.40),
    ActivationLog("vllm-project/vllm#13882", "Qwen2.5-7B", 4096, 256, 1.42),
    ActivationLog("a repository's log, T4, one prompt of 32768", "Qwen2.5-1.5B", 32768, 256, 2.02),
    ActivationLog("vllm-project/vllm#10517, 20k: 17.06 - 14.99", "Llama-3.1-8B", 20000, 256, 2.07),
    ActivationLog("vllm-project/vllm#10517, 29k: 17.98 - 14.99", "Llama-3.1-8B", 29000, 256, 2.99),
)
