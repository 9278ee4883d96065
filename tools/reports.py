"""Try what users of other engines have reported, on ours: `lessons/reading/reports.md`.

    uv run python tools/reports.py                 # the names
    uv run python tools/reports.py cached-prompt   # one of them, in a few seconds on a CPU
    uv run python tools/reports.py --write         # all of them, into the page

Each function returns the lines that it prints. They are the same in every run, and the page quotes
them below a mark, `<!-- report: NAME -->`; a test compares both.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minivllm import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from minivllm.config import EMBEDDED_MODEL, CacheConfig, Parts, SchedulerConfig
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput
from minivllm.engine.detokenizer import make_detokenizer
from minivllm.errors import MinivllmError
from minivllm.memory import kv_bytes_per_token
from minivllm_lab.cli import Parser, run
from minivllm_lab.engines.inside import core_of
from minivllm_simulate.known_models import known_model

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "lessons" / "reading" / "reports.md"
QUOTE = re.compile(
    r"<!-- report: (?P<name>[\w-]+) -->\n(?:\n```bash\n.*?\n```\n\n```text\n(?P<said>.*?)\n```\n)?", re.DOTALL
)
ADAPTERS = ROOT / "tests" / "lora_adapters"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
REPETITIVE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef add(a, b):\n"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def engine(**settings: Any) -> LLM:
    """Return an engine on the CPU with the embedded model."""
    small = {"model": EMBEDDED_MODEL, "device": "cpu", "max_model_len": 256}
    return LLM(**{**small, "num_gpu_blocks_override": 200, **settings})


def greedy(llm: LLM, prompt: Any, max_tokens: int = 8, **options: Any):
    """Generate one greedy answer that does not end by itself."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    [output] = llm.generate([prompt], params, use_tqdm=False, **options)
    return output


def too_long() -> list[str]:
    """Make an engine whose cache cannot hold one request of full length."""
    try:
        engine(max_model_len=1024, num_gpu_blocks_override=50)
    except MinivllmError as error:
        return [f"refused: {error}"]
    return ["not refused"]


def grouped_heads() -> list[str]:
    """Count the cache of a model with grouped heads, by its KV heads and by its query heads."""
    model = known_model("Llama-3.1-8B")
    right = kv_bytes_per_token(model)
    wrong = right * model.num_attention_heads // model.num_key_value_heads
    return [
        f"Llama-3.1-8B, by its {model.num_key_value_heads} KV heads: {right:,} bytes a token",
        f"by its {model.num_attention_heads} query heads it would be {wrong:,}",
    ]


def latents() -> list[str]:
    """Count the cache of a model with latent attention."""
    return [f"DeepSeek-V3: {kv_bytes_per_token(known_model('DeepSeek-V3')):,} bytes a token, in 16 bits"]


def cached_prompt() -> list[str]:
    """Send prompts twice whose length is a multiple of the block size, so that all is cached."""
    llm = engine()
    lines = []
    for length in (16, 32, 48):
        prompt = {"prompt_token_ids": list(range(length, 2 * length))}
        first = greedy(llm, prompt)
        again = greedy(llm, prompt)
        same = first.outputs[0].token_ids == again.outputs[0].token_ids
        lines.append(f"{length} tokens again: {again.num_cached_tokens} from the cache, same answer: {same}")
    return lines


def names_in_hashes() -> list[str]:
    """Use one name for an adapter, for a salt, and for another adapter."""
    llm = engine(enable_lora=True, max_loras=2)
    tokens = list(range(48))
    first = LoRARequest("team", 1, str(ADAPTERS / "a"))
    other = LoRARequest("team", 2, str(ADAPTERS / "b"))
    greedy(llm, {"prompt_token_ids": tokens}, lora_request=first)
    again = greedy(llm, {"prompt_token_ids": tokens}, lora_request=first)
    salted = greedy(llm, {"prompt_token_ids": tokens, "cache_salt": "team"})
    replaced = greedy(llm, {"prompt_token_ids": tokens}, lora_request=other)
    return [
        f"the adapter 'team' again: {again.num_cached_tokens} tokens from the cache",
        f"no adapter, the salt 'team': {salted.num_cached_tokens}",
        f"another adapter 'team': {replaced.num_cached_tokens}",
    ]


def saturating_prefill() -> list[str]:
    """Let a long prompt take the whole budget of every step, and count how long another request
    waits.
    """
    waited = {threshold: _steps_until_admitted(threshold) for threshold in (0, 12)}
    return [
        f"a budget of 16 tokens, a prompt of 160: the newcomer is admitted in step {waited[0]}",
        f"with a threshold of 12: in step {waited[12]}",
    ]


def _steps_until_admitted(threshold: int) -> int:
    limits = SchedulerConfig(max_model_len=256, max_num_batched_tokens=16, long_prefill_token_threshold=threshold)
    scheduler = Scheduler(limits, CacheConfig(num_gpu_blocks=100))
    scheduler.add_request(Request("long", list(range(160)), max_tokens=1))
    scheduler.add_request(Request("newcomer", [1, 2, 3], max_tokens=1))
    number = 1
    while "newcomer" not in (step := scheduler.schedule()).num_scheduled_tokens:
        scheduler.update_from_output(step, ModelRunnerOutput({}))
        number += 1
    return number


def tier_under_pressure() -> list[str]:
    """Run more requests than the cache holds, with a second tier in host memory."""
    prompts = [{"prompt_token_ids": [7 * index + place for place in range(30)]} for index in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    ample = engine().generate(prompts, params, use_tqdm=False)
    lines = []
    for policy in ("fcfs", "priority"):
        small = engine(
            max_model_len=96, block_size=8, num_gpu_blocks_override=15, max_num_batched_tokens=40,
            kv_offloading_size=0.01, scheduling_policy=policy,
        )  # fmt: skip
        outputs = small.generate(prompts, params, use_tqdm=False)
        same = [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in ample]
        preempted = core_of(small).scheduler.num_preemptions > 0
        lines.append(f"{policy}: {len(outputs)} of 6 ended, preempted: {preempted}, same tokens: {same}")
    return lines


def drafts_change_nothing() -> list[str]:
    """Generate with n-gram drafts and without, and stop in the middle of accepted drafts."""
    plain, drafting = engine(), engine(speculative_config=NGRAM)
    expected, drafted = greedy(plain, REPETITIVE, 40).outputs[0], greedy(drafting, REPETITIVE, 40).outputs[0]
    accepted = core_of(drafting).scheduler.spec_decoding_stats.num_accepted_tokens
    tokenizer = plain.get_tokenizer()
    stop = tokenizer.decode(expected.token_ids[9:12])
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=[stop], logprobs=0)
    [cut] = drafting.generate([REPETITIVE], params, use_tqdm=False)
    completion = cut.outputs[0]
    return [
        f"same tokens: {drafted.token_ids == expected.token_ids}, drafts accepted: {accepted > 0}",
        f"stopped by {completion.stop_reason!r}: {len(completion.token_ids)} tokens, "
        f"{len(completion.logprobs or [])} log probabilities",
    ]


def grammar_with_drafts() -> list[str]:
    """Generate JSON by a schema, with n-gram drafts and without."""
    constraint = StructuredOutputsParams(json=SCHEMA)
    params = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=constraint)
    prompt = 'item = {"name": "a", "size": 1}\nitem = {"name": "a", "size": 1}\nitem = '
    texts = []
    for settings in ({}, {"speculative_config": NGRAM}):
        [output] = engine(**settings).generate([prompt], params, use_tqdm=False)
        texts.append(output.outputs[0].text)
    valid = sorted(json.loads(texts[1])) == ["name", "size"]
    return [texts[1], f"fits the schema: {valid}, the same without drafts: {texts[0] == texts[1]}"]


def split_characters() -> list[str]:
    """Stream an emoji of several tokens: decode each token alone, and as the engine does."""
    tokenizer = engine().llm_engine.tokenizer
    ids = tokenizer.encode("ok 🚀!").ids
    alone = "".join(tokenizer.decode([token]) for token in ids)
    detokenizer = make_detokenizer(tokenizer, [], SamplingParams(), Parts())
    pieces: list[str] = []
    shown = 0
    for token in ids:
        detokenizer.update([token])
        length = detokenizer.streamable_length()
        pieces.append(detokenizer.text[shown:length])
        shown = length
    return [f"each token alone: {alone!r}", f"streamed: {pieces}"]


REPORTS: dict[str, Callable[[], list[str]]] = {
    "too-long": too_long,
    "grouped-heads": grouped_heads,
    "latents": latents,
    "cached-prompt": cached_prompt,
    "names-in-hashes": names_in_hashes,
    "saturating-prefill": saturating_prefill,
    "tier-under-pressure": tier_under_pressure,
    "drafts-change-nothing": drafts_change_nothing,
    "grammar-with-drafts": grammar_with_drafts,
    "split-characters": split_characters,
}


def quoted(name: str) -> str:
    """Return what the page has for one report: the mark, the command, and its output."""
    command = f"uv run python tools/reports.py {name}"
    output = "\n".join(REPORTS[name]())
    return f"<!-- report: {name} -->\n\n```bash\n{command}\n```\n\n```text\n{output}\n```\n"


def main(arguments: argparse.Namespace) -> None:
    """Try one report, list the names, or write all outputs into the page."""
    if arguments.write:
        PAGE.write_text(QUOTE.sub(lambda quote: quoted(quote["name"]), PAGE.read_text()))
        return
    if arguments.name is None:
        print("\n".join(f"{name:22} {(report.__doc__ or '').splitlines()[0]}" for name, report in REPORTS.items()))
        return
    if arguments.name not in REPORTS:
        raise MinivllmError(f"there is no report {arguments.name!r}; there are: {', '.join(REPORTS)}")
    print("\n".join(REPORTS[arguments.name]()))


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    flags = Parser(description=__doc__)
    flags.add_argument("name", nargs="?", help="one of the names that are listed without it")
    flags.add_argument("--write", action="store_true", help="try all, and write their outputs into the page")
    return flags


if __name__ == "__main__":
    run(main, parser())
