"""Exercise 08. A prompt is computed by one engine, its answer by another: which blocks move, and when may they be freed?

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
    """What the decoder's worker is to do: copy a peer's `remote_block_ids` into our `block_ids`, and then tell it.

    Without blocks it only tells: "I do not need them any more". `params` say where the peer is. This class is complete.
    """

    request_id: str
    params: dict
    block_ids: list = field(default_factory=list)
    remote_block_ids: list = field(default_factory=list)


# ---- the scheduler's side --------------------------------------------------------------------------------------------


class ConnectorScheduler:
    """What decides which blocks are to move. It stands beside the scheduler, and moves none itself.

    Both engines have one. A request has `request_id`, `num_computed_tokens`, `block_hashes` (of the full blocks of its
    tokens, one after another), `status.finish_reason` ("stop", "length", "abort", "error") and `kv_transfer_params`:
    None, or a dictionary. It may lack any of the keys, and a key may be False.

        do_remote_decode     true: compute the prompt here; somebody else will want the blocks
        do_remote_prefill    true: somebody else has computed the prompt; the other keys say where it is:
        remote_request_id, remote_block_ids, remote_num_tokens, and what `address` has
    """

    def __init__(self, block_size, address, lease=30.0, clock=time.monotonic):
        """Complete. `address`: a dictionary, how others reach this engine; `clock()`: the time now, in seconds.

        `reads`, `in_flight` and `pinned` are for you; nobody else looks at them.
        """
        self.block_size, self.address, self.lease, self.clock = block_size, address, lease, clock
        self.reads = []  # for the worker, in order
        self.in_flight = {}  # request id -> hashes of the blocks that are being read for it
        self.pinned = {}  # request id -> until when its blocks are held

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        """How many tokens, behind the computed ones, can come from elsewhere?

        num_computed_tokens  that many are in this engine's cache already: whole blocks, from the prefix cache
        returns  (0, False)     none: there is nothing to be had, or nothing is missing
                 (n, True)      n > 0 tokens; the request waits until they have come, and others go on
                 (None, False)  ask again in the next step: the block that the request lacks next is being read for
                                another request, and will then be in the prefix cache

        May be asked several times, and changes nothing. The peer has remote_num_tokens tokens, the last block partly;
        the prompt may have more of them.

        Example, blocks of 4: the peer has 10 tokens. With 0 computed: (10, True); with 8: (2, True).
        Traps: `kv_transfer_params` may be None. A last block that is not full has no hash. A block may be in flight, and
        the first one that is missing another one.
        """
        raise NotImplementedError("nothing to be had, on its way for another, or so many")

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        """The request has its blocks. Note what is to be read into which of them.

        block_ids            its whole block table, room for its answer included
        num_external_tokens  what `get_num_new_matched_tokens` has said, or 0: all that can be used is here

        Adds one `Read` to `reads` if the request's prompt is to come from elsewhere; none otherwise.

        Example, blocks of 4, the peer has 10 tokens in its blocks [7, 3, 9], 4 tokens are here, so 6 come: our block
        table [5, 2, 8, 6] makes Read(..., block_ids=[2, 8], remote_block_ids=[3, 9]).

        Traps: with 0 external tokens, the peer must still be told that it can free its blocks. After a preemption the
        request is asked about again, and then the peer has freed them: set do_remote_prefill to False here.
        """
        raise NotImplementedError("once for each request; which of its blocks are to be filled?")

    def build_connector_meta(self):
        """A step is scheduled: what the worker is to do from now on.

        returns  the reads noted since the last call, a list of `Read`, in order
        """
        raise NotImplementedError("hand the reads over, once")

    def request_finished(self, request, block_ids):
        """The request has ended. Must its blocks be held, although it needs them no more?

        block_ids  its block table; empty if it never had blocks
        returns    (True, params) if somebody will read them. `params` are for the request at the other engine:
                   do_remote_prefill (True), remote_request_id, remote_num_tokens (those computed here),
                   remote_block_ids (of the blocks with computed tokens), and all of `address`.
                   (False, None) otherwise; the blocks are freed at once

        From now on they are held for `lease` seconds.

        Traps: a request that was aborted, or has failed, is of no use to anybody. The table may be longer than what was
        computed; the last block may be partly filled, and counts. And on the other side: a request may end while its
        do_remote_prefill is still true, so before anything was read. Nobody will read it, so the peer is to be told.
        """
        raise NotImplementedError("held for whom, until when? and what has ended before it was read?")

    def update_connector_output(self, finished_sending, finished_recving):
        """The workers have told which requests' blocks were sent (as the peer says), and which were received, or lost.

        What was sent is no longer held, what was received no longer in flight. Both are sets of request ids, some perhaps
        unknown here.
        """
        raise NotImplementedError("forget them")

    def expired(self):
        """Requests whose lease is over, as a list of ids: the engine now frees their blocks.

        A lease is over when the clock shows its end. Each request is named once. What was sent in time is not named.
        """
        raise NotImplementedError("who is pinned, and for too long?")


# ---- the kernels, for Triton's interpreter ---------------------------------------------------------------------------
#
# A request's blocks lie anywhere in the cache, in each layer's tensors. What is sent is one piece. So it is gathered into
# a staging buffer, in one launch, and scattered at the other end.


@triton.jit
def gather_block_kernel(staging, cache, block_id, numbers, BLOCK: tl.constexpr):
    """Step 1: one block of one tensor. Grid (ceil(numbers / BLOCK),).

    staging   float32 [numbers], to be written;  cache: float32 [blocks, numbers]
    block_id  which block;  numbers: how many a block has
    BLOCK     a power of two; program i copies the numbers from i * BLOCK on, BLOCK of them or what is left

    Trap: the last program's places end behind the block: without a mask it reads the next one.
    """
    raise NotImplementedError("places, mask, load, store")


@triton.jit
def gather_kernel(staging, cache, block_ids, num_blocks, numbers, BLOCK: tl.constexpr):
    """Step 2: many blocks of all tensors in one launch. Grid (blocks wanted, tensors, ceil(numbers / BLOCK)).

    staging    float32 [blocks wanted, tensors, numbers]: all of a block in one piece, tensor after tensor
    cache      float32 [tensors, num_blocks, numbers]
    block_ids  int32 [blocks wanted]

    Program (i, t, j) copies part j of tensor t of block block_ids[i].
    Trap: in the cache the tensor comes first, in the staging buffer the block. `tl.num_programs(1)` is the number of
    tensors.
    """
    raise NotImplementedError("two offsets, which are not alike")


@triton.jit
def scatter_kernel(cache, staging, block_ids, num_blocks, numbers, BLOCK: tl.constexpr):
    """Step 3: the way back, with the same grid and arguments: staging is read, cache written.

    block_ids may have -1: this place of the staging buffer is not wanted, and nothing of it is read or written.
    """
    raise NotImplementedError("as before, the other way round; and what of -1?")
