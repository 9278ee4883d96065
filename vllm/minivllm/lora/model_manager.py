"""The two tiers of adapters: a few in slots on the device, more in host memory; both evict the
least recently used one.

Every adapter in a slot is in host memory too, so emptying a slot costs nothing, and filling it is
one copy. An adapter evicted from host memory is read from its folder again.

In vLLM v0.33.0: `vllm/lora/model_manager.py` (`LoRAModelManager`, `LRUCacheLoRAModelManager`).
"""

from collections import OrderedDict
from itertools import accumulate, pairwise
from typing import cast

import numpy as np
import torch
from torch import Tensor

from minivllm.config import LoRAConfig
from minivllm.core.adapter_slots import AdapterSlots
from minivllm.errors import MinivllmError
from minivllm.lora.layers import LoRALayerWeights, LoRALinearMethod, LoRAStep, Slice
from minivllm.lora.lora_model import LoRAPair, ModuleName
from minivllm.memory.adapters import linear_shapes
from minivllm.models.decoder import Decoder, DecoderLayer
from minivllm.models.linear import Linear
from minivllm.models.loader import Part, merged_projections, torch_dtype
from minivllm.models.parallel import kv_part

# A layer's number and a linear's name in it: (0, "qkv_proj").
LinearName = tuple[int, str]
# A rank's share of an adapter, in host memory.
LoRAModel = dict[LinearName, LoRALayerWeights]
# A slot has at least this many rows of A: the CPU computes four at once.
LEAST_RANK = 4


class LRUCacheLoRAModelManager:
    """The slots of one model, or of a rank's part of it, and the adapters in host memory.

    `registered` holds the adapters in host memory, the least recently used first; `slots` says
    which of them are in slots, and `pinned` which of them stay in both places. `step` is what the
    linears read in each step. `num_activations` counts how often a slot was filled.
    """

    def __init__(self, model: Decoder, config: LoRAConfig, slots: AdapterSlots) -> None:
        """Allocate slots for every linear inside the layers, on the model's device.

        Raises:
            MinivllmError: the model has linears that do not support adapters.
        """
        self.config = config
        self.slots = slots
        self.step = LoRAStep()
        weight = model.embed_tokens.weight
        self.device = weight.device
        self.dtype = weight.dtype if config.lora_dtype == "auto" else torch_dtype(config.lora_dtype)
        self.num_activations = 0
        self._whole_config = model.whole_config
        self._shapes = linear_shapes(model.whole_config)
        # The adapter whose numbers are in each slot, free or not: if it comes back, nothing is
        # copied.
        self._filled: list[int | None] = [None] * config.max_loras
        self.modules: dict[LinearName, LoRALinearMethod] = {}
        self._wrap(model)
        self.registered: OrderedDict[int, LoRAModel] = OrderedDict()
        self.pinned: set[int] = set()

    # The tiers

    @property
    def lora_index_to_id(self) -> list[int | None]:
        """Return the id of the adapter in each slot; None marks a free one."""
        return self.slots.slots

    def list_adapters(self) -> list[int]:
        """Return the ids of the adapters in host memory, from the least to the most recently used."""
        return list(self.registered)

    def add_adapter(self, lora_id: int, model: LoRAModel) -> None:
        """Add an adapter to host memory, or replace the one with this id; another may be evicted.

        Raises:
            MinivllmError: all adapters there are pinned.
        """
        if lora_id not in self.registered and len(self.registered) == self.config.capacity:
            self.remove_adapter(self._least_recently_used())
        self._filled = [None if held == lora_id else held for held in self._filled]
        self.registered[lora_id] = model
        self.registered.move_to_end(lora_id)

    def remove_adapter(self, lora_id: int) -> bool:
        """Remove an adapter from both tiers, pinned or not; return whether it was there."""
        if self.registered.pop(lora_id, None) is None:
            return False
        self.deactivate_adapter(lora_id)
        self._filled = [None if held == lora_id else held for held in self._filled]
        return True

    def activate_adapter(self, lora_id: int) -> int:
        """Return the slot of an adapter in host memory, assigning one if it has none.

        Raises:
            MinivllmError: all slots are pinned.
        """
        self.registered.move_to_end(lora_id)
        slot = self.slots.activate(lora_id)
        if self._filled[slot] != lora_id:
            self._filled[slot] = None  # if filling fails, the slot holds neither adapter
            self._fill(slot, self.registered[lora_id])
            self._filled[slot] = lora_id
            self.num_activations += 1
        return slot

    def deactivate_adapter(self, lora_id: int) -> None:
        """Free the slot of an adapter, which stays in host memory and is pinned no more."""
        self.pinned.discard(lora_id)
        self.slots.deactivate(lora_id)

    def pin_adapter(self, lora_id: int) -> None:
        """Keep an adapter in host memory, and in its slot, until it is deactivated or removed.

        Raises:
            MinivllmError: the adapter is not in host memory, or all slots are pinned.
        """
        if lora_id not in self.registered:
            raise MinivllmError(f"the adapter {lora_id} is not there: add it before it is pinned")
        self.activate_adapter(lora_id)
        self.pinned.add(lora_id)
        self.slots.pin(lora_id)

    # Sizes

    @property
    def slot_bytes(self) -> int:
        """Return the size of all slots on the device, in bytes."""
        return sum(method.nbytes for method in self.modules.values())

    def shape_of(self, module: ModuleName) -> tuple[int, int] | None:
        """Return (in, out) of a projection of the whole model, or None if there is no projection of
        that name.
        """
        layer, projection = module
        if layer >= self._whole_config.num_hidden_layers or projection not in self._shapes:
            return None
        outputs, inputs = self._shapes[projection]
        return inputs, outputs

    def share_of(self, pairs: dict[ModuleName, LoRAPair]) -> LoRAModel:
        """Return this rank's share of a whole adapter, in the form that its slots take."""
        share: LoRAModel = {}
        for (layer, linear), method in self.modules.items():
            adapted = [pairs.get((layer, piece.name)) for piece in method.slices]
            if any(adapted):
                parts = zip(adapted, method.slices, strict=True)
                share[layer, linear] = [pair and self._part(pair, piece) for pair, piece in parts]
        return share

    def _part(self, pair: LoRAPair, piece: Slice) -> tuple[Tensor, Tensor]:
        index, parts = piece.part
        a = pair.lora_a  # [rank, in]
        b = pair.lora_b.T  # [rank, out]
        if piece.divides_inputs:
            a = a.chunk(parts, dim=1)[index]  # this rank's inputs; B is whole
        else:
            b = b.chunk(parts, dim=1)[index]  # this rank's outputs; A is whole
        a, b = (tensor.to(self.dtype).contiguous() for tensor in (a, b))
        return (a.pin_memory(), b.pin_memory()) if self.device.type == "cuda" else (a, b)

    # Slots

    def _wrap(self, model: Decoder) -> None:
        linears = list(linears_of(model))
        slots = self.config.max_loras
        most = max(len(slices) for _, _, slices, _ in linears)
        # [linears, slices, slots], on the host and on the device; a linear's method holds a view of
        # its own.
        self._host_ranks = np.zeros((len(linears), most, slots), np.int32)
        self._ranks = torch.zeros(len(linears), most, slots, dtype=torch.int32, device=self.device)
        for number, (name, linear, slices, in_features) in enumerate(linears):
            linear.method = self.modules[name] = LoRALinearMethod(
                linear.method,
                slices,
                in_features,
                step=self.step,
                ranks=self._ranks[number, : len(slices)],
                max_rank=max(LEAST_RANK, self.config.max_lora_rank),
                dtype=self.dtype,
            )

    def _fill(self, slot: int, model: LoRAModel) -> None:
        for number, (name, method) in enumerate(self.modules.items()):
            ranks = method.set_lora(slot, model.get(name))
            self._host_ranks[number, : len(ranks), slot] = ranks
        # One copy for all linears.
        self._ranks[:, :, slot] = torch.from_numpy(self._host_ranks[:, :, slot].copy()).to(self.device)

    def _least_recently_used(self) -> int:
        for lora_id in self.registered:
            if lora_id not in self.pinned:
                return lora_id
        raise MinivllmError(
            f"all {self.config.capacity} places for adapters in host memory (max_cpu_loras) are pinned: remove an "
            "adapter, or raise their number"
        )


def linears_of(model: Decoder) -> list[tuple[LinearName, Linear, list[Slice], int]]:
    """Return the name, the linear, its slices and its number of inputs for each linear inside this
    rank's layers.
    """
    config, group = model.config, model.group
    which = group.rank, group.size
    merged = merged_projections(config, which, kv_part(model.whole_config, group))
    slices = {name: _side_by_side(parts) for name, parts in merged.items()}
    for name in ("o_proj", "down_proj"):
        slices[name] = [Slice(name, 0, config.hidden_size, which, divides_inputs=True)]
    linears = {
        "self_attn.qkv_proj": config.hidden_size,
        "self_attn.o_proj": config.num_attention_heads * config.head_dim,
        "mlp.gate_up_proj": config.hidden_size,
        "mlp.down_proj": config.intermediate_size,
    }
    named = [(path, path.rpartition(".")[2], width) for path, width in linears.items()]
    return [
        ((number, name), cast(Linear, layer.get_submodule(path)), slices[name], width)
        for number, layer in enumerate(model.layers)
        if isinstance(layer, DecoderLayer)  # else another stage has it
        for path, name, width in named
    ]


def _side_by_side(parts: tuple[Part, ...]) -> list[Slice]:
    edges = [0, *accumulate(part.rows for part in parts)]
    return [Slice(part.name, *span, part.which) for part, span in zip(parts, pairwise(edges), strict=True)]
