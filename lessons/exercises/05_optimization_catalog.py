"""Exercise 05. Write prefix caching's hashes and look-up, int8 with scales, and a kernel that quantizes into the cache.

Fill in the functions, then ask what is still missing:

    make check N=05

Needed: lesson 05 to the end of "CUDA graphs". No GPU: the kernels run in Triton's interpreter. As soon as the
checks of your `hash_block_tokens` and `quantize` pass, the same command runs the engine with them, beside the engine
with its own.
"""

import hashlib  # hashlib.sha256(data).digest(): 32 bytes
import struct  # struct.pack("<3q", 7, 8, 9): three integers as 8 bytes each

import torch

from minivllm.platforms.triton_utils import tl, triton


def hash_block_tokens(parent: bytes, token_ids, extra_keys: bytes = b"") -> bytes:
    """Hash a full block: return 32 bytes that stand for the block's tokens and for everything before it.

    `parent` is the hash of the block before (32 bytes; for the first block, a constant). `extra_keys` is what tokens do
    not show, such as a user's salt. Equal hashes must mean: equal parent, equal tokens in the same order, equal keys.

    Traps: token ids go up to 2**31 - 1, which takes four bytes. Every hash has the same length, however long the
    prefix. Python's `hash()` gives other values in another process, and its 8 bytes are too few.

    >>> a, b = hash_block_tokens(bytes(32), [5, 6]), hash_block_tokens(bytes(32), [5, 262])
    >>> len(a), a == b
    (32, False)
    """
    raise NotImplementedError("32 bytes made of the parent's hash, the tokens and the extra keys")


def block_hashes(token_ids, block_size: int, extra_keys: bytes = b"") -> list[bytes]:
    """Hash a prompt's full blocks, in order. The first block's parent is `bytes(32)`.

    `extra_keys` go into the first block's hash only: all later hashes have them through the chain.

    Trap: a block that is not full has no hash, since its next token would change it.

    >>> a, b = block_hashes([1, 2, 3, 4, 5], 2), block_hashes([9, 2, 3, 4, 5], 2)
    >>> len(a), a[0] == b[0], a[1] == b[1]
    (2, False, False)
    """
    raise NotImplementedError("a hash for each full block, each made from the hash before it")


def find_longest_cache_hit(hashes: list[bytes], num_tokens: int, block_size: int, cached: set[bytes]) -> int:
    """Count the tokens of a prompt that need not be computed: those of its cached blocks, up to the first that is not.

    `num_tokens` is the length of the prompt, `hashes` has its full blocks' hashes, and `cached` all hashes that lead to
    a block.

    Traps: after the first block that is not cached nothing counts, cached or not. The last token is always computed,
    since its output is what comes next: a hit has at most `num_tokens - 1` tokens, in whole blocks.

    >>> hashes = block_hashes(range(12), 4)
    >>> [find_longest_cache_hit(hashes[: n // 4], n, 4, set(hashes)) for n in (3, 4, 5, 8, 9, 12)]
    [0, 0, 4, 4, 8, 8]
    """
    raise NotImplementedError("count cached blocks from the start; leave the last token")


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows [..., n], of any float dtype, to (integers int8 [..., n], scales float32 [...]).

    A row's scale is its largest magnitude / 127; its integers are those nearest to number / scale, from −127 to 127.

    Traps: a row of zeros has scale 0, and nothing may be divided by it: its integers are zeros. `.to(torch.int8)` cuts
    off towards zero. Compute the scale of 16-bit rows in 32 bits from the start: a division in 16 bits loses digits
    that no `.float()` brings back.

    >>> integers, scales = quantize(torch.tensor([[127.0, -3.4], [0.0, 0.0]]))
    >>> integers.tolist(), scales.tolist()
    ([[127, -3], [0, 0]], [1.0, 0.0])
    """
    raise NotImplementedError("a scale for each row, and the nearest integers")


@triton.jit
def largest_kernel(rows, largest, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Step 1: store each row's largest magnitude. Grid: (rows,), so a program has one row.

    rows [rows, head_dim], contiguous, any float dtype; largest float32 [rows]. BLOCK_D is a power of two, HEAD_DIM or
    more: columns HEAD_DIM and up belong to the next row and must be masked.

    Read each row once. Useful: tl.program_id(0), tl.arange(0, BLOCK_D), tl.load(…, mask=…, other=0.0), tl.abs,
    tl.max(…, axis=0), tl.store.
    """
    raise NotImplementedError("one program, one row: load it with a mask, store the largest magnitude")


@triton.jit
def quantize_kernel(rows, integers, scales, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Step 2: do `quantize`, one row a program. Grid: (rows,). integers int8 [rows, head_dim]; scales float32 [rows].

    Still read the row only once: the scale and the integers come from the same load.

    Traps: a row of zeros. And tl has no `round` here: use tl.floor(x + 0.5).
    """
    raise NotImplementedError("the row's scale, its integers, and both stored")


@triton.jit
def quantize_and_cache_kernel(rows, slots, cache, scales, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Step 3: quantize on the way into the cache. Grid: (tokens, KV heads); tl.num_programs(1) is the number of heads.

    rows [tokens, heads, head_dim]; slots int64 [tokens]; cache int8 [slots, heads, head_dim]; scales float32
    [slots, heads]. Token t's head h goes to cache[slots[t], h] and scales[slots[t], h].

    Trap: slot −1 is padding. Write nothing for that token; its row need not be read.
    """
    raise NotImplementedError("write the integers and the scale to the token's slot; skip slot −1")
