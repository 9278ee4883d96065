"""Load weights from safetensors files into the decoder, or fill it with random weights of the same
shapes.

Checkpoints store q, k, v and the two halves of the MLP separately; the decoder merges them, and a
rank of a tensor-parallel group has a part of each. A `Slot` says which part of a stored tensor
fills which rows of a parameter.

In vLLM v0.33.0 the `weight_loader` functions of `vllm/model_executor/layers/linear.py` do this.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minivllm.config import ModelConfig
from minivllm.config.model_files import config_path, hub_file, local_path, read_json_object
from minivllm.errors import MinivllmError
from minivllm.kernels.packed_weights import row_width
from minivllm.models.decoder import FAMILIES, Decoder
from minivllm.models.latent_attention import latent_rows, query_rows
from minivllm.models.linear import UNQUANTIZED, Linear
from minivllm.models.parallel import GroupCoordinator, kv_part
from minivllm.models.quantized import QuantizedLinearMethod, Rounding
from minivllm.models.quantized_checkpoint import GPTQFormat, packed_format
from minivllm.platforms.device_memory import refuse_beyond_memory

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# A source of quantized weights: the method of the layers' linears (`method`), and the tensors under
# that method's names (`convert`).
Quantization = Rounding | GPTQFormat
INITIAL_SPREAD = 0.02  # standard deviation of random weights, the families' default initializer_range


@dataclass(frozen=True)
class Slot:
    """The destination of a stored tensor: its part `index` of `parts` along `dim` goes to `target`
    (rows of a parameter).

    `repeat`: repeat each entry along `dim` this many times, so that each piece of a group that is
    split across ranks has the group's scale. `zero`: fill with zeros instead, since another rank
    adds this tensor to the sum. `order`: indices of the part's rows, in the order in which they go
    into the target; None keeps their own order.
    """

    target: Tensor
    dim: int = 0
    index: int = 0
    parts: int = 1
    repeat: int = 1
    zero: bool = False
    order: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the stored tensor."""
        shape = list(self.target.shape)
        shape[self.dim] = shape[self.dim] * self.parts // self.repeat  # undo both, to see what is stored
        return torch.Size(shape)

    def fill(self, stored: Tensor) -> None:
        """Fill the target from a stored tensor of this `shape`."""
        if self.zero:
            self.target.zero_()
        else:
            width = self.target.shape[self.dim]
            if self.repeat > 1:
                stored = stored.repeat_interleave(self.repeat, self.dim)
            # The rank's own part, still in the order of the checkpoint.
            part = stored.narrow(self.dim, self.index * width, width)
            self.target.copy_(part if self.order is None else part[self.order.to(part.device)])


def load_model(
    path_or_name: str | Path,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    group: GroupCoordinator | None = None,
    quantization: str | None = None,
) -> tuple[Decoder, ModelConfig]:
    """Load a model and its weights from a local directory or the Hugging Face hub.

    Args:
        path_or_name: a directory with `config.json` and safetensors files, or a model's name on the
            hub.
        device: where the weights go.
        dtype: of weights and computation; "auto" is the checkpoint's own.
        group: the ranks that the model is divided over; this rank's part is loaded. None for no
            division.
        quantization: "int8" or "int4" rounds the layers' linears as they are read.

    Returns:
        The model (or this rank's part of it), and the config of the whole model.

    Raises:
        UnsupportedModelError: the decoder does not support this model.
        MinivllmError: a file is missing, or a tensor is missing, unexpected or of another shape;
            the message names it.
    """
    config = ModelConfig.from_pretrained(path_or_name)
    scheme = quantization_of(config, quantization)
    model = _empty_model(config, device, dtype, group, scheme)
    tensors = stored_tensors(weight_files(path_or_name))
    load_weights(model, scheme.convert(tensors, model.embed_tokens.weight) if scheme else tensors)
    return model, config


def random_model(
    config: ModelConfig,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    group: GroupCoordinator | None = None,
    quantization: str | None = None,
) -> Decoder:
    """Return a model with the real shapes and random weights determined by the seed, for tests and
    measurements.

    All ranks of a `group` get parts of the same model, and `quantization` rounds that model.
    """
    scheme = quantization_of(config, quantization)
    model = _empty_model(config, device, dtype, group, scheme)
    # Ordinary weights are rounded; a packed checkpoint has random integers of its own. On "meta"
    # there are only shapes.
    rounded = isinstance(scheme, Rounding)
    tensors = _random_tensors(_empty_model(config, "meta", dtype, None, None if rounded else scheme), seed, device)
    load_weights(model, scheme.convert(tensors, model.embed_tokens.weight) if rounded else tensors)
    return model


def quantization_of(config: ModelConfig, quantization: str | None) -> Quantization | None:
    """Return how the layers' linears are quantized, in the checkpoint or by request, or None if
    they are not.

    Raises:
        UnsupportedModelError: the checkpoint's quantization is not supported.
        MinivllmError: the quantization is unknown, or the checkpoint is already quantized.
    """
    if quantization and config.quantization:
        raise MinivllmError(
            f"the checkpoint is already quantized ({config.quantization}), so its weights cannot be quantized to "
            f"{quantization!r} again: leave quantization out, or use the unquantized checkpoint"
        )
    return Rounding(quantization) if quantization else packed_format(config)


def load_weights(model: Decoder, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy tensors, named as in a Hugging Face checkpoint, into the model.

    Raises:
        MinivllmError: a tensor is missing, unexpected, given twice, of another shape, or not
            finite; the message names it.
    """
    slots = checkpoint_slots(model)
    fill_slots(slots, ((name, tensor) for name, tensor in tensors if not _is_left_out(model, slots, name, tensor)))


def fill_slots(slots: dict[str, Slot], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy each tensor into the slot of its name.

    Raises:
        MinivllmError: in the same cases as in `load_weights`.
    """
    missing = set(slots)
    extremes: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name not in slots:
            raise MinivllmError(f"the checkpoint has a tensor {name!r} that this model does not have")
        if name not in missing:
            raise MinivllmError(f"the checkpoint has the tensor {name!r} twice")
        if tensor.shape != slots[name].shape:
            shapes = f"{tuple(tensor.shape)}, but the config needs {tuple(slots[name].shape)}"
            raise MinivllmError(f"the tensor {name!r} of the checkpoint has the shape {shapes}")
        # Integers would be copied as if they were weights.
        if tensor.is_floating_point() != slots[name].target.is_floating_point():
            raise MinivllmError(
                f"the tensor {name!r} of the checkpoint is stored as {tensor.dtype}, which the model config does not "
                "mention: a quantized checkpoint needs its quantization_config"
            )
        slots[name].fill(tensor)
        missing.remove(name)  # a second one of this name is refused
        target = slots[name].target
        if target.is_floating_point():
            # Now the data is in the CPU's caches; a GPU is not waited for. A NaN becomes both
            # extremes.
            extremes[name] = torch.stack(torch.aminmax(target))  # [2]
    _refuse_non_finite(extremes)
    if missing:
        some = ", ".join(sorted(missing)[:3])
        raise MinivllmError(f"the checkpoint lacks {len(missing)} of the model's {len(slots)} tensors, such as {some}")


def _is_left_out(model: Decoder, slots: dict[str, Slot], name: str, tensor: Tensor) -> bool:
    """Return whether this model may ignore a stored tensor."""
    tied = model.config.tie_word_embeddings and name == "lm_head.weight"
    if tied or name.endswith("rotary_emb.inv_freq"):
        return True  # redundant tensors that some checkpoints store
    if name in slots:
        return False
    # GPTQ tools write a zero bias for linears that have none.
    return _is_on_another_stage(model, name) or (name.endswith(".bias") and not tensor.any())


def _is_on_another_stage(model: Decoder, name: str) -> bool:
    if model.group.stage.size == 1:
        return False
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is None:
        return name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    # A layer beyond the whole model is an error, not another stage's.
    in_model = int(layer[1]) < model.whole_config.num_hidden_layers
    return in_model and not model.start_layer <= int(layer[1]) < model.end_layer


def _refuse_non_finite(extremes: dict[str, Tensor]) -> None:
    """Raise if any tensor holds NaN or infinity, which attention and norms would spread to all
    tokens.
    """
    if not extremes:
        return
    finite = torch.stack(list(extremes.values())).isfinite().all(-1).tolist()
    wrong = [name for name, is_finite in zip(extremes, finite, strict=True) if not is_finite]
    if wrong:
        others = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        dtype = str(extremes[wrong[0]].dtype).removeprefix("torch.")
        raise MinivllmError(
            f"the tensor {wrong[0]!r} of the checkpoint holds NaN or infinity{others}, or numbers beyond {dtype}: the "
            'file is damaged, or needs a dtype with a wider range (dtype="float32" or "bfloat16")'
        )


def checkpoint_slots(model: Decoder) -> dict[str, Slot]:
    """Return the slot of each tensor of a Hugging Face checkpoint, by tensor name."""
    slots = slots_of(model, model.config, model.group, kv_part(model.whole_config, model.group))
    return {name if name.startswith("lm_head") else f"model.{name}": slot for name, slot in slots.items()}


def slots_of(
    module: nn.Module, config: ModelConfig, group: GroupCoordinator, shared: tuple[int, int]
) -> dict[str, Slot]:
    """Return the slots of a module's parameters by name, with merged projections under their
    separate names.

    `config` describes the part that the module holds; `shared` is (index, number of parts) of its
    share of the keys and values.
    """
    slots = {}
    merged = merged_projections(config, (group.rank, group.size), shared)
    for name, parameter in module.named_parameters():
        if not parameter.numel():
            continue  # another stage has it
        linear, _, what = name.rpartition(".")
        whole = next((part for part in merged if part in name), None)
        if whole is not None:  # the parts lie one below the other in the merged parameter
            parts = merged[whole]
            for part, target in zip(parts, parameter.split([part.rows for part in parts]), strict=True):
                slots[name.replace(whole, part.name)] = Slot(target, 0, *part.which, order=part.order)
        elif linear.endswith(("o_proj", "down_proj")):
            slots[name] = _slot_of_divided_row(module.get_submodule(linear), what, parameter, group)
        else:
            slots[name] = Slot(parameter)
    return slots


class Part(NamedTuple):
    """A stored projection that is `rows` rows of a merged one; `which` is (index, number of parts)
    of the rank's share, `order` is as in `Slot`.
    """

    name: str
    rows: int
    which: tuple[int, int]
    order: Tensor | None = None


def merged_projections(
    config: ModelConfig, mine: tuple[int, int], shared: tuple[int, int]
) -> dict[str, tuple[Part, ...]]:
    """Return the stored projections by the name of the merged one that they are parts of.

    `mine` and `shared` are (index, number of parts) of the rank's share: `mine` for tensors that
    are divided, `shared` for keys and values.
    """
    width = config.intermediate_size
    # In the order in which the merged parameter has them.
    gate_and_up = Part("gate_proj", width, mine), Part("up_proj", width, mine)
    if config.kv_lora_rank is not None:
        return {**_merged_latent(config, mine), "gate_up_proj": gate_and_up}
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    q_k_and_v = Part("q_proj", q, mine), Part("k_proj", kv, shared), Part("v_proj", kv, shared)
    return {"qkv_proj": q_k_and_v, "gate_up_proj": gate_and_up}


def _merged_latent(config: ModelConfig, mine: tuple[int, int]) -> dict[str, tuple[Part, ...]]:
    """Return the merged projections of latent attention: every rank has whole latents, but only its
    own heads' queries and up-projections.
    """
    whole = (0, 1)
    of_queries = query_rows(config)
    expanded = config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
    latent = Part("kv_a_proj_with_mqa", config.latent_width, whole, latent_rows(config))
    up = {"kv_b_proj": (Part("kv_b_proj", expanded, mine),)}
    if not config.q_lora_rank:
        return {"fused_qkv_a_proj": (Part("q_proj", len(of_queries), mine, of_queries), latent), **up}
    queries = {"q_b_proj": (Part("q_b_proj", len(of_queries), mine, of_queries),)}
    return {"fused_qkv_a_proj": (Part("q_a_proj", config.q_lora_rank, whole), latent), **queries, **up}


def _slot_of_divided_row(linear: nn.Module, what: str, parameter: Tensor, group: GroupCoordinator) -> Slot:
    """Return the slot of one tensor of a row-parallel linear, whose inputs are divided over the
    ranks.
    """
    assert isinstance(linear, Linear)
    if what == "bias":
        return Slot(parameter, zero=group.rank > 0)
    if what != "scales" or not isinstance(linear.method, QuantizedLinearMethod):
        return Slot(parameter, 1, group.rank, group.size)
    in_features = row_width(linear.packed)
    group_size = linear.method.group_size_of(in_features * group.size)
    if group_size == in_features * group.size:
        return Slot(parameter)  # one scale per row, which applies to all of the row's parts
    # The division has split groups: every piece needs its group's scale.
    pieces = group_size // linear.method.group_size_on_rank(in_features, group.size)
    return Slot(parameter, 1, group.rank, group.size, repeat=pieces)


def weight_files(path_or_name: str | Path) -> list[Path]:
    """Return the safetensors files of a model: a single one, or those listed in its index.

    Raises:
        MinivllmError: the model has none, or a file listed in the index is missing.
    """
    directory = config_path(path_or_name).parent
    local = local_path(path_or_name).exists()

    def fetch(filename: str) -> Path:
        if not local:
            return hub_file(str(path_or_name), filename)
        if not (directory / filename).is_file():
            raise MinivllmError(f"{directory} has no {filename}{_instead_of(filename, directory)}")
        return directory / filename

    sharded = (directory / INDEX_FILE).is_file() if local else _is_sharded_on_hub(str(path_or_name))
    if not sharded:
        return [fetch(SINGLE_FILE)]
    index = fetch(INDEX_FILE)  # it says which file each tensor is in
    try:
        return [fetch(name) for name in sorted(set(read_json_object(index)["weight_map"].values()))]
    except (KeyError, AttributeError, TypeError) as error:
        raise MinivllmError(f"{index} is not an index of safetensors files: {error!r}") from error


def _instead_of(filename: str, directory: Path) -> str:
    """Return advice about a missing file, if the directory's other files suggest any, or an empty
    string.
    """
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    if filename == SINGLE_FILE and shards:
        return f", and {INDEX_FILE} is missing, the index of {shards[0]} and the other shards: download it, too"
    if filename == SINGLE_FILE and any(directory.glob("*.bin")):
        return "; its *.bin files are pickles, which can run code: save the model as safetensors (save_pretrained)"
    return ""


def stored_tensors(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and contents of every tensor in these safetensors files.

    Raises:
        MinivllmError: a file cannot be opened, is not a valid safetensors file, or is truncated.
    """
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, framework="pt") as contents:
                for name in contents.keys():  # noqa: SIM118 (not a mapping)
                    yield name, contents.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise MinivllmError(f"{file} cannot be read as safetensors: {error}") from error


def torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype with this name.

    Raises:
        MinivllmError: models cannot be computed in this dtype.
    """
    if isinstance(name, torch.dtype):
        name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise MinivllmError(f"models cannot be computed in {name!r}; use one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _is_sharded_on_hub(name: str) -> bool:
    try:
        hub_file(name, INDEX_FILE)
    except MinivllmError:
        return False
    return True


def _empty_model(
    config: ModelConfig,
    device: str | torch.device,
    dtype: str | torch.dtype,
    group: GroupCoordinator | None,
    scheme: Quantization | None,
) -> Decoder:
    kind = torch_dtype(config.dtype if dtype == "auto" else dtype)
    _refuse_beyond_memory(config, torch.device(device), 4 if scheme else 8 * kind.itemsize, group)
    method = scheme.method if scheme else UNQUANTIZED
    with torch.device(device), default_dtype(kind):
        return Decoder(config, group, method).eval()


def _random_tensors(model: Decoder, seed: int, device: str | torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield random contents for every checkpoint tensor of the model."""
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, slot in checkpoint_slots(model).items():
        stored = torch.empty(slot.shape, dtype=slot.target.dtype, device=device)
        if name.endswith("norm.weight"):
            yield name, stored.fill_(1.0)
        elif not stored.is_floating_point():
            yield name, stored.random_(generator=generator)
        else:
            yield name, stored.normal_(0.0, INITIAL_SPREAD, generator=generator)


def _refuse_beyond_memory(
    config: ModelConfig, device: torch.device, least_bits: int, group: GroupCoordinator | None
) -> None:
    """Reject, before allocation, a model whose large matrices do not fit the device even at
    `least_bits` bits per weight.
    """
    if config.model_type not in FAMILIES or device.type == "meta":
        return  # the decoder rejects other families with a better message; meta tensors take no memory
    num_bytes = num_weights(config) * least_bits // 8 // (group.world_size if group else 1)
    what = f"the model ({config.num_hidden_layers} layers of width {config.hidden_size})"
    refuse_beyond_memory(num_bytes, device, what, "use a smaller model, or a dtype or checkpoint with fewer bits")


def num_weights(config: ModelConfig) -> int:
    """Count the numbers in a dense model's large matrices: all but norms and biases."""
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    attention = 2 * hidden * (heads + config.num_key_value_heads) * config.head_dim  # q, k, v and the output
    if rank is not None:
        keys, values = config.qk_nope_head_dim, config.v_head_dim
        query = (config.q_lora_rank or hidden) * heads * (keys + config.rotary_dim) + hidden * config.q_lora_rank
        attention = query + hidden * config.latent_width + heads * (rank * (keys + values) + values * hidden)
    layers = config.num_hidden_layers * (attention + 3 * hidden * config.intermediate_size)
    return layers + config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Give new tensors this dtype inside a `with` block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
