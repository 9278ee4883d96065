"""Test that a block's hash depends on its tokens, everything before them and the extra keys, and
nothing else.
"""

from hypothesis import given
from hypothesis import strategies as st

from minivllm.core.block_hash import NONE_HASH, generate_block_hash_extra_keys, hash_block_tokens
from minivllm.core.lora_request import LoRARequest
from minivllm.core.request import Request

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=24)
ADAPTER = LoRARequest("adapter", 1, "/adapters/a")


def chain(tokens: list[int], block_size: int, lora: LoRARequest | None = None, salt: str | None = None) -> list[bytes]:
    request = Request("r", tokens, max_tokens=1, lora_request=lora, cache_salt=salt)
    request.enable_block_hashes(block_size)
    return request.block_hashes


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_two_requests_share_names_exactly_as_far_as_they_share_full_blocks(
    left: list[int], right: list[int], block_size: int
) -> None:
    shared = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    names = [chain(tokens, block_size) for tokens in (left, right)]
    equal = [a == b for a, b in zip(*names, strict=False)]
    num_shared = shared // block_size
    assert equal == [index < num_shared for index in range(len(equal))]


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_names_extended_token_by_token_are_those_of_the_whole(
    prompt: list[int], outputs: list[int], block_size: int
) -> None:
    request = Request("r", prompt, max_tokens=99)
    request.enable_block_hashes(block_size)
    for token_id in outputs:
        request.append_output_token_id(token_id)
        assert len(request.block_hashes) == request.num_tokens // block_size
    assert request.block_hashes == chain(prompt + outputs, block_size)


def test_each_name_is_made_from_the_one_before_and_is_the_same_in_every_process() -> None:
    first = hash_block_tokens(NONE_HASH, [1, 2])
    assert chain([1, 2, 3, 4, 5], 2) == [first, hash_block_tokens(first, [3, 4])]
    assert first.hex() == "84f1a91d22ae7aac1b35ba682873ead07907a8ece9bd9f173aa0db6ddb5e974a"


def test_a_salt_separates_whole_prompts_through_the_first_block_alone() -> None:
    plain, salted, other = chain([1] * 6, 2), chain([1] * 6, 2, salt="a"), chain([1] * 6, 2, salt="b")
    assert not set(plain) & set(salted)
    assert not set(salted) & set(other)
    assert salted[1] == hash_block_tokens(salted[0], [1, 1]), "later blocks inherit the salt, they do not repeat it"


def test_an_adapter_separates_by_name_and_by_path() -> None:
    base = chain([1, 2], 2)
    adapters = [ADAPTER, LoRARequest("other", 1, "/adapters/a"), LoRARequest("adapter", 1, "/adapters/b")]
    names = [chain([1, 2], 2, lora=lora) for lora in adapters]
    assert len({name for [name] in [base, *names]}) == 4
    assert chain([1, 2], 2, lora=LoRARequest("adapter", 7, "/adapters/a")) == names[0], "the number is this process's"


def test_extra_keys_are_tagged_and_measured() -> None:
    keys = [
        generate_block_hash_extra_keys(None, None),
        generate_block_hash_extra_keys(None, ""),
        generate_block_hash_extra_keys(None, "lora"),
        generate_block_hash_extra_keys(LoRARequest("ab", 1, "c"), None),
        generate_block_hash_extra_keys(LoRARequest("a", 1, "bc"), None),
        generate_block_hash_extra_keys(LoRARequest("a", 1, "b"), "c"),
        generate_block_hash_extra_keys(LoRARequest("a", 1, "bsaltc"), None),
    ]
    assert len(set(keys)) == len(keys)
    assert b"salt" in generate_block_hash_extra_keys(None, "x")
