"""Text from tokens: never half a character, never half a stop string, and in the end the text of
all tokens.
"""

import gc
import weakref
from itertools import takewhile
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from minivllm.config import EMBEDDED_MODEL
from minivllm.engine.detokenizer import BROKEN, BYTE_OF, IncrementalDetokenizer, find_stop_string, token_bytes
from minivllm.engine.logprobs import logprobs_by_token
from minivllm.models.tokenizer import load_tokenizer
from minivllm.outputs import Logprobs
from minivllm.sampling_params import SamplingParams

TOKENIZER = load_tokenizer(EMBEDDED_MODEL)


def feed(tokenizer, prompt, chunks, **params):
    """Return the text after each update, the final text, and the stop string or None."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, SamplingParams(max_tokens=None, **params))
    shown = []
    for chunk in chunks:
        stop = detokenizer.update(chunk)
        shown.append(detokenizer.text[: detokenizer.streamable_length()])
        if stop is not None:
            return shown, detokenizer.text, stop
    detokenizer.finish()
    return shown, detokenizer.text, None


def chunked(ids, sizes):
    chunks, start = [], 0
    for size in sizes:
        chunks.append(ids[start : start + size])
        start += size
    return [*chunks, ids[start:]]


BYTE_IDS = {BYTE_OF[piece]: token for piece, token in TOKENIZER.get_vocab().items() if len(piece) == 1}
"""The token of each single byte."""


def test_a_character_that_is_not_complete_is_left_out_at_the_end():
    ids = [BYTE_IDS[byte] for byte in "a日".encode()]
    assert feed(TOKENIZER, [], [ids[:-1]])[1:] == ("a", None)
    assert feed(TOKENIZER, [], [ids])[1:] == ("a日", None)


DENSE = st.text(
    st.one_of(st.sampled_from("👩‍👧🇩🇪🏳️‍🌈😀日本語Жé€ok ▁\n"), st.characters(codec="utf-8", exclude_characters=BROKEN)),
    max_size=24,
)
"""Valid texts, dense in characters of several bytes and in emoji of several characters."""


def byte_level_tokenizer() -> Tokenizer:
    """Train a byte-level BPE on emoji: many of its tokens end inside a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train_from_iterator(["👩‍👩‍👧😀😃😄🇩🇪🇫🇷日本語日本語Жж" * 2, "ok, ok é€"], trainer)
    return tokenizer


def byte_fallback_tokenizer(legacy: bool) -> Tokenizer:
    """Build a byte-fallback tokenizer like Llama-2's; `legacy` uses a Metaspace decoder."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": byte + 3 for byte in range(256)}}
    for piece in ("▁", "o", "k", "▁o", "▁ok", "日", "本", "日本", "é", "▁▁"):
        vocab[piece] = len(vocab)
    merges = [("▁", "o"), ("▁o", "k"), ("日", "本"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if legacy:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        return tokenizer
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


FAMILIES = {
    "embedded": TOKENIZER,
    "byte-level": byte_level_tokenizer(),
    "byte fallback": byte_fallback_tokenizer(legacy=False),
    "byte fallback, Metaspace": byte_fallback_tokenizer(legacy=True),
}
SIZES = st.lists(st.integers(0, 5), max_size=20)
families = pytest.mark.parametrize("tokenizer", FAMILIES.values(), ids=FAMILIES)


@families
@given(prompt=DENSE, answer=DENSE, cut=st.integers(0, 30), sizes=SIZES)
@settings(max_examples=30, deadline=None)
def test_the_text_is_what_decoding_all_at_once_gives(tokenizer, prompt, answer, cut, sizes):
    """This holds even where the prompt ends inside a character, and for any number of tokens in a
    step.
    """
    ids = tokenizer.encode(prompt).ids + tokenizer.encode(answer).ids
    asked, answered = ids[:cut], ids[cut:]
    shown, text, _ = feed(tokenizer, asked, chunked(answered, sizes))
    assert text == tokenizer.decode(ids)[num_complete(tokenizer, ids, len(asked)) :]
    for earlier, later in zip(shown, [*shown[1:], text], strict=True):
        assert later.startswith(earlier)
    assert not any(BROKEN in part for part in shown)


def num_complete(tokenizer: Tokenizer, ids: list[int], cut: int) -> int:
    """Return how many of the text's characters the first `cut` tokens complete."""
    text = tokenizer.decode(ids)
    beginnings = [tokenizer.decode(ids[:end]) for end in range(max(0, cut - 3), cut + 1)]
    same = [takewhile(lambda pair: pair[0] == pair[1], zip(start, text, strict=False)) for start in beginnings]
    return max(len(list(pairs)) for pairs in same)


@families
@given(ids=st.data(), sizes=SIZES)
@settings(max_examples=30, deadline=None)
def test_any_tokens_give_one_text_in_any_steps(tokenizer, ids, sizes):
    """This holds even where the tokens together are not valid UTF-8."""
    tokens = ids.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40))
    cut = ids.draw(st.integers(0, len(tokens)))
    texts = [feed(tokenizer, tokens[:cut], chunks)[1] for chunks in (chunked(tokens[cut:], sizes), [tokens[cut:]])]
    assert texts[0] == texts[1]


def test_a_byte_of_no_character_breaks_itself_and_no_other():
    """Hugging Face's decoder would also break the characters before it, which a stream has already
    sent.
    """
    tokenizer = FAMILIES["byte fallback"]
    vocab = tokenizer.get_vocab()
    ids = [vocab[f"<0x{byte:02X}>"] for byte in b"\xc3\xa9\xff\xe2\x82\xac"]
    assert feed(tokenizer, [], [[token] for token in ids])[1] == "é\ufffd€"
    assert tokenizer.decode(ids) == BROKEN * 6


def test_each_token_costs_the_same_however_long_the_text_is(monkeypatch):
    """The tokenizer sees each token once; no step decodes again what an earlier one has decoded."""
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode("日本語😀 ok " * 50).ids
    decoded = []
    table = token_bytes(tokenizer, skip_special_tokens=True)

    def decode(ids, **options):
        decoded.append(ids)
        return tokenizer.decode(ids, **options)

    monkeypatch.setattr(table, "_tokenizer", SimpleNamespace(id_to_token=tokenizer.id_to_token, decode=decode))
    assert feed(tokenizer, [], [[token] for token in ids])[1] == tokenizer.decode(ids)
    feed(tokenizer, ids, [])
    assert max(map(len, decoded)) <= 2
    assert len(decoded) <= 2 * len(set(ids)) + 1


def test_the_table_lives_as_long_as_its_tokenizer():
    tokenizer = byte_level_tokenizer()
    table = weakref.ref(token_bytes(tokenizer, skip_special_tokens=True))
    feed(tokenizer, [], [tokenizer.encode("ok").ids])
    del tokenizer
    gc.collect()
    assert table() is None


def test_special_tokens_are_left_out_unless_wanted():
    special = TOKENIZER.token_to_id("<|endoftext|>")
    ids = [*TOKENIZER.encode("a").ids, special, *TOKENIZER.encode("b").ids]
    assert feed(TOKENIZER, [], [ids])[1] == "ab"
    assert feed(TOKENIZER, [], [ids], skip_special_tokens=False)[1] == "a<|endoftext|>b"


STOPS = st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.text(alphabet="ab€", max_size=30), STOPS, st.lists(st.integers(0, 6), max_size=30), st.booleans())
@settings(max_examples=80, deadline=None)
def test_stop_strings_do_not_depend_on_how_the_text_comes(text, stops, sizes, include):
    """The first stop string that is complete ends the text, as if the text arrived character by
    character.
    """
    expected_text, expected_stop = text, None
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            expected_stop = ending[0]
            expected_text = text[: end if include else end - len(expected_stop)]
            break
    ids = [BYTE_IDS[byte] for byte in text.encode()]
    shown, result, stop = feed(TOKENIZER, [], chunked(ids, sizes), stop=stops, include_stop_str_in_output=include)
    assert (result, stop) == (expected_text, expected_stop)
    assert all(result.startswith(part) for part in shown), "something was shown that the stop string took back"


@given(st.text(alphabet="ab€", max_size=30), STOPS, st.lists(st.integers(0, 6), max_size=30), st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_the_token_that_completes_a_stop_string_is_the_last_one_taken_in(text, stops, sizes, min_tokens):
    """Tokens after it in the same step are treated as if they had never been generated."""
    ids = [BYTE_IDS[byte] for byte in text.encode()]
    taken_in = []
    for chunks in ([[token] for token in ids], chunked(ids, sizes)):
        params = SamplingParams(max_tokens=None, stop=stops, min_tokens=min_tokens)
        detokenizer = IncrementalDetokenizer(TOKENIZER, [], params)
        any(detokenizer.update(chunk) for chunk in chunks)
        taken_in.append((detokenizer.num_tokens, detokenizer.text))
    assert taken_in[0] == taken_in[1]


def test_what_may_begin_a_stop_string_is_held_back_and_no_more():
    detokenizer = IncrementalDetokenizer(TOKENIZER, [], SamplingParams(stop=["abc", "\n\n"]))
    detokenizer.update([BYTE_IDS[ord(character)] for character in "xxab"])
    assert detokenizer.text[: detokenizer.streamable_length()] == "xx"
    detokenizer.update([BYTE_IDS[ord("x")]])
    assert detokenizer.streamable_length() == len("xxabx")
    detokenizer.update([BYTE_IDS[ord("\n")]])
    assert detokenizer.streamable_length() == len("xxabx")
    assert find_stop_string("xxabx", [], 0) is None


def test_stop_strings_in_the_first_min_tokens_do_not_count():
    ids = [BYTE_IDS[ord(character)] for character in "ababab"]
    for min_tokens in (2, 3):
        for chunks in ([ids], [[token] for token in ids]):
            assert feed(TOKENIZER, [], chunks, stop="b", min_tokens=min_tokens)[1:] == ("aba", "b")


@families
def test_a_token_of_a_logprob_has_the_space_that_it_has_in_a_text(tokenizer):
    """The tokens' texts must join to the whole text, because its offsets are computed from them."""
    ids = tokenizer.encode("ok ok  o ok", add_special_tokens=False).ids
    shown = [logprobs_by_token(([token_id], [0.0], [1]), tokenizer)[token_id].decoded_token for token_id in ids]
    assert "".join(shown) in ("ok ok  o ok", " ok ok  o ok"), "SentencePiece begins a text with a space"


def decoded(*steps: list[int]) -> list[list[str | None]]:
    """Return the texts that log probabilities show at each position, for the chosen token and others."""
    rows: Logprobs = []
    for ids in steps:
        rows.append(logprobs_by_token([ids, [0.0] * len(ids), [1] * len(ids)], TOKENIZER, rows))
    return [[entry.decoded_token for entry in row.values()] for row in rows if row]


def test_the_last_token_of_a_character_has_its_text_and_the_others_are_empty():
    a, b, c = (BYTE_IDS[byte] for byte in "日".encode())
    x = TOKENIZER.encode("x").ids[0]
    assert decoded([x], [a, x], [b, c], [c, x], [x]) == [["x"], ["", "x"], ["", ""], ["日", "x"], ["x"]]
    assert decoded([c], [x]) == [[""], ["x"]]
