"""What must be true of exercise 05, and of the script that solves it."""

import random

import numpy as np
import torch

from minivllm.core.block_hash import hash_new_full_blocks
from minivllm.config import SpeculativeConfig
from minivllm.worker.spec_decode.ngram_proposer import NgramProposer


def check_full_blocks_have_names(module):
    """Nine tokens in blocks of 4 have two names, and eight of them the same two."""
    names = module.block_hashes(list(range(9)), 4)
    assert len(names) == 2, f"{len(names)} names for 9 tokens in blocks of 4"
    assert list(module.block_hashes(list(range(8)), 4)) == list(names), "the ninth token is in no full block yet"
    assert list(module.block_hashes([1, 2, 3], 4)) == [], "three tokens fill no block of 4"


def check_a_name_stands_for_the_whole_prefix(module):
    """A block whose tokens are equal has another name where anything before it differs."""
    one, other = module.block_hashes([1, 2, 3, 4, 5, 6], 2), module.block_hashes([1, 9, 3, 4, 5, 6], 2)
    assert not set(one) & set(other), "tokens 3, 4 follow 1, 2 here and 1, 9 there, and have the same name"
    again = module.block_hashes([3, 3, 3, 3, 3, 3], 2)
    assert len(set(again)) == 3, "three equal blocks in one text have different prefixes, so different names"


def check_extra_keys_separate_users(module):
    """With another salt no name is the same; with the same salt all are."""
    tokens = list(range(12))
    plain, ann, bob = (module.block_hashes(tokens, 4, extra) for extra in (b"", b"ann", b"bob"))
    assert not set(plain) & set(ann) and not set(ann) & set(bob), "users with different salts share a block"
    assert list(module.block_hashes(tokens, 4, b"ann")) == list(ann), "the same salt must give the same names"


def check_names_are_equal_where_the_engines_are(module):
    """On random prompts, two blocks have the same name exactly where the engine's have."""
    draw = random.Random(0)
    ours, engines = [], []
    for _ in range(60):
        tokens, salt = [draw.randint(0, 1) for _ in range(draw.randint(0, 14))], draw.choice([b"", b"a", b"b"])
        ours += module.block_hashes(tokens, 3, salt)
        names: list = []
        hash_new_full_blocks(names, tokens, 3, salt)
        engines += names
    assert len(ours) == len(engines), f"{len(ours)} names, and the engine has {len(engines)}"
    for i, (mine, theirs) in enumerate(zip(ours, engines, strict=True)):
        same = [a == mine for a in ours], [b == theirs for b in engines]
        assert same[0] == same[1], f"name {i} is shared by {sum(same[0])} blocks, the engine's by {sum(same[1])}"


def check_scales_and_types(module):
    """Integers are int8 and of the rows' shape; each row has one float32 scale, its largest magnitude / 127."""
    rows = torch.tensor([[0.5, -2.54, 1.0], [127.0, 3.0, 0.0]])
    integers, scales = module.quantize(rows)
    assert integers.dtype == torch.int8, f"the integers are {integers.dtype}"
    assert scales.dtype == torch.float32, f"the scales are {scales.dtype}"
    assert integers.shape == (2, 3) and scales.shape == (2,), f"shapes {tuple(integers.shape)}, {tuple(scales.shape)}"
    assert torch.allclose(scales, torch.tensor([0.02, 1.0])), f"scales {scales.tolist()}"
    integers, scales = module.quantize(torch.randn(2, 3, 4, 8).half())
    assert integers.shape == (2, 3, 4, 8) and scales.shape == (2, 3, 4), "rows may have any dimensions before the last"


def check_integers_are_the_nearest(module):
    """What comes back is off by half a scale at most, and −128 is never used."""
    rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    integers, scales = module.quantize(rows)
    off = (integers.float() * scales[:, None] - rows).abs() / scales[:, None]
    assert off.max() < 0.5001, f"off by {off.max():.2f} scales: round to the nearest integer"
    assert integers.abs().max() <= 127 and integers.min() > -128, "the largest magnitude is 127"


def check_zeros_and_outliers(module):
    """A row of zeros gives zeros, and a huge number in one row changes nothing in another."""
    rows = torch.tensor([[0.0, 0.0], [1.0, -0.5], [1e6, 1.0]])
    integers, scales = module.quantize(rows)
    assert torch.isfinite(scales).all(), f"scales {scales.tolist()}"
    assert integers[0].tolist() == [0, 0], f"zeros became {integers[0].tolist()}"
    back = integers[1].float() * scales[1]
    assert torch.allclose(back, rows[1], atol=0.01), f"1.0, -0.5 beside a row with 1e6 became {back.tolist()}"


def check_drafts(module):
    """The longest ending decides, its first place wins, and it does not find itself."""
    for tokens, longest, count, expected in (
        ([1, 2, 3, 9, 1, 2], 3, 2, [3, 9]),
        ([5, 1, 8, 5, 2, 7, 5], 2, 2, [1, 8]),
        ([1, 2, 3, 2, 9, 1, 2], 2, 1, [3]),
        ([7, 7, 7], 2, 4, [7]),
        ([1, 2, 3], 3, 4, []),
        ([4, 4], 5, 3, [4]),
        ([4], 2, 2, []),
        ([], 2, 2, []),
        ([1, 2, 1, 2, 1, 2], 2, 10, [1, 2, 1, 2]),
    ):
        found = list(module.propose(tokens, longest, count))
        assert found == expected, f"after {tokens}, up to {longest} looked up, {count} drafts: {found}, not {expected}"


def check_drafts_are_the_engines(module):
    """On 300 random texts, the drafts are those of the engine."""
    draw = random.Random(1)
    for _ in range(300):
        tokens = [draw.randint(0, 3) for _ in range(draw.randint(0, 24))]
        longest, count = draw.randint(1, 5), draw.randint(1, 6)
        config = SpeculativeConfig(num_speculative_tokens=count, prompt_lookup_max=longest, prompt_lookup_min=1)
        expected = NgramProposer(config, 10_000).drafts_after(np.array(tokens, dtype=np.int32))
        found = list(module.propose(tokens, longest, count))
        assert found == expected, f"after {tokens} (longest {longest}, count {count}): {found}, the engine {expected}"


def check_verification(module):
    """Drafts count until the first that the model would not have said, and then comes its own token."""
    for drafts, favourites, expected in (
        ([5, 6, 7], [5, 6, 8, 1], [5, 6, 8]),
        ([5, 6], [5, 6, 8], [5, 6, 8]),
        ([4], [5, 6], [5]),
        ([], [3], [3]),
        ([4, 6, 7], [5, 6, 7, 8], [5]),
        ([5, 9, 7], [5, 6, 7, 8], [5, 6]),
    ):
        found = list(module.verify(drafts, favourites))
        assert found == expected, f"drafts {drafts}, the model says {favourites}: {found}, not {expected}"


def check_speculation_changes_nothing(module):
    """Generated with drafts and without, by a model that depends on all of its text, the tokens are the same."""

    def says(text):
        return (sum((i + 1) * token for i, token in enumerate(text[-7:])) + len(text) // 9) % 4

    plain = [1, 2, 3]
    while len(plain) < 120:
        plain.append(says(plain))
    text, passes = [1, 2, 3], 0
    while len(text) < 120:
        drafts = list(module.propose(text, 3, 4))
        text += module.verify(drafts, [says(text + drafts[:i]) for i in range(len(drafts) + 1)])
        passes += 1
        assert passes < 200, "no new token in 200 passes"
    assert text[:120] == plain, "the text with drafts is another than the text without"
