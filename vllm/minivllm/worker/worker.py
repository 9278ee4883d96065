"""One rank: a device, the model (or this rank's shard of it), and the calls that the engine may make.

In vLLM v0.33.0: `vllm/v1/worker/gpu_worker.py` (`Worker`).
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from minivllm.config import ModelConfig, SpeculativeConfig
from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.models.decoder import Decoder
from minivllm.models.loader import load_model, random_model
from minivllm.models.parallel import GroupCoordinator
from minivllm.platforms.allocator import keep_freed_memory
from minivllm.platforms.spinning import limit_spinning
from minivllm.platforms.triton_utils import INTERPRETED
from minivllm.worker.memory_profiling import MemoryUse, measure_memory
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.paged_attention import PagedAttention

LOOPBACK_ADDRESS = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings sent to every rank, as in `EngineArgs`; `num_threads` is the total over all ranks."""

    model: str | Path
    device: str
    dtype: str
    load_format: str
    seed: int
    kv_cache_dtype: str
    quantization: str | None
    attention_backend: str | None
    attention: Callable[..., PagedAttention] | None
    use_kv_cache: bool
    speculative_config: SpeculativeConfig | None
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    tensor_parallel_size: int
    num_threads: int
    enforce_eager: bool

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether decode steps are captured: on a GPU, with its own kernels and a KV cache, and unless eager."""
        plain = self.attention_backend is None and self.attention is None and self.use_kv_cache
        return self.device == "cuda" and plain and not self.enforce_eager and not INTERPRETED


class Worker:
    """Loads the model on construction. All ranks of a group must get the same calls in the same order."""

    def __init__(self, settings: WorkerSettings, group: GroupCoordinator | None = None) -> None:
        self.settings, self.group = settings, group or GroupCoordinator()
        self.device = device_of_rank(settings.device, self.group.rank)
        if self.device.type == "cpu":
            keep_freed_memory()
            limit_spinning()
        self.runner = ModelRunner(
            load(settings, self.device, self.group),
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            block_size=settings.block_size,
            kv_cache_dtype=settings.kv_cache_dtype,
            speculative_config=settings.speculative_config,
            attention_backend=settings.attention_backend,
            attention=settings.attention,
            use_kv_cache=settings.use_kv_cache,
        )

    def memory_use(self) -> MemoryUse:
        """Measures the memory of this rank's device and everything but the cache that uses it."""
        settings = self.settings
        return measure_memory(
            self.device,
            self.group.size,
            dtype=str(self.runner.dtype).removeprefix("torch."),
            weights=self.runner.weight_bytes(),
            activation_peak=self.runner.activation_peak(settings.max_num_batched_tokens, settings.max_num_seqs),
            cuda_graphs=settings.uses_cuda_graphs,
        )

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocates the cache and captures CUDA graphs, once; then resets the group's byte count."""
        self.runner.initialize_kv_cache(num_blocks)
        if self.settings.uses_cuda_graphs:
            self.runner.capture_model()
        self.group.bytes_reduced = 0

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step. Only rank 0 samples; it broadcasts the tokens to the others before the step ends."""
        output = self.runner.execute_model(scheduler_output)
        if self.group.size > 1 and scheduler_output.num_scheduled_tokens:
            self._share_sampled(scheduler_output, output.sampled_token_ids)
        return output

    def _share_sampled(self, scheduler_output: SchedulerOutput, sampled: dict[str, list[int]]) -> None:
        """Broadcasts the tokens that rank 0 sampled: [requests, drafts + 1] token ids, padded with -1.

        The ranks do this among themselves, within the step, so that the next step can be sent before the engine has
        read this one's output. Every rank knows the shape: it follows from the scheduler output.
        """
        req_ids = list(scheduler_output.num_scheduled_tokens)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        width = 1 + max(map(len, drafts.values()), default=0)
        rows = [sampled.get(req_id, []) for req_id in req_ids]
        table = torch.tensor([row + [-1] * (width - len(row)) for row in rows], device=self.device)
        self.group.broadcast(table)
        if self.group.rank > 0:
            rows = [[token_id for token_id in row if token_id >= 0] for row in table.tolist()]
            told = {req_id: row for req_id, row in zip(req_ids, rows, strict=True) if row}
            if told:
                self.runner.take_sampled(told)

    def reset(self) -> None:
        """Drops all requests, in whatever state a failed step left them, and joins the group anew."""
        self.runner.reset()
        self.group.rejoin()

    def leave_group(self) -> None:
        """Makes the other ranks fail, too, where they would wait for this one."""
        self.group.leave()

    def take_draft_token_ids(self) -> dict[str, list[int]]:
        """Returns the drafts to follow the last step's tokens, by request id, and clears them."""
        return self.runner.take_draft_token_ids()

    def bytes_reduced(self) -> int:
        """Bytes this rank has contributed to all-reduces since the cache was allocated."""
        return self.group.bytes_reduced


def worker_of_rank(settings: WorkerSettings, address: tuple[str, int], rank: int) -> Worker:
    """One of several ranks, each in its own process; `address` is the host and port of their rendezvous."""
    return Worker(settings, join_group(settings, address, rank))


def join_group(settings: WorkerSettings, address: tuple[str, int], rank: int) -> GroupCoordinator:
    """Initializes torch.distributed's default group: NCCL between GPUs, gloo between processes on a CPU.

    A group over gloo can be left and joined again, so the ranks survive an exception on any of them. NCCL's cannot: its
    communicators are captured in CUDA graphs, and a rank that waits in a kernel notices nothing.
    """
    (host, port), size, device = address, settings.tensor_parallel_size, device_of_rank(settings.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, settings.num_threads // size))
        if host == LOOPBACK_ADDRESS:  # gloo would resolve the host's own name, which may fail
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    store = dist.TCPStore(host, port, size, is_master=False)

    def connect(number: int) -> None:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(str(number), store),  # nobody meets the addresses of an earlier group
            rank=rank,
            world_size=size,
            device_id=device if device.type == "cuda" else None,
        )

    connect(0)
    return GroupCoordinator(rank, size, None if device.type == "cuda" else connect)


def device_of_rank(name: str, rank: int) -> torch.device:
    """The rank's own GPU, or the CPU that all ranks share. On a machine of its own, a rank sees one GPU only."""
    return torch.device("cuda", rank % max(1, torch.cuda.device_count())) if name == "cuda" else torch.device(name)


def load(settings: WorkerSettings, device: torch.device, group: GroupCoordinator) -> Decoder:
    """Loads the rank's part of the model; dtype "auto" is float32 on a CPU, else the checkpoint's own dtype."""
    dtype = "float32" if settings.dtype == "auto" and device.type == "cpu" else settings.dtype
    if settings.load_format == "dummy":
        config = ModelConfig.from_pretrained(settings.model)
        return random_model(config, settings.seed, device, dtype, group, settings.quantization)
    return load_model(settings.model, device, dtype, group, settings.quantization)[0]
