"""One rank: a device, the model (or this rank's shard of it), and the calls that the engine may
make.

In vLLM v0.33.0: `vllm/v1/worker/gpu_worker.py` (`Worker`).
"""

import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from minivllm.config import ModelConfig
from minivllm.core.kv_connector import KVConnectorConfig, KVConnectorRole
from minivllm.core.lora_request import LoRARequest
from minivllm.core.scheduler_output import AsyncModelRunnerOutput, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from minivllm.errors import MinivllmError
from minivllm.kernels.cpu.attention_calls import CACHES, NUMBERS
from minivllm.kernels.cpu.loops import ELEMENTS, loops
from minivllm.kernels.rejection_sample import rejection_sample
from minivllm.kv_connector.factory import create_connector
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.memory import MemoryLedger
from minivllm.models.decoder import Decoder
from minivllm.models.eagle3 import Eagle3Head, load_eagle3
from minivllm.models.loader import load_model, random_model
from minivllm.models.parallel import GroupCoordinator
from minivllm.models.pipeline import Stage
from minivllm.platforms.allocator import keep_freed_memory
from minivllm.platforms.spinning import limit_spinning
from minivllm.platforms.threads import has_numba
from minivllm.worker.kernel_warmup import warm_up_steps
from minivllm.worker.kv_cache import STORED_AS
from minivllm.worker.kv_connector_runner import KVConnectorRunner, model_fingerprint
from minivllm.worker.memory_profiling import profile_memory
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.settings import WorkerSettings
from minivllm.worker.spec_decode.proposer import TokenSpeculator
from minivllm.worker.spec_decode.speculator import Speculator

LOOPBACK_ADDRESS = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


class Worker:
    """One rank of the engine, which loads its model on construction. All ranks of a group must get
    the same calls in the same order.
    """

    def __init__(self, settings: WorkerSettings, group: GroupCoordinator | None = None) -> None:
        self.settings = settings
        self.group = group or GroupCoordinator()
        self.device = device_of_rank(settings.device, self.group.world_rank)
        if self.device.type == "cpu":
            keep_freed_memory()
            limit_spinning()
        model = load(settings, self.device, self.group)
        if self.device.type == "cpu" and settings.world_size == 1 and settings.uses_unified_attention:
            compile_loops(model.embed_tokens.weight.dtype, settings.kv_cache_dtype, settings.num_speculative_tokens)
        self.runner = ModelRunner(model, settings, load_drafter(settings, model))

    def memory_ledger(self, gpu_memory_utilization: float, host_tier: int) -> MemoryLedger:
        """Return what this rank's memory is used for; see `profile_memory`."""
        return profile_memory(self.runner, gpu_memory_utilization, host_tier)

    @property
    def _adapters(self) -> LRUCacheWorkerLoRAManager:
        assert isinstance(self.runner.lora, LRUCacheWorkerLoRAManager)
        return self.runner.lora

    def add_lora(self, lora_request: LoRARequest) -> tuple[str, str]:
        """Read an adapter into host memory; return its fingerprint and "", or "" and the reason it
        cannot be served.

        A refusal is returned, not raised, since an exception would end the steps in flight.
        """
        try:
            return self._adapters.add_adapter(lora_request), ""
        except MinivllmError as error:
            return "", str(error)

    def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter; return whether it was there."""
        return self._adapters.manager.remove_adapter(lora_id)

    def pin_lora(self, lora_request: LoRARequest) -> str | None:
        """Keep an adapter in its slot from now on; return the reason if that is impossible, or
        None.
        """
        manager = self._adapters.manager
        try:
            if lora_request.lora_int_id not in manager.registered:
                self._adapters.add_adapter(lora_request)
            manager.pin_adapter(lora_request.lora_int_id)
        except MinivllmError as error:
            return str(error)
        return None

    def list_loras(self) -> list[int]:
        """Return the ids of the adapters in host memory."""
        return self.runner.lora.list_adapters()

    def lora_slots(self) -> list[int | None]:
        """Return the id of the adapter in each slot, or None for an empty slot."""
        return list(self.runner.lora.lora_index_to_id)

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the cache, capture the graphs of decode steps and, on a GPU, warm up the
        kernels. Called once; resets the count of all-reduced bytes.
        """
        settings = self.settings
        self.runner.initialize_kv_cache(num_blocks)
        if settings.uses_graphs:
            self.runner.capture_model()
        if self.device.type == "cuda" and settings.uses_unified_attention:
            limits = settings.max_num_batched_tokens, settings.max_num_seqs, settings.max_model_len
            steps = warm_up_steps(*limits, settings.block_size, settings.num_speculative_tokens, num_blocks)
            self.run_unobserved(steps)  # so that every variant of the kernels is compiled

    def initialize_kv_connector(self) -> tuple[KVConnectorConfig, Any]:
        """Create this rank's side of the KV connector, after the cache has been allocated.

        Return what the scheduler's side needs: the connector's settings, and the metadata with
        which others reach this rank.
        """
        settings, group = self.settings, self.group
        assert settings.kv_transfer_config is not None
        config = self.runner.model.whole_config
        kv_caches = self.runner.named_kv_caches()
        speculative = settings.speculative_config if self.runner.speculator.model_config else None
        cache, *_ = next(iter(kv_caches.values()))  # all layers' caches are alike in dtype and blocks
        # What changes keys and values, besides the model itself.
        computed_in = (str(self.runner.dtype), settings.quantization, speculative and speculative.model)
        weights = (settings.load_format, settings.seed if settings.load_format == "dummy" else 0)
        connector_config = KVConnectorConfig(
            kv_transfer_config=settings.kv_transfer_config,
            model_fingerprint=model_fingerprint(settings.model, config, computed_in, weights),
            block_size=settings.block_size,
            num_gpu_blocks=cache.shape[0],
            kv_cache_dtype=str(cache.dtype).removeprefix("torch."),
            device=self.device.type,
            tensor_parallel_size=group.size,
            tensor_parallel_rank=group.rank,
            pipeline_parallel_size=group.stage.size,
            use_eagle=settings.speculative_config is not None and settings.speculative_config.use_eagle,
        )
        connector = create_connector(connector_config, KVConnectorRole.WORKER, settings.kv_connector)
        self.runner.kv_connector = KVConnectorRunner(connector, kv_caches, self.runner.config.num_hidden_layers)
        return connector_config, connector.get_handshake_metadata()

    def warm_up(self) -> None:
        """Run short steps on a CPU, so that no request waits while numba compiles its loops or
        reads them from its cache.

        On a GPU, `initialize_kv_cache` has already warmed up.
        """
        if self.device.type == "cpu":
            self.run_unobserved(warm_up_steps(2, 1, 3, self.settings.block_size))

    def run_unobserved(self, steps: Iterable[SchedulerOutput]) -> None:
        """Run steps of made-up requests, and discard everything they leave behind. Parts that a
        caller has given must see only real requests, so they do not take part.
        """
        runner = self.runner
        speculator, rejection = runner.speculator, runner.rejection_sample
        if isinstance(speculator, TokenSpeculator):
            runner.speculator = Speculator()
        runner.rejection_sample = rejection_sample
        try:
            for step in steps:
                if runner.draft_tokens_handler.keeps_drafts and step.scheduled_spec_decode_tokens:
                    # Drafts to verify, in place of those that a rank would have kept.
                    runner.take_sampled({}, step.scheduled_spec_decode_tokens)
                self.execute_model(step)
        finally:
            runner.speculator, runner.rejection_sample = speculator, rejection
        runner.reset()

    def defer_tokens(self) -> None:
        """Let steps end before their tokens are on the host, from now on, if nothing needs the
        tokens earlier.

        Other ranks, drafts and a KV connector need them within the step; and on a CPU nothing would
        be gained.
        """
        settings = self.settings
        # A KV connector, another rank, or a drafter reads the tokens within the step.
        alone = settings.world_size == 1 and settings.kv_transfer_config is None and settings.kv_connector is None
        needed = settings.num_speculative_tokens or not settings.use_kv_cache
        self.runner.defers_tokens = self.device.type == "cuda" and alone and not needed

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Run one step. Only one rank samples; it broadcasts the tokens to its group before the
        step ends.

        Earlier pipeline stages would have to wait for the last one, so they get the tokens with the
        request's next step. After `defer_tokens`, the output's tokens may still be on their way to
        the host.
        """
        output = self.runner.execute_model(scheduler_output)
        if isinstance(output, AsyncModelRunnerOutput) or scheduler_output.has_structured_output_requests:
            return output
        return self._shared(scheduler_output, output)

    def sample_tokens(self, grammar_output: GrammarOutput) -> ModelRunnerOutput:
        """Finish the step that `execute_model` began and that has been waiting for its grammar
        bitmask.
        """
        begun = self.runner.execute_model_state
        assert begun is not None
        output = self.runner.sample_tokens(grammar_output)
        assert isinstance(output, ModelRunnerOutput)
        return self._shared(begun.scheduler_output, output)

    def _shared(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> ModelRunnerOutput:
        if self.group.size > 1 and self.group.stage.size == 1 and scheduler_output.num_scheduled_tokens:
            self._share_sampled(scheduler_output, output.sampled_token_ids)
        return output

    def _share_sampled(self, scheduler_output: SchedulerOutput, sampled: dict[str, list[int]]) -> None:
        """Broadcast what rank 0 sampled, and its next drafts if the ranks keep them, padded with
        -1.

        The ranks do this among themselves, within the step, so that the next step can be sent
        before the engine has read this one's output. Every rank knows the table's shape from the
        settings and the scheduler output.
        """
        req_ids = list(scheduler_output.num_scheduled_tokens)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        # The most verified drafts, and one more token.
        width = 1 + max(map(len, drafts.values()), default=0)
        kept = self.runner.draft_tokens_handler.kept
        num_kept = self.settings.num_speculative_tokens if self.runner.draft_tokens_handler.keeps_drafts else 0
        rows = [_padded(sampled.get(req_id, []), width) + _padded(kept.get(req_id, []), num_kept) for req_id in req_ids]
        table = torch.tensor(rows, device=self.device)  # [requests, verified drafts + 1 + next drafts]
        self.group.broadcast(table)
        if self.group.rank > 0:  # rank 0 has put its own tokens into its batch
            rows = table.tolist()
            sampled, drafts = (_columns(req_ids, rows, part) for part in (slice(width), slice(width, None)))
            self.runner.take_sampled(sampled, drafts)

    def reset(self) -> None:
        """Drop all requests, in whatever state a failed step left them, and rejoin the group."""
        self.runner.reset()
        self.runner.kv_connector.reset()
        self.group.rejoin()

    def shutdown(self) -> None:
        """Shut down the KV connector, if there is one."""
        self.runner.kv_connector.shutdown()

    def leave_group(self) -> None:
        """Make the other ranks fail instead of waiting for this one."""
        self.group.leave()

    def take_draft_token_ids(self) -> dict[str, list[int]]:
        """Return the drafts to follow the last step's tokens, by request id, and clear them."""
        return self.runner.draft_tokens_handler.take()

    def kv_cache_bytes(self) -> int:
        """Return the bytes of this rank's KV cache, including a drafter's."""
        caches = self.runner.named_kv_caches().values()
        return sum(tensor.nbytes for tensors in caches for tensor in tensors)


def _padded(token_ids: list[int], width: int) -> list[int]:
    return token_ids + [-1] * (width - len(token_ids))


def _columns(req_ids: list[str], rows: list[list[int]], part: slice) -> dict[str, list[int]]:
    """Return the token ids in these columns of a shared table, by request id, for the requests
    that have any.
    """
    unpadded = ([token_id for token_id in row[part] if token_id >= 0] for row in rows)
    return {req_id: token_ids for req_id, token_ids in zip(req_ids, unpadded, strict=True) if token_ids}


def worker_of_rank(settings: WorkerSettings, address: tuple[str, int], rank: int) -> Worker:
    """Return the worker of one of several ranks, each in its own process; `address` is the host and
    port of their rendezvous.
    """
    return Worker(settings, join_group(settings, address, rank))


def join_group(settings: WorkerSettings, address: tuple[str, int], rank: int) -> GroupCoordinator:
    """Initialize torch.distributed's default group: NCCL between GPUs, gloo between processes on a
    CPU.

    A group over gloo can be left and joined again, so the ranks survive an exception on any of
    them. NCCL's cannot: its communicators are captured in CUDA graphs, and a rank that waits in a
    kernel notices nothing.
    """
    host, port = address
    size = settings.world_size
    device = device_of_rank(settings.device, rank)
    tp = settings.tensor_parallel_size
    stages = settings.pipeline_parallel_size
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, settings.num_threads // size))
        if host == LOOPBACK_ADDRESS:  # gloo would resolve the host's own name, which may fail
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    # The engine runs it; the ranks find each other there.
    store = dist.TCPStore(host, port, size, is_master=False)

    def connect(number: int) -> dist.ProcessGroup | None:
        of_this_group = dist.PrefixStore(str(number), store)  # apart from the addresses of earlier groups
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=of_this_group,
            rank=rank,
            world_size=size,
            device_id=device if device.type == "cuda" else None,
        )
        # A rank that left at once, for another reset, would cut connections that others are still
        # making.
        of_this_group.set(f"connected {rank}", "")
        of_this_group.wait([f"connected {other}" for other in range(size)])
        if tp == 1 or stages == 1:  # the default group is the stage's
            return None
        # All ranks must make all of these groups, in the same order; each belongs to one.
        groups = [dist.new_group(list(range(stage * tp, (stage + 1) * tp))) for stage in range(stages)]
        own_group = groups[rank // tp]
        assert isinstance(own_group, dist.ProcessGroup)
        return own_group

    return GroupCoordinator(
        rank % tp, tp, None if device.type == "cuda" else connect, Stage(rank // tp, stages), connect(0)
    )


def device_of_rank(name: str, rank: int) -> torch.device:
    """Return the rank's own GPU, or the CPU that all ranks share. A rank on a machine of its own
    sees only one GPU.
    """
    return torch.device("cuda", rank % max(1, torch.cuda.device_count())) if name == "cuda" else torch.device(name)


def load(settings: WorkerSettings, device: torch.device, group: GroupCoordinator) -> Decoder:
    """Load the rank's part of the model; dtype "auto" is float32 on a CPU, else the checkpoint's
    own dtype.
    """
    dtype = "float32" if settings.dtype == "auto" and device.type == "cpu" else settings.dtype
    if settings.load_format == "dummy":
        config = ModelConfig.from_pretrained(settings.model)
        return random_model(config, settings.seed, device, dtype, group, settings.quantization)
    return load_model(settings.model, device, dtype, group, settings.quantization)[0]


def compile_loops(dtype: torch.dtype, kv_cache_dtype: str, num_speculative_tokens: int) -> None:
    """Compile what a CPU runs for a model of this dtype, if numba has not kept it from before."""
    cached = STORED_AS.get(kv_cache_dtype, dtype)
    if has_numba() and dtype in NUMBERS and cached in CACHES:
        loops("compile_ahead").compile_ahead(ELEMENTS[dtype], ELEMENTS[cached])
        if num_speculative_tokens:
            loops("rejection_loops").programs_for()


def load_drafter(settings: WorkerSettings, target: Decoder) -> Decoder | Eagle3Head | None:
    """Load the draft model in the target's dtype, or return None if this rank has none."""
    config = settings.speculative_config
    if config is None or config.model is None or not target.group.samples:
        return None
    if config.use_eagle:
        return load_eagle3(config.model, target)
    weight = target.embed_tokens.weight
    if settings.load_format == "dummy":
        return random_model(ModelConfig.from_pretrained(config.model), settings.seed, weight.device, weight.dtype)
    return load_model(config.model, weight.device, weight.dtype)[0]
