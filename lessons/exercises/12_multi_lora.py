"""Exercise 12. Many adapters, one model: group the tokens, keep the slots, guard the gate, and write both kernels.

Fill in the functions, then ask what is still missing:

    make check N=12

Needed: lesson 12 to the end of "The mechanism". As soon as the checks of your slots and your gate pass, the same
command runs the engine with them, and with three adapters in two slots.
"""

from minivllm.errors import MinivllmError  # for AdapterSlots
from minivllm.platforms.triton_utils import tl, triton

# ---- on paper --------------------------------------------------------------------------------------------------------


def first_steps():
    """Work out on paper which requests run in steps 1 to 4, and write the answer down.

    There are two LoRA slots (`max_loras`) and three seats (`max_num_seqs`). All wait from the start, in this order:

        A: adapter 1, runs for 2 steps
        B: adapter 2, runs for 4
        C: adapter 3, runs for 2
        D: no adapter, runs for 1
        E: adapter 2, runs for 1

    returns: a list of four lists of names, in the order of admission. The form, with wrong names:

        [["A"], ["A", "B", "C"], ["D"], ["E"]]

    Traps: a request that would need a third slot is passed over, and those behind it are tried. A running request keeps
    its slot.
    """
    raise NotImplementedError("write down four lists of names")


# ---- an adapter ------------------------------------------------------------------------------------------------------


def adapter_numbers(rank, projections):
    """Count the numbers of an adapter of this rank on these projections, given as (out, in).

    Each has A [rank, in] and B [out, rank].

    Example: rank 8 on one projection of 100 x 50: 1,200.
    """
    raise NotImplementedError("two matrices for each projection")


def applied(x, weight, a, b):
    """Compute x times (W + BA), transposed as in a linear layer, without ever making BA.

    x [tokens, in], weight [out, in], a [rank, in], b [out, rank] with the scale in it -> [tokens, out]

    Trap: where you put the brackets decides what is made on the way.
    """
    raise NotImplementedError("the base matmul, and two small ones added to it")


# ---- one forward for many --------------------------------------------------------------------------------------------


def group_tokens(token_slots):
    """Group the tokens by adapter. Only their indices are sorted.

    token_slots  int32 [tokens]: the slot of each token's adapter, -1 for none
    returns      three int32 tensors
                 order   the indices of the tokens that have an adapter, by slot; those of one slot in their order
                 active  the slots that occur, in ascending order
                 starts  [len(active) + 1]: where the tokens of active[i] begin in `order`, and where the last ones end

    Example: [2, 0, -1, 2, 0, 2] -> order [1, 4, 0, 3, 5], active [0, 2], starts [0, 2, 5].
    Traps: without any adapter, order and active are empty and starts is [0]. An unstable sort gives a different order
    in another step, and differently rounded sums.
    """
    raise NotImplementedError("a stable sort, without the -1; then count")


# ---- slots, and the gate ---------------------------------------------------------------------------------------------


class AdapterSlots:
    """Manages the LoRA slots on the device. The engine runs with this class in place of its own.

    slots  a list: the number of the adapter in each slot, or None

    Example, two slots:  activate(1), activate(2) -> [1, 2];  activate(3) -> [3, 2];  deactivate(2) -> [3, None];
    activate(1) -> [3, 1].
    """

    def __init__(self, max_loras):
        raise NotImplementedError("`max_loras` empty slots, none of them used yet")

    def activate(self, adapter):
        """Return the adapter's slot. It has one from now on, and is the most recently used.

        An adapter without a slot gets the first free one. If none is free, it gets that of the adapter whose last
        `activate` is longest ago, among those that are not pinned. If all are pinned, raise MinivllmError and say what
        would help.

        Trap: an adapter that has a slot keeps it, and counts as just used.
        """
        raise NotImplementedError("does it have one? is one free? which adapter must go?")

    def deactivate(self, adapter):
        """Empty the adapter's slot; a pinned adapter leaves too, and is pinned no more. Without a slot, do nothing."""
        raise NotImplementedError("empty its slot, and forget it")

    def pin(self, adapter):
        """Keep the adapter in its slot: others do not evict it. Without a slot, it gets one first, as by `activate`."""
        raise NotImplementedError("it has a slot, and stays there")


def admit(running, waiting, max_loras, seats):
    """Choose the waiting requests that may start.

    running    the adapters of all running requests, 0 for none
    waiting    those of the waiting requests, the head of the queue first
    max_loras  LoRA slots
    seats      how many more requests may run
    returns    a list of indices into `waiting`, ascending

    The running requests and those that start may have at most `max_loras` different adapters. A request that would
    bring one too many is passed over: it stays in the queue, and those behind it are tried.

    Examples: admit([1, 1], [2, 3, 1, 0], 2, 8) -> [0, 2, 3]. admit([1], [2, 3], 1, 8) -> [].
    Traps: the base model needs no slot. A request that starts in this call takes one, too.
    """
    raise NotImplementedError("walk through the queue; remember which adapters are active")


# ---- the kernels, for Triton's interpreter ---------------------------------------------------------------------------


@triton.jit
def rows_of_tile(order, starts, group, tile, TILE: tl.constexpr):
    """Step 1: load the tokens of one tile of a group. Return two tensors of TILE entries.

    order, starts  as `group_tokens` makes them
    group, tile    which group, and which of its tiles of TILE tokens: two numbers
    returns        the tokens (int64), 0 where there is none; and a mask of those that exist

    Example: order [1, 4, 0, 3, 5], starts [0, 2, 5], TILE 2. Group 1, tile 1: [5, 0] and [True, False].
    Trap: after the last token of a group comes the next group's first.
    """
    raise NotImplementedError("TILE entries, counted from the group's start; a mask at its end")


@triton.jit
def shrink_kernel(
    small, x, a, order, active, starts, IN, MAX_RANK: tl.constexpr,
    RANKS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step 2: compute small[token] = A[slot of its group] x[token]. Grid (tiles of the largest group, groups).

    small  fp32 [tokens, MAX_RANK]; rows of tokens without an adapter are not written
    x      [tokens, IN]
    a      [slots, MAX_RANK, IN]
    RANKS  MAX_RANK rounded up to a power of two: ranks MAX_RANK and up do not exist
    BLOCK  columns of x and of A that are read at a time; IN need not be a multiple of it

    Group `i` is that of slot active[i]. Loop over IN, and keep the sums in float32:
    `tl.dot(rows, tl.trans(down), sums, input_precision="ieee")`. Traps: a tile beyond the end of its group must read no
    adapter. After a row's end comes the next row.
    """
    raise NotImplementedError("rows_of_tile, a loop over IN, store")


@triton.jit
def expand_kernel(
    out, small, b, order, active, starts, OUT, MAX_RANK: tl.constexpr,
    RANKS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step 3: compute out[token] += B[slot of its group] small[token]. Grid (tiles, groups, ceil(OUT / BLOCK)).

    out  [tokens, OUT], which holds the base model's output; rows of tokens without an adapter stay as they are
    b    [slots, OUT, MAX_RANK]

    The third index says which BLOCK columns of `out` are this program's. The rest is as in step 2; convert the rows of
    `small` to b's type before the matmul, and the sum to out's.
    """
    raise NotImplementedError("load small, B and out; one matmul; store")
