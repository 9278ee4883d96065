"""Exercise 08. One engine computes the prompt, another the answer: decide which blocks move, and when they are freed.

Fill in the functions that raise, then ask what is still missing:

    make check N=08

Needed: lesson 08 to the end of "The mechanism". No GPU and no network. As soon as the checks of your connector
pass, the same command runs two engines with it, beside one without: the first computes prompts, the second answers.
"""

import time
from dataclasses import dataclass, field

from minivllm.platforms.triton_utils import tl, triton


@dataclass
class Read:
    """Tell the decoder's worker to copy a peer's `remote_block_ids` into our `block_ids`, and then to notify the peer.

    Without blocks the worker only notifies: "I do not need them any more". `params` say where the peer is. (Given.)
    """

    request_id: str
    params: dict
    block_ids: list = field(default_factory=list)
    remote_block_ids: list = field(default_factory=list)


# ---- the scheduler's side --------------------------------------------------------------------------------------------


class ConnectorScheduler:
    """Decide which blocks move. It works beside the scheduler, and moves no block itself.

    Both engines have one. A request has `request_id`, `num_computed_tokens`, `block_hashes` (of the full blocks of its
    tokens, in order), `status.finish_reason` ("stop", "length", "abort", "error") and `kv_transfer_params`:
    None, or a dictionary. It may lack any of the keys, and a key may be False.

        do_remote_decode     true: compute the prompt here; another engine will read the blocks
        do_remote_prefill    true: another engine has computed the prompt; the other keys say where it is:
        remote_request_id, remote_block_ids, remote_num_tokens, and what `address` has
    """

    def __init__(self, block_size, address, lease=30.0, clock=time.monotonic):
        """Start without reads and held requests. (Given.)

        `address` is a dictionary that says how others reach this engine; `clock()` returns the time in seconds.
        `reads`, `in_flight` and `held` are for you; no other code uses them.
        """
        self.block_size, self.address, self.lease, self.clock = block_size, address, lease, clock
        self.reads = []  # for the worker, in order
        self.in_flight = {}  # request id -> hashes of the blocks that are being read for it
        self.held = {}  # request id -> the time until which its blocks are held

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        """Count the tokens after the computed ones that another engine can supply.

        num_computed_tokens  that many are in this engine's cache already: whole blocks, from the prefix cache
        returns  (0, False)     none: the peer has nothing for us, or nothing is missing
                 (n, True)      n > 0 tokens; the request waits until they have come, and others go on
                 (None, False)  ask again in the next step: the block that the request lacks next is being read for
                                another request, and will then be in the prefix cache

        It may be called several times, and changes nothing. The peer has remote_num_tokens tokens, and its last block
        may be partly filled; the prompt may have more tokens.

        Example, blocks of 4: the peer has 10 tokens. With 0 computed: (10, True); with 8: (2, True).
        Traps: `kv_transfer_params` may be None. A last block that is not full has no hash. A block that is in flight
        need not be the first one that is missing.
        """
        raise NotImplementedError("nothing to read, on its way for another request, or n tokens")

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        """Record which of the request's newly allocated blocks are to be filled, and from where.

        block_ids            its whole block table, room for its answer included
        num_external_tokens  what `get_num_new_matched_tokens` has returned, or 0: everything useful is here already

        Add one `Read` to `reads` if the request's prompt comes from another engine, and none otherwise. If tokens come,
        note in `in_flight` the hashes of the blocks that they fill: the full ones, as far as the peer has them in full.

        Example, blocks of 4, the peer has 10 tokens in its blocks [7, 3, 9], 4 tokens are here, so 6 come: our block
        table [5, 2, 8, 6] makes Read(..., block_ids=[2, 8], remote_block_ids=[3, 9]).

        Traps: with 0 external tokens, the peer must still learn that it can free its blocks. After a preemption the
        scheduler asks about the request again, and by then the peer has freed them: set do_remote_prefill to False
        here.
        """
        raise NotImplementedError("once for each request; which of its blocks must be filled?")

    def build_connector_meta(self):
        """Return the worker's new reads, once a step is scheduled.

        returns  the reads recorded since the last call, a list of `Read`, in order
        """
        raise NotImplementedError("return the reads, once")

    def request_finished(self, request, block_ids):
        """Decide whether the blocks of a request that has ended must be held.

        block_ids  its block table; empty if it never had blocks
        returns    (True, params) if another engine will read them. `params` are for the request at the other engine:
                   do_remote_prefill (True), remote_request_id, remote_num_tokens (those computed here),
                   remote_block_ids (of the blocks with computed tokens), and all of `address`.
                   (False, None) otherwise; the blocks are freed at once

        From now on they are held, until their lease ends, `lease` seconds later: note that in `held`.

        Traps: a request that was aborted, or has failed, is useless to the other engine. The table may be longer than
        what was computed; the last block counts even if it is partly filled. And on the other side: a request may end
        while its do_remote_prefill is still true, so before anything was read. It never will be, so notify the peer.
        """
        raise NotImplementedError("held for which engine, until when? and what if it has ended before it was read?")

    def update_connector_output(self, finished_sending, finished_recving):
        """Take in the workers' report: whose blocks were sent (as the peer says), and whose were received, or lost.

        Blocks that were sent are no longer held, and those received no longer in flight. Both are sets of request ids,
        some perhaps unknown here.
        """
        raise NotImplementedError("forget them")

    def expired(self):
        """List the ids of the requests whose lease has expired: the engine now frees their blocks.

        A lease expires when the clock reaches its end. List each request once, and none whose blocks were sent in time.
        """
        raise NotImplementedError("which requests have been held for too long?")


# ---- the kernels, for Triton's interpreter ---------------------------------------------------------------------------
#
# A request's blocks are scattered over the cache, in each layer's tensors. They are sent in one piece. So one launch
# gathers them into a staging buffer, and another scatters them at the other end.


@triton.jit
def gather_block_kernel(staging, cache, block_id, numbers, BLOCK: tl.constexpr):
    """Step 1: gather one block of one tensor. Grid (ceil(numbers / BLOCK),).

    staging   float32 [numbers], to be written;  cache: float32 [blocks, numbers]
    block_id  which block;  numbers: how many a block has
    BLOCK     a power of two; program i copies BLOCK numbers, starting at i * BLOCK, or as many as are left

    Trap: the last program reaches beyond the block's end: without a mask it reads the next block.
    """
    raise NotImplementedError("offsets, mask, load, store")


@triton.jit
def gather_kernel(staging, cache, block_ids, num_blocks, numbers, BLOCK: tl.constexpr):
    """Step 2: gather many blocks of all tensors in one launch. Grid (blocks moved, tensors, ceil(numbers / BLOCK)).

    staging    float32 [blocks moved, tensors, numbers]: all of a block in one piece, tensor after tensor
    cache      float32 [tensors, num_blocks, numbers]
    block_ids  int32 [blocks moved]

    Program (i, t, j) copies part j of tensor t of block block_ids[i].
    Trap: in the cache the tensor comes first, in the staging buffer the block. `tl.num_programs(1)` is the number of
    tensors.
    """
    raise NotImplementedError("two offsets, which differ")


@triton.jit
def scatter_kernel(cache, staging, block_ids, num_blocks, numbers, BLOCK: tl.constexpr):
    """Step 3: copy back, with the same grid and arguments: staging is read, cache written.

    block_ids may have -1: this part of the staging buffer is not wanted; neither read nor write it.
    """
    raise NotImplementedError("as before, the other way round; and what of -1?")
