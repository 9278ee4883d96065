"""Check the part of exercise 01 that needs nothing but Python: a page runs these checks, too."""

import random
from types import SimpleNamespace

# ---- bytes per token -------------------------------------------------------------------------------------------------

TIMES = ("", "", "two", "three", "four", "five", "six", "seven", "eight")


def _shape(layers, heads, kv_heads, head_dim, hidden_size, latent=None):
    """Make a config; `latent` is (kv_lora_rank, qk_rope_head_dim) of latent attention."""
    rank, rope = latent or (None, None)
    return SimpleNamespace(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
    )


def _bytes(shape, size, *, parts=2, layers=None, heads=None, head_dim=None):
    layers, heads = layers or shape.num_hidden_layers, heads or shape.num_key_value_heads
    return parts * layers * heads * (head_dim or shape.head_dim) * size


USUAL_COUNTS = {
    "Did you count query heads? They leave nothing behind": lambda shape, size: _bytes(
        shape, size, heads=shape.num_attention_heads
    ),
    "K and V are two": lambda shape, size: _bytes(shape, size, parts=1),
    "Every layer keeps its own": lambda shape, size: _bytes(shape, size, layers=1),
    "Did you take the query heads in place of the layers?": lambda shape, size: _bytes(
        shape, size, layers=shape.num_attention_heads
    ),
    "These are numbers; each has `bytes_per_element` bytes": lambda shape, size: _bytes(shape, 1),
    "Did you take 2 bytes, whatever `bytes_per_element` says?": lambda shape, size: _bytes(shape, 2),
    "These are bits": lambda shape, size: _bytes(shape, 8 * size),
    "`head_dim` need not be hidden_size / heads: the config has it": lambda shape, size: _bytes(
        shape, size, head_dim=shape.hidden_size // shape.num_attention_heads
    ),
    "The values have `head_dim` numbers too": lambda shape, size: (
        _bytes(shape, size, parts=1) + shape.num_hidden_layers * shape.num_key_value_heads * size
    ),
}


def _counts(module, cases):
    """Compare with the formula; if it differs, say by how much, and which usual mistake gives all these figures."""
    found = [module.kv_bytes_per_token(shape, size) for shape, size in cases]
    for (shape, size), count in zip(cases, found):
        wanted = _bytes(shape, size)
        if count != wanted:
            mistakes = (s for s, usual in USUAL_COUNTS.items() if found == [usual(*case) for case in cases])
            raise AssertionError(
                f"{_said(count)} for {shape.num_hidden_layers} layers, {shape.num_attention_heads} query heads, "
                f"{shape.num_key_value_heads} KV heads of {shape.head_dim}, bytes a number: {size}; right is {wanted:,}"
                f"{_too_much(count, wanted)}. {next(mistakes, '')}"
            )
        assert isinstance(count, int), f"{count!r} is the right number as a {type(count).__name__}; return an int"


def _said(count):
    return f"{count:,}" if isinstance(count, (int, float)) else repr(count)


def _too_much(count, wanted):
    """Return the whole factor by which a count is wrong, if there is one."""
    if not isinstance(count, (int, float)) or count <= 0:
        return ""
    factor, what = (count / wanted, "much") if count > wanted else (wanted / count, "little")
    if factor != int(factor):
        return ""
    return f": {TIMES[int(factor)] if factor < len(TIMES) else int(factor)} times too {what}"


def check_bytes_per_token(module):
    """A token takes 131,072 bytes in Llama-3-8B, half of that in 8 bits, 524,288 in Llama-2-7B."""
    llama_3, llama_2 = _shape(32, 32, 8, 128, 4096), _shape(32, 32, 32, 128, 4096)
    _counts(module, [(llama_3, 2), (llama_3, 1), (llama_2, 2)])


def check_bytes_of_any_model(module):
    """The formula holds for every shape: 114,688 bytes in Qwen3-0.6B (28 layers, 16 heads, 8 KV heads), and others."""
    draw = random.Random(1)
    cases = [(_shape(28, 16, 8, 128, 1024), 2)]
    for _ in range(8):
        kv_heads, group = draw.randint(2, 9), draw.randint(2, 5)
        heads, head_dim = kv_heads * group, draw.randint(3, 40) * 4
        layers = draw.choice([number for number in range(5, 90) if number not in (heads, kv_heads)])
        cases.append((_shape(layers, heads, kv_heads, head_dim, heads * (head_dim + 4)), draw.choice([1, 2, 4])))
    _counts(module, cases)


def check_bytes_of_a_latent_cache(module):
    """Stretch: DeepSeek-V3 keeps one vector of 512 + 64 numbers in each of 61 layers."""
    draw = random.Random(2)
    others = [(draw.randint(5, 90), (draw.randint(3, 60) * 8, draw.randint(1, 9) * 8), draw.choice([1, 4])) for _ in range(3)]
    for layers, latent, size in ((61, (512, 64), 2), *others):
        found = module.kv_bytes_per_token(_shape(layers, 128, 128, 56, 7168, latent), size)
        wanted = layers * sum(latent) * size
        hint = ". This vector serves as key and value: no factor 2" if found == 2 * wanted else ""
        assert found == wanted, (
            f"{_said(found)} for {layers} layers of {' + '.join(map(str, latent))}; right is {wanted:,}{hint}"
        )
