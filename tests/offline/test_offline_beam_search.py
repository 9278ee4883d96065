"""Beam search through the engine finds what a search on transformers' logits finds, and shares
its parents' blocks.
"""

import pytest
import torch

from minivllm import LLM, BeamSearchParams, MinivllmError, SamplingParams
from minivllm.config import EMBEDDED_MODEL

PROMPTS = ["def add(a, b):\n    return", "import"]


@pytest.fixture(scope="module")
def llm():
    return LLM(EMBEDDED_MODEL, device="cpu", max_model_len=64, num_gpu_blocks_override=200)


@pytest.fixture(scope="module")
def oracle():
    """Return a function from texts of equal length to the log probabilities of the next token."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)

    @torch.no_grad()
    def log_probabilities(texts):
        return model(torch.tensor(texts)).logits[:, -1].log_softmax(-1)

    return log_probabilities


def search(oracle, prompt, params, ends=frozenset()):
    """Run a beam search in the plainest form: whole texts and scores, nothing shared."""
    beams, ended = [(prompt, 0.0)], []
    vocabulary = params.allowed_token_ids
    for _ in range(params.max_tokens):
        rows = oracle([tokens for tokens, _ in beams])
        children = []
        for (tokens, total), row in zip(beams, rows, strict=True):
            best = row.argsort(descending=True).tolist()
            best = [token for token in best if vocabulary is None or token in vocabulary][: 2 * params.beam_width]
            children += [([*tokens, token], total + row[token].item()) for token in best]
        ended += [child for child in children if child[0][-1] in ends]
        going_on = [child for child in children if child[0][-1] not in ends]
        beams = sorted(going_on, key=lambda beam: beam[1], reverse=True)[: params.beam_width]

    def score(beam):
        return beam[1] / (len(beam[0]) - len(prompt)) ** params.length_penalty

    return sorted([*ended, *beams], key=score, reverse=True)[: params.beam_width]


@pytest.mark.parametrize(
    "settings",
    [{}, {"length_penalty": 0.0}, {"allowed_token_ids": [5, 199, 221, 289, 309]}],
    ids=str,
)
def test_the_sequences_are_those_of_a_plain_search(llm, oracle, settings):
    params = BeamSearchParams(beam_width=3, max_tokens=5, **settings)
    tokenizer, eos = llm.llm_engine.tokenizer, llm.llm_engine.generation_config.eos_token_ids
    outputs = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = tokenizer.encode(prompt).ids
        expected = search(oracle, ids, params, frozenset(eos))
        assert [sequence.tokens for sequence in output.sequences] == [tokens for tokens, _ in expected]
        for sequence, (_, total) in zip(output.sequences, expected, strict=True):
            assert sequence.text == tokenizer.decode(sequence.tokens)
            pairs = zip(sequence.logprobs, sequence.tokens[len(ids) :], strict=True)
            assert sum(entry[token].logprob for entry, token in pairs) == pytest.approx(sequence.cum_logprob)
            assert sequence.cum_logprob == pytest.approx(total, abs=1e-3)


def test_a_sequence_that_ends_is_kept_and_not_extended(llm, oracle, monkeypatch):
    """The end tokens are the second tokens found by a search without end tokens."""
    ids = llm.llm_engine.tokenizer.encode(PROMPTS[0]).ids
    params = BeamSearchParams(beam_width=3, max_tokens=4)
    ends = tuple({sequence.tokens[len(ids) + 1] for sequence in llm.beam_search(PROMPTS[:1], params)[0].sequences})
    config = llm.llm_engine.generation_config
    monkeypatch.setattr(llm.llm_engine, "generation_config", type(config)(ends, config.sampling))
    [output] = llm.beam_search(PROMPTS[:1], params)
    expected = search(oracle, ids, params, frozenset(ends))
    assert [sequence.tokens for sequence in output.sequences] == [tokens for tokens, _ in expected]
    reasons = {len(sequence.tokens) - len(ids): sequence.finish_reason for sequence in output.sequences}
    assert "stop" in reasons.values()
    ignoring = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    [output] = llm.beam_search(PROMPTS[:1], ignoring)
    assert [sequence.tokens for sequence in output.sequences] == [tokens for tokens, _ in search(oracle, ids, ignoring)]
    assert {sequence.finish_reason for sequence in output.sequences} == {"length"}


def test_children_find_their_parents_blocks_and_the_models_length_is_the_end(llm):
    llm.reset_prefix_cache()
    before = llm.llm_engine.stats.prefix_cache_stats
    [output] = llm.beam_search([{"prompt_token_ids": list(range(48))}], BeamSearchParams(beam_width=4, max_tokens=99))
    after = llm.llm_engine.stats.prefix_cache_stats
    assert {len(sequence.tokens) for sequence in output.sequences} == {64}
    computed = after.queries - before.queries - (after.hits - before.hits)
    steps = after.requests - before.requests
    assert steps == 1 + 4 * 15
    assert computed <= 48 + 16 * (steps - 1), "a child computes at most one block"
    assert after.hits - before.hits >= 32 * (steps - 1)


def test_prompts_one_after_the_other_are_searched_like_all_at_once(llm):
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    together = llm.beam_search(PROMPTS, params, priority=[1, 0], use_tqdm=True)
    apart = llm.beam_search(PROMPTS, params, concurrency_limit=1)
    assert [[s.tokens for s in o.sequences] for o in together] == [[s.tokens for s in o.sequences] for o in apart]
    assert llm.beam_search([], params) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"beam_width": 0}, "beam_width is 0"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"length_penalty": "x"}, "length_penalty is 'x'"),
        ({"allowed_token_ids": []}, "allowed_token_ids is"),
        ({"beam_widht": 2}, "did you mean 'beam_width'"),
    ],
    ids=str,
)
def test_wrong_parameters_are_named(changes, said):
    with pytest.raises(MinivllmError, match=said):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **changes})


def test_a_search_whose_step_fails_says_so_once(llm, monkeypatch, capsys):
    """The error of one sequence is raised as the search's own, and no warning repeats it."""
    step = llm.llm_engine.step

    def failing():
        outputs = step()
        for output in outputs[:1]:
            output.outputs[0].error = "no grammar"
        return outputs

    monkeypatch.setattr(llm.llm_engine, "step", failing)
    with pytest.raises(MinivllmError, match=r"^no grammar$"):
        llm.beam_search(PROMPTS, BeamSearchParams(beam_width=2, max_tokens=3))
    assert not capsys.readouterr().err
    [failed, answered] = llm.generate(PROMPTS, SamplingParams(max_tokens=1), use_tqdm=False)
    assert (failed.outputs[0].error, answered.outputs[0].error) == ("no grammar", None)
    assert capsys.readouterr().err.count("no grammar") == 1


def test_wrong_prompts_are_named_and_leave_nothing(llm):
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    for prompts, said in ((["a", ""], "prompt 1"), ([[5000]], "the vocabulary is"), ([[1] * 64], "prompt of 64")):
        with pytest.raises(MinivllmError, match=said):
            llm.beam_search(prompts, params)
    with pytest.raises(MinivllmError, match="must be a LoRARequest"):
        llm.beam_search(["a"], params, lora_request="x")
    params.beam_width = 0
    with pytest.raises(MinivllmError, match="beam_width is 0"):
        llm.beam_search(["a"], params)
    assert not llm.llm_engine.has_unfinished_requests()
