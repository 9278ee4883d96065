"""Parts of the engine that a caller may replace with their own, such as the solutions of the
exercises.

    LLM(model, parts=Parts(policy=SchedulingPolicy(victim=mine), attention=MyAttention))

A part takes the place of the engine's own and must offer what that one offers; the engine does not
check it. Parts are Python objects, so those of the core need it in this process: one rank, without
`multiprocess` (`AsyncLLM` then runs it in a thread). Those of a server's front end do not.

In vLLM v0.33.0 the whole scheduler is replaced by `scheduler_cls` (`vllm/config/scheduler.py`), an
attention backend by `register_backend` (`vllm/v1/attention/backends/registry.py`), a proposer by
the method `custom_class` (`vllm/config/speculative.py`); the other parts have no such place there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from minivllm.errors import MinivllmError

if TYPE_CHECKING:
    from minivllm.core.policy import SchedulingPolicy


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parts that replace the engine's own; None keeps the engine's own part.

    - `policy`: the scheduler's rules, a `core.policy.SchedulingPolicy`; the pool and the hash of
      its blocks, too.
    - `attention`: called as `worker.paged_attention.PagedAttention(kv_caches, scale,
      sliding_window)`, once the caches are allocated.
    - `draft_proposer`: called as `worker.spec_decode.ngram_proposer.NgramProposer(config,
      max_model_len)`, where `speculative_config` names a method that reads tokens and runs no
      model.
    - `rejection_sample`: called as `kernels.rejection_sample.rejection_sample(arguments)`, in each
      step with drafts.
    - `lora_slots`: called as `core.adapter_slots.AdapterSlots(max_loras)`, where there is
      `enable_lora`.
    - `kv_connector`: called as `core.kv_connector.KVConnectorBase_V1(config, role)`, once for each
      side, where there is a `kv_transfer_config`; its `kv_connector` is then not looked up.

    The front end's:

    - `output_collector`: called without arguments, once for each stream: `put(output or exception)`
      never waits, and `await get()` returns what is unread, joined; as
      `engine.async_llm.RequestOutputCollector`.
    - `stop_strings`: called with the list of stop strings, once for each request that has any:
      `push(text)` returns (the text to show, the stop string that ended it or None), `flush()` what
      was held back. See `engine.detokenizer.DetokenizerOfParts`.
    - `until_disconnected`: called as `entrypoints.openai.stream.until_disconnected(work,
      disconnected)`.
    """

    policy: SchedulingPolicy | None = None
    attention: Callable[..., Any] | None = None
    draft_proposer: Callable[..., Any] | None = None
    rejection_sample: Callable[..., Any] | None = None
    lora_slots: Callable[..., Any] | None = None
    kv_connector: Callable[..., Any] | None = None
    output_collector: Callable[..., Any] | None = None
    stop_strings: Callable[..., Any] | None = None
    until_disconnected: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name, part in self.replaced.items():
            if not callable(part):  # its repr may be long: a connector holds tensors
                raise MinivllmError(f"the part {name} is {part!r}; it must be a class or a function")

    @property
    def replaced(self) -> dict[str, Callable[..., Any]]:
        """The parts that are replaced, by name, except for the policy."""
        parts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "policy"}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def names(self) -> list[str]:
        """The names of the parts and rules that are replaced."""
        return [*(self.policy.replaced if self.policy else ()), *self.replaced]

    @property
    def names_in_core(self) -> list[str]:
        """The names of replaced parts that belong to the engine's core, not to its front end."""
        return [name for name in self.names if name not in FRONT_END]


FRONT_END = ("output_collector", "stop_strings", "until_disconnected")
"""Parts that are used where the server's event loop runs."""
NO_PARTS = Parts()
"""The engine as it is."""
