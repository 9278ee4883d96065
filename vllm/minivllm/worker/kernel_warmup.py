"""The steps that a worker runs before the first request, so that no request waits for a compiler.

On a CPU, short steps load numba's compiled loops from its cache. On a GPU, Triton compiles each
variant of a kernel when it first runs, which takes a second or more, and tries several
configurations to find the fastest. Capturing CUDA graphs does both for decode steps. The steps here
cover the rest, one at a time, with prompt lengths that need every variant: all powers of two up to
the largest step; powers of two after a long context, where the keys are divided into splits; and
drafts in powers of two.

These steps write to the null block, which is never read. Only the long contexts are spread over the
whole cache, which is still unused, because the configuration that is fastest when one block is read
again and again need not be the fastest otherwise.

In vLLM v0.33.0: `vllm/model_executor/warmup/kernel_warmup.py`.
"""

from collections.abc import Generator, Iterator

from minivllm.core.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from minivllm.sampling_params import SamplingParams

# Tokens of the steps with a long context: attention has its kernels for few tokens, some, and many.
BEHIND_A_CONTEXT = (1, 2, 4, 8, 16, 32, 64)


def warm_up_steps(
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    num_drafts: int = 0,
    num_blocks: int = 1,
) -> Iterator[SchedulerOutput]:
    """Yield the warm-up steps for a cache of `num_blocks` blocks; some of them verify up to
    `num_drafts` drafts of a request.
    """
    longest = max_model_len - 1
    finished: set[str] = set()
    most = min(max_num_batched_tokens, longest * max_num_seqs)  # tokens of the largest step
    for tokens in [*(1 << bit for bit in range(most.bit_length()) if 1 << bit < most), most]:
        step = _of_new_requests([(prompt, 0) for prompt in _divided(tokens, longest)], block_size, finished)
        yield step
        finished = set(step.num_scheduled_tokens)
    for tokens in BEHIND_A_CONTEXT:
        if tokens < min(longest, max_num_batched_tokens):
            step = _of_new_requests([(tokens, longest - tokens)], block_size, finished, num_blocks=num_blocks)
            yield step
            finished = set(step.num_scheduled_tokens)
    # A request of two tokens, its drafts and one more must fit its length and a step.
    most_drafts = max(0, min(num_drafts, longest - 3, max_num_batched_tokens - 2))
    for drafts in (1 << bit for bit in range(most_drafts.bit_length())):
        finished = yield from _verified(drafts, block_size, finished)
    yield SchedulerOutput([], CachedRequestData(), {}, 0, {}, set(), finished)


def _divided(tokens: int, longest: int) -> list[int]:
    """Divide `tokens` among as few prompts of at most `longest` tokens as possible; return their
    lengths.
    """
    count = -(-tokens // longest)  # rounded up
    return [tokens // count + (place < tokens % count) for place in range(count)]


def _of_new_requests(
    prompts: list[tuple[int, int]], block_size: int, finished: set[str], room: int = 1, num_blocks: int = 1
) -> SchedulerOutput:
    """Return a step of new requests, each given as (tokens to compute, tokens before them), with
    blocks for `room` more tokens each.

    The block ids cycle through the first `num_blocks` of the cache.
    """
    requests, counts = [], {}
    for place, (tokens, computed) in enumerate(prompts):
        name = f"warm-up {tokens} after {computed}, {place}"
        known = tokens + computed
        # Every second request is greedy, so that both ways of sampling run.
        params = SamplingParams(temperature=float(place % 2 == 0), seed=0)
        blocks = [block % num_blocks for block in range(-(-(known + room) // block_size))]
        requests.append(NewRequestData(name, [0] * known, [0] * known, blocks, computed, params))
        counts[name] = tokens
    return SchedulerOutput(requests, CachedRequestData(), counts, sum(counts.values()), {}, set(), finished)


def _verified(num_drafts: int, block_size: int, finished: set[str]) -> Generator[SchedulerOutput, None, set[str]]:
    """Yield a request's two steps, its prompt and the verification of its drafts; return the set of
    its id.
    """
    prompt = _of_new_requests([(2, 0)], block_size, finished, 1 + num_drafts)
    yield prompt
    (name,) = prompt.num_scheduled_tokens
    known = CachedRequestData([name], [None], [2], [[]])
    count = 1 + num_drafts
    yield SchedulerOutput([], known, {name: count}, count, {name: [0] * num_drafts}, set(), set())
    return {name}
