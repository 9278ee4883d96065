"""Reading held-out text: the loss is the model's own, agreement counts equal top tokens, and damage
shows in both.
"""

import pytest
import torch
from refusals import assert_refused

from minivllm import LLM
from minivllm.config import EMBEDDED_MODEL
from minivllm.kernels.cpu import cache_calls
from minivllm.models.attention import CausalAttention
from minivllm.models.loader import load_model
from minivllm_lab import corpus
from minivllm_lab.corpus import corpus_files, first_passages, is_held_out
from minivllm_lab.engines.quality import Reading, decoder_loss, held_out_tokens, read, rounded_weights
from minivllm_lab.speculative_decoding.report import held_out_prompts

SETTINGS = {"device": "cpu", "max_num_batched_tokens": 100, "max_model_len": 256}


@pytest.fixture(scope="module")
def llm():
    return LLM(EMBEDDED_MODEL, **SETTINGS)


@pytest.fixture(scope="module")
def decoder():
    return load_model(EMBEDDED_MODEL, torch.device("cpu"), "float32")[0]


@torch.inference_mode()
def test_the_loss_and_the_favourites_are_those_of_one_plain_pass(llm, decoder):
    texts = held_out_tokens(llm, texts=3, tokens=90)
    losses, favourites = [], []
    for tokens in texts:
        ids = torch.tensor(tokens)
        hidden = decoder(ids, torch.arange(len(ids)), CausalAttention(decoder.config))
        logits = decoder.compute_logits(hidden)[:-1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[1:]))
        favourites += logits.argmax(-1).tolist()
    reading = read(llm, texts)
    assert reading.loss == pytest.approx(torch.stack(losses).mean().item(), abs=1e-4)
    assert reading.agreement(Reading(0.0, tuple(favourites))) > 0.99


def test_a_quantized_cache_costs_little_and_a_damaged_one_much(llm, monkeypatch):
    quantized = LLM(EMBEDDED_MODEL, **SETTINGS, kv_cache_dtype="int8")
    texts = held_out_tokens(llm, texts=4, tokens=128)
    expected, near = read(llm, texts), read(quantized, texts)
    right = cache_calls.quantize
    monkeypatch.setattr(cache_calls, "has_numba", lambda: False)  # torch's form, which can be damaged
    monkeypatch.setattr(cache_calls, "quantize", lambda rows: (right(rows)[0], right(rows)[1] / 2))
    far = read(quantized, texts)
    assert near.loss == pytest.approx(expected.loss, abs=0.01)
    assert near.agreement(expected) > 0.95
    assert far.loss > expected.loss + 0.01
    assert far.agreement(expected) < near.agreement(expected)


def test_what_is_read_was_held_out():
    files = corpus_files()
    assert 0.01 < sum(map(is_held_out, files)) / len(files) < 0.04


OF_NO_DISTRIBUTION = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "tkinter", "distutils"}


def test_a_python_without_its_tests_has_as_many_texts(llm, monkeypatch):
    """Lessons 05, 07 and 09 also find their texts in a Python packaged by a distribution."""
    monkeypatch.setattr(corpus, "SKIPPED", corpus.SKIPPED | OF_NO_DISTRIBUTION)
    files = [path for path in corpus_files() if is_held_out(path)]
    assert 0 < len(files) < 12, "else this shows nothing"
    read_by_05 = held_out_tokens(llm, texts=16, tokens=512)
    prompts = held_out_prompts(str(EMBEDDED_MODEL), 12)
    for result, length in ((read_by_05, 512), (prompts, 128)):
        assert [len(tokens) for tokens in result] == [length] * len(result)
        assert len(set(map(tuple, result))) == len(result), "no passage is taken twice"
    assert (len(read_by_05), len(prompts)) == (16, 12)


def test_each_passage_is_of_another_text_while_there_are_some():
    texts = [[text] * 100 for text in range(20)]
    assert first_passages(texts, 20, 30) == [[text] * 30 for text in range(20)]
    long, short = list(range(10)), list("abcde")
    assert first_passages([long, short, [0]], 3, 4) == [[0, 1, 2, 3], [*"abcd"], [4, 5, 6, 7]]
    assert_refused("there are 3 held-out passages of 4 tokens, not 4", first_passages, [long, short, [0]], 4, 4)


def test_what_cannot_be_read_is_refused(llm):
    untokenized = LLM(EMBEDDED_MODEL, **SETTINGS, skip_tokenizer_init=True)
    assert_refused("needs a tokenizer", held_out_tokens, untokenized)
    too_long = r"held-out passages of 100000 tokens, not 2: .* use a Python"
    assert_refused(too_long, held_out_tokens, llm, texts=2, tokens=100_000)


TEXTS = [[1000 + (7 * text + place) % 90 for place in range(40)] for text in range(3)]


def test_the_decoders_own_loss_is_the_engines(llm, decoder):
    assert decoder_loss(decoder, TEXTS) == pytest.approx(read(llm, TEXTS).loss, abs=1e-4)


def test_weights_are_rounded_for_a_while(decoder):
    plain = decoder_loss(decoder, TEXTS)
    before = {name: weight.clone() for name, weight in decoder.named_parameters()}
    with rounded_weights(decoder, lambda weight: weight.clone(), outlier=64.0) as error:
        assert error == 0
        assert decoder_loss(decoder, TEXTS) == pytest.approx(plain, abs=1e-5)
        assert not torch.equal(decoder.layers[0].mlp.gate_up_proj.weight, before["layers.0.mlp.gate_up_proj.weight"])
    with rounded_weights(decoder, lambda weight: weight * 0.9) as error:
        assert error == pytest.approx(0.1)
        assert decoder_loss(decoder, TEXTS) != pytest.approx(plain, abs=1e-3)
    assert all(torch.equal(weight, before[name]) for name, weight in decoder.named_parameters())


def test_weights_are_as_they_were_where_rounding_fails(decoder):
    before = {name: weight.clone() for name, weight in decoder.named_parameters()}
    seen = []

    def rounded(weight):
        if seen:
            raise ZeroDivisionError
        seen.append(weight)
        return weight * 0.9

    with pytest.raises(ZeroDivisionError), rounded_weights(decoder, rounded, outlier=64.0):
        pass
    assert all(torch.equal(weight, before[name]) for name, weight in decoder.named_parameters())
