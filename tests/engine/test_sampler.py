"""The sampler: the right distribution, the right tokens, and the same token whatever else is in
the batch.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.sampling_params import SamplingParams
from minivllm.worker.sample import sampler
from minivllm.worker.sample.gumbel import gumbel_max, row_keys, waiting_times
from minivllm.worker.sample.sampler import Needs, argmax, sample
from minivllm.worker.sample.states import SamplingStates
from minivllm.worker.sample.top_k_top_p import mask_beyond_top_k_top_p

VOCAB = 12
LOGITS = torch.tensor([2.0, 1.5, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -30.0])


def draw(logits, params, prompts=None, outputs=None):
    """Sample one token for each row of parameters, prompts and outputs so far."""
    rows = len(params)
    prompts = prompts or [[0]] * rows
    outputs = outputs or [[]] * rows
    states = SamplingStates(rows)
    token_ids = np.zeros((rows, 64), np.int32)
    for row in range(rows):
        states.add_request(row, params[row])
        tokens = [*prompts[row], *outputs[row]]
        token_ids[row, : len(tokens)] = tokens
    num_prompt = np.array([len(prompt) for prompt in prompts])
    num_tokens = num_prompt + [len(output) for output in outputs]
    return sample(logits.clone(), states.metadata(np.arange(rows), token_ids, num_prompt, num_tokens))


def counts_of(params: dict, num: int = 20_000, logits: torch.Tensor = LOGITS) -> np.ndarray:
    """Count the tokens of `num` requests that differ only in their seed."""
    states = SamplingStates(1)
    states.add_request(0, SamplingParams(**params))
    nothing = np.zeros((1, 0), np.int32)
    metadata = states.metadata(np.zeros(num, int), nothing, np.zeros(num, int), np.zeros(num, int))
    metadata.values["seed"] = np.arange(num)
    return np.bincount(sample(logits.repeat(num, 1), metadata).token_ids, minlength=VOCAB)


def expected_probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Compute the probabilities by the book: in float64, one token after another."""
    scaled = logits.double().numpy() / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities[probabilities < min_p] = 0.0
    order = np.argsort(-probabilities, kind="stable")
    kept, mass = [], 0.0
    for token in order[: top_k or VOCAB]:
        kept.append(token)
    total = probabilities[kept].sum()
    for place, token in enumerate(kept):
        if mass >= top_p * total and top_p < 1.0:
            kept = kept[:place]
            break
        mass += probabilities[token]
    least = probabilities[kept[-1]]
    result = np.where(probabilities >= least, probabilities, 0.0)  # ties at the border stay
    return result / result.sum()


def is_plausible(counts: np.ndarray, probabilities: np.ndarray) -> bool:
    """Return whether counts pass Pearson's test at a level of 1e-4. The rarest tokens are pooled until at
    least five are expected.
    """
    possible = probabilities > 0
    assert not counts[~possible].any(), "an impossible token was drawn"
    order = np.argsort(probabilities[possible])
    observed, expected = counts[possible][order], probabilities[possible][order] * counts.sum()
    rare = int((expected.cumsum() < 5).sum()) + 1
    observed, expected = (np.append(each[:rare].sum(), each[rare:]) for each in (observed, expected))
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return not freedom or float(torch.special.gammaincc(*half)) > 1e-4


SETTINGS = [
    {}, {"temperature": 0.5}, {"top_k": 1}, {"top_k": 3}, {"top_p": 0.3}, {"top_p": 0.999}, {"min_p": 0.2},
    {"top_k": 5, "top_p": 0.7}, {"temperature": 1.7, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
]  # fmt: skip


@pytest.mark.parametrize("chosen", SETTINGS, ids=str)
def test_the_draw_has_the_right_distribution(chosen):
    assert is_plausible(counts_of(chosen), expected_probabilities(LOGITS, **chosen))


def uniforms(seeds, positions, vocab: int) -> np.ndarray:
    """Return the uniform numbers from 0 to 1 that underlie the noise: [rows, vocab]."""
    keys = torch.from_numpy(row_keys(np.asarray(seeds, np.uint64), np.asarray(positions)).view(np.int32))
    return -np.expm1(-waiting_times(keys, vocab).double().numpy())


@pytest.mark.parametrize("along", ["positions", "seeds", "tokens"])
def test_the_noise_is_uniform_and_neighbours_are_strangers(along):
    """Numbers and pairs of neighbours are tested along positions, seeds and token ids."""
    num, same = 20_000, np.zeros(20_000, int)
    uniform = {
        "positions": lambda: uniforms(same + 5, np.arange(num), 8)[:, 3],
        "seeds": lambda: uniforms(np.arange(num), same, 8)[:, 3],
        "tokens": lambda: uniforms([5], [0], num)[0],
    }[along]()
    assert 0.0 < uniform.min() < 1e-3
    assert 1.0 - 1e-3 < uniform.max() <= 1.0
    assert is_plausible(np.histogram(uniform, 64, (0, 1))[0], np.full(64, 1 / 64))
    pairs = np.histogram2d(uniform[:-1], uniform[1:], 8, ((0, 1), (0, 1)))[0].ravel()
    assert is_plausible(pairs, np.full(64, 1 / 64))


def test_two_tokens_of_two_rows_share_no_noise():
    noise = uniforms(np.repeat(np.arange(40), 40), np.tile(np.arange(40), 40), 64).ravel()
    assert len(np.unique(noise)) > 0.99 * len(noise)  # a float32 has few numbers: some meet by chance


def scores_of(logits: torch.Tensor, keys: np.ndarray, *tokens: torch.Tensor) -> torch.Tensor:
    """Score tokens by the definition: the best of each row, then each of `tokens` [rows]."""
    noise = -waiting_times(torch.from_numpy(keys.view(np.int32)), logits.shape[-1]).double().log()
    scores = logits.double() + noise
    return torch.stack([scores.amax(-1), *(scores.gather(-1, drawn[:, None])[:, 0] for drawn in tokens)])


@pytest.mark.parametrize("vocab", [1, 5, 256, 257, 4096])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 100.0])
def test_the_compiled_draw_is_the_definition(vocab, spread):
    """It skips no token that could win, whatever the logits, some of which exclude their token."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(100, vocab, generator=generator) * spread
    logits[::2].masked_fill_(torch.rand(50, vocab, generator=generator) < 0.5, -torch.inf)
    keys = row_keys(np.arange(100, dtype=np.uint64), np.arange(100) * 7)
    compiled = gumbel_max(logits, keys)
    best, drawn = scores_of(logits, keys, compiled)
    possible = logits.isfinite().any(-1)
    assert (best - drawn)[possible].max() < 1e-5
    assert not compiled[~possible].any()


def test_a_gpu_draws_by_the_same_definition(monkeypatch):
    """The form in torch, run here on the CPU, and the compiled one give the same tokens, or two
    with almost equal scores.
    """
    logits = torch.randn(400, 3000, generator=torch.Generator().manual_seed(0))
    keys = row_keys(np.arange(400, dtype=np.uint64), np.zeros(400, int))
    compiled = gumbel_max(logits, keys)
    monkeypatch.setattr("minivllm.worker.sample.gumbel.has_numba", lambda: False)
    drawn = gumbel_max(logits, keys)
    assert (drawn != compiled).sum() <= 1
    best, *both = scores_of(logits, keys, drawn, compiled)
    assert (best - torch.stack(both)).max() < 1e-5


def test_a_rounding_of_the_logits_changes_a_token_only_where_two_are_as_good_as_equal():
    """Quantized weights and other batch shapes round differently. If draws walked along cumulative
    probabilities, every border would shift, and one draw in a few thousand would fall on its other
    side.
    """
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(10_000, 512, generator=generator)
    rounded = logits * (1 + 1e-6 * torch.randn(logits.shape, generator=generator))
    keys = row_keys(np.arange(len(logits), dtype=np.uint64), np.zeros(len(logits), int))
    changed = gumbel_max(logits, keys) != gumbel_max(rounded, keys)
    assert changed.sum() <= 2


CHOICES = {
    "temperature": [0.0, 0.5, 1.0], "top_k": [0, 3], "top_p": [1.0, 0.6], "min_p": [0.0, 0.1], "logprobs": [None, 2],
    "repetition_penalty": [1.0, 1.3], "frequency_penalty": [0.0, 0.4], "logit_bias": [None, {2: 3.0}],
}  # fmt: skip
PARAMS = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**63 - 1), **{name: st.sampled_from(values) for name, values in CHOICES.items()}}
)


@given(st.lists(st.tuples(PARAMS, st.lists(st.integers(0, VOCAB - 1), max_size=8)), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_a_request_gets_the_same_token_alone_and_in_any_batch(requests):
    generator = torch.Generator().manual_seed(len(requests))
    logits = torch.randn(len(requests), VOCAB, generator=generator)
    params = [SamplingParams(**chosen) for chosen, _ in requests]
    outputs = [output for _, output in requests]
    together = draw(logits, params, outputs=outputs)
    for row, theirs in enumerate(params):
        alone = draw(logits[row : row + 1], [theirs], outputs=[outputs[row]])
        assert alone.token_ids == [together.token_ids[row]]
        if theirs.logprobs is not None:
            assert alone.logprobs == [together.logprobs[row]]


def test_a_greedy_batch_is_one_argmax_and_ties_go_to_the_first():
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    assert draw(logits, [SamplingParams(temperature=0.0)] * 2).token_ids == [1, 0]
    assert [values.tolist() for values in argmax(logits)] == [[1, 0], [3.0, 5.0]]
    filtered = SamplingParams(temperature=0.0, top_k=5, top_p=0.5)
    assert not Needs.of(filtered), "filters cannot change the most likely token"


@given(st.integers(0, 2**32), st.sampled_from([0, 1, 5, 60, 64, 65, 400]), st.sampled_from([1.0, 0.1, 0.9, 0.9999]))
@settings(max_examples=30, deadline=None)
def test_top_k_and_top_p_on_a_large_vocabulary(seed, top_k, top_p):
    """The result must not depend on whether the first top-k look was enough."""
    generator = torch.Generator().manual_seed(seed)
    flat, peaked = torch.randn(1000, generator=generator) * 0.1, torch.randn(1000, generator=generator) * 5
    logits = torch.stack([flat, peaked])
    masked = logits.clone()
    mask_beyond_top_k_top_p(masked, torch.tensor([top_k] * 2), torch.tensor([top_p] * 2))
    for row, original in zip(masked, logits, strict=True):
        order = original.argsort(descending=True)[: top_k or 1000]
        probabilities = original[order].double().softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        kept = int((before < top_p).sum()) if top_p < 1.0 else len(order)
        # In float32 the border may fall one token earlier or later.
        assert abs(int(row.isfinite().sum()) - kept) <= 1
        assert row[order[0]].isfinite()


def test_penalties_by_the_book(monkeypatch):
    seen = []
    monkeypatch.setattr(sampler, "argmax", lambda logits: seen.append(logits.clone()) or argmax(logits))
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    draw(torch.tensor([[4.0, 3.0, -1.0, 1.9]]), [params], prompts=[[0]], outputs=[[1, 2, 2]])
    # token 0 is in the prompt alone; 1 once, 2 twice in the output; 3 nowhere
    assert seen[-1].tolist() == [[2.0, 1.5 - 0.5 - 0.25, -2.0 - 1.0 - 0.25, pytest.approx(1.9)]]


def test_bias_allowed_tokens_bad_words_and_minimum_length():
    logits = torch.arange(6.0).unsqueeze(0)
    greedy = {"temperature": 0.0}

    def first(outputs=(), **chosen):
        return draw(logits, [SamplingParams(**greedy, **chosen)], outputs=[list(outputs)]).token_ids[0]

    assert first() == 5
    assert first(logit_bias={1: 10.0}) == 1
    assert first(allowed_token_ids=[0, 3]) == 3
    assert first(min_tokens=2, all_stop_token_ids=frozenset({5, 4})) == 3
    assert first([1, 1], min_tokens=2, all_stop_token_ids=frozenset({5, 4})) == 5
    assert first(bad_words_token_ids=((5,),)) == 4
    assert first([2], bad_words_token_ids=((2, 5),)) == 4
    assert first([3], bad_words_token_ids=((2, 5),)) == 5
    assert first(bad_words_token_ids=((2, 5),)) == 5
    assert first(allowed_token_ids=[0, 3], logit_bias={0: 50.0}) == 0


def test_logprobs_are_the_models_own_and_the_chosen_token_is_first():
    params = SamplingParams(temperature=0.0, logprobs=2, logit_bias={9: 50.0})
    output = draw(LOGITS.repeat(2, 1), [params, SamplingParams(temperature=0.0)])
    assert output.logprobs[1] is None
    entry = output.logprobs[0]
    raw = LOGITS.log_softmax(-1)
    assert entry.token_ids == [9, 0, 1]
    assert entry.ranks == [10, 1, 2]
    assert entry.logprobs == [raw[9].item(), raw[0].item(), raw[1].item()]


def test_a_greedy_token_has_the_same_logprob_twice():
    """Clients compare the two floats for equality."""
    entry = draw(LOGITS.unsqueeze(0), [SamplingParams(temperature=0.0, logprobs=1)]).logprobs[0]
    assert entry.token_ids == [0, 0]
    assert entry.logprobs[0] == entry.logprobs[1]


@pytest.mark.parametrize(("number", "entries"), [(0, 1), (3, 4), (-1, VOCAB + 1), (100, VOCAB + 1)])
def test_how_many_logprobs(number, entries):
    drawn = draw(LOGITS.unsqueeze(0), [SamplingParams(temperature=0.0, logprobs=number)])
    assert len(drawn.logprobs[0].token_ids) == entries
