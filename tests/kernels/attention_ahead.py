"""The attention kernel compiled for absent GPUs: registers and memory used by a configuration.

`compile_attention(target, configuration, ...)` compiles `unified_attention_kernel` as a launch on
such a GPU would, and `compile_combine` the kernel that merges splits.
"""

from __future__ import annotations

from minivllm.kernels.attention_configurations import Configuration
from minivllm.kernels.attention_launch import padded
from minivllm.kernels.unified_attention import COMBINED_AT_ONCE, combine_kernel, unified_attention_kernel
from minivllm.platforms.triton_utils import tl
from minivllm_lab.aot import Compiled, compile_for

POINTERS = {
    "float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "int8": "*i8", "float8_e4m3fn": "*fp8e4nv",
}  # fmt: skip
KV_HEADS = 8


def compile_attention(
    target: str,
    configuration: Configuration,
    *,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    head_dim: int = 128,
    group: int = 4,
    block_size: int = 16,
    sliding_window: int = 0,
    splits: int = 1,
    wide_offsets: bool = False,
    single: bool = False,
) -> Compiled:
    """Compile attention for `target`, one of `minivllm_lab.aot.TARGETS`, and return the resources
    that it uses.

    `dtype` is the name of q's torch dtype, `kv_dtype` that of the caches if different; `group`
    query heads share a KV head; `sliding_window` 0 means none; `wide_offsets` is for caches of
    2**31 elements or more; `single` is for steps in which no sequence has more than one query.
    Raises MinivllmError if it does not compile.
    """
    pointer, slot = POINTERS[dtype], KV_HEADS * head_dim
    dot_type = tl.float16 if (dtype, kv_dtype) == ("bfloat16", "float8_e4m3fn") else getattr(tl, dtype)
    arguments = {
        **dict.fromkeys(("out", "q"), pointer),
        **dict.fromkeys(("k_cache", "v_cache"), POINTERS[kv_dtype or dtype]),
        **dict.fromkeys(("k_scales", "v_scales"), "*fp32"),
        **dict.fromkeys(("query_start_loc", "seq_lens", "block_table"), "*i32"),
        **dict.fromkeys(("partial_acc", "partial_stats"), "*fp32" if splits > 1 else pointer),
        "num_seqs": 7, "num_splits": splits, "scale": 0.125,
        "q_stride": group * slot, "out_stride": group * slot,
        "block_stride": block_size * slot, "slot_stride": slot, "head_stride": head_dim, "table_stride": 7,
        "DOT_TYPE": dot_type, "OFFSET_TYPE": tl.int64 if wide_offsets else tl.int32, "GROUP": group,
        "HEAD_DIM": head_dim, "PADDED_DIM": padded(head_dim), "BLOCK_SIZE": block_size,
        "BLOCK_M": configuration.block_m, "TILE": configuration.tile, "WINDOW": sliding_window,
        "SPLIT": splits > 1, "SCALED": kv_dtype == "int8", "SINGLE": single,
    }  # fmt: skip
    options = {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages}
    return compile_for(target, unified_attention_kernel, arguments, options)


def compile_combine(target: str, *, dtype: str = "bfloat16", head_dim: int = 128, splits: int = 128) -> Compiled:
    """Compile the kernel that merges `splits` partial results, and return the resources that it
    uses.
    """
    arguments = {
        "out": POINTERS[dtype], "partial_acc": "*fp32", "partial_stats": "*fp32", "query_start_loc": "*i32",
        "num_seqs": 7, "num_splits": splits, "out_stride": 32 * head_dim, "HEAD_DIM": head_dim,
        "PADDED_DIM": padded(head_dim), "SPLITS": COMBINED_AT_ONCE,
    }  # fmt: skip
    return compile_for(target, combine_kernel, arguments)


def assert_fits(built: Compiled, most_spilled: int = 0) -> Compiled:
    """Expect the kernel's shared memory to fit, and hardly a register to be spilled; return it."""
    assert built.fits
    assert built.spilled <= most_spilled
    return built
