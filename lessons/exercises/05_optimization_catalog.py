"""Exercise 05. Four levers' cores: names of blocks, int8 with scales, drafts from the text, exact verification.

Fill in the functions, then ask what is still missing:

    make check N=05

Needed: lesson 05 up to "The mechanism". The solution is in vllm/05_optimization_catalog.py; try first. No GPU.
"""

import hashlib  # hashlib.sha256(data).digest() is a good H
import struct  # struct.pack("<3q", 7, 8, 9) makes bytes of three token ids

import torch


def block_hashes(token_ids, block_size: int, extra: bytes = b"") -> list[bytes]:
    """The names of a prompt's full blocks, in order: name = H(name of the block before, tokens of this block).

    Equal names must mean: equal tokens in this block, and equal everything before it. The first block has no block
    before it: use the same 32 bytes in every call. `extra` (a user's salt, an adapter's name) is part of H's input in
    the first block; later blocks have it through the chain.

    Traps: a block that is not full has no name, since its tokens will still change. Tokens alone are no name: keys and
    values depend on everything that came before them.

    >>> a, b = block_hashes([1, 2, 3, 4, 5], 2), block_hashes([9, 2, 3, 4, 5], 2)
    >>> len(a), a[0] == b[0], a[1] == b[1]
    (2, False, False)
    """
    raise NotImplementedError("one name for each full block, each made of the name before it and its own tokens")


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight bits a number: rows [..., n], any float dtype, to (integers int8 [..., n], scales float32 [...]).

    A row's scale is its largest magnitude / 127; its integers are the nearest to number / scale, from −127 to 127. So
    integers * scale is off by half a scale at most, and a row with a huge number in it spoils no other row.

    Traps: a row of zeros has scale 0, and nothing may be divided by it: its integers are zeros. `.to(torch.int8)`
    cuts off towards zero, it does not round.

    >>> integers, scales = quantize(torch.tensor([[127.0, -3.4], [0.0, 0.0]]))
    >>> integers.tolist(), scales.tolist()
    ([[127, -3], [0, 0]], [1.0, 0.0])
    """
    raise NotImplementedError("a scale for each row, and the nearest integers")


def propose(tokens: list[int], longest: int, count: int) -> list[int]:
    """Up to `count` drafts for what comes after `tokens`, without any model: text repeats itself.

    Take the last n tokens, n = longest. Find the first place where the same n tokens stand and at least one token
    follows them; the drafts are the `count` tokens that follow there, fewer where the text ends before. Where there is
    no such place, try n - 1, and so on down to 1. Nothing found, or an empty text: [].

    Traps: the last n tokens are where you took them from, so that place does not count; but an earlier place may
    overlap it. The first place wins, not the latest.

    >>> propose([1, 2, 3, 9, 1, 2], longest=3, count=2)
    [3, 9]
    >>> propose([7, 7, 7], longest=2, count=4)
    [7]
    """
    raise NotImplementedError("the longest ending that stood there before; what followed it")


def verify(drafts: list[int], favourites: list[int]) -> list[int]:
    """The new tokens of one forward pass over the last known token and the drafts, when decoding is greedy.

    `favourites` has one more entry than `drafts`: [0] is what the model says after the last known token, and [i] what
    it says after drafts[i - 1], if all drafts up to there were right. Keep drafts as long as each is what the model says
    in its place, then add the model's own word.

    Traps: there always is a new token, even if every draft is wrong or there are none. After the first wrong draft all
    other favourites answer a text that nobody wrote.

    >>> verify([5, 6, 7], [5, 6, 8, 1]), verify([5, 6], [5, 6, 8]), verify([4], [5, 6])
    ([5, 6, 8], [5, 6, 8], [5])
    """
    raise NotImplementedError("the drafts that the model says itself, and one token of its own")
