"""An exercise's functions in the engine: the same requests with the engine's own part and with the
learner's.

The checks of an exercise may define `plug(module) -> Plugged`, which says how the learner's
functions take a real part's place. `compare` runs both engines on the embedded model and prints
what each did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.config import EMBEDDED_MODEL, NO_PARTS, Parts
from minivllm.core.lora_request import LoRARequest
from minivllm.core.stats import SpecDecodingStats
from minivllm.entrypoints.llm import LLM
from minivllm.errors import MinivllmError
from minivllm.sampling_params import SamplingParams
from minivllm_lab.engines.inside import core_of
from minivllm_lab.tables import console, table

PROMPTS = (
    "def add(a, b):\n    return",
    "class Stack:\n    def __init__(self):\n",
    "import os\n\ndef read(path):\n",
    "for i in range(10):\n    print(",
)
"""Requests for exercises that need no others."""
WARM_UP = "x = 1\nx = 1\nx"
"""Served before the clock starts: the first engine of a process compiles its loops, those that
verify drafts, too.
"""


@dataclass(frozen=True, kw_only=True)
class Plugged:
    """An exercise's functions in place of a part of the engine, and the requests that show them at
    work.

    - `engine_args`: further arguments of `LLM`, for both engines.
    - `ours`: arguments for our engine only, where it must differ to do the same work.
    - `adapters`: the LoRA adapter of each prompt, or None, where they have any.
    - `says`: more rows of the table, from an engine that has served the requests: name to value.
    - `serve`: serves the requests in another way than `LLM` does; called as `serve` below.
    - `what`: what the table is about, where it is neither "The engine" nor, with `serve`, "The
      server".
    """

    parts: Parts
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    ours: Mapping[str, Any] = field(default_factory=dict)
    prompts: Sequence[Any] = PROMPTS
    adapters: Sequence[LoRARequest | None] = ()
    max_tokens: int = 16
    says: Callable[[LLM], Mapping[str, object]] | None = None
    serve: Callable[[Plugged, Parts], Served] | None = None
    what: str = ""


@dataclass
class Served:
    """The result of one engine on the requests; `rows` are further facts by name, `equal` those
    that both engines must share.
    """

    token_ids: list[list[int]]
    texts: list[str]
    steps: int = 0
    most_running: int = 0
    most_blocks: int = 0
    preemptions: int = 0
    rows: dict[str, object] = field(default_factory=dict)
    equal: dict[str, object] = field(default_factory=dict)


def compare(plugged: Plugged) -> bool:
    """Serve the same requests with both engines, print what each did, and return whether all tokens
    are the same.

    Raises:
        MinivllmError: the learner's part raised; the message says what.
    """
    by = plugged.serve or serve
    ours = by(plugged, NO_PARTS)
    try:
        yours = by(plugged, plugged.parts)
    except Exception as error:
        reason = str(error) if isinstance(error, MinivllmError) else f"{type(error).__name__}: {error}"
        raise MinivllmError(f"the engine stopped in your part: {reason}") from error
    names = ", ".join(name.replace("_", " ") for name in plugged.parts.names)
    table(
        f"{plugged.what or ('The server' if plugged.serve else 'The engine')} with your {names}",
        ["", "yours", "ours"],
        [(name, str(value), str(rows_of(ours)[name])) for name, value in rows_of(yours).items()],
        words=True,
    )
    same = (yours.token_ids, yours.texts, yours.equal) == (ours.token_ids, ours.texts, ours.equal)
    console.print(_verdict(yours, ours, same), markup=False)
    return same


def serve(plugged: Plugged, parts: Parts) -> Served:
    """Serve the requests greedily with these parts."""
    own = {} if parts.names else plugged.ours
    arguments = {"max_model_len": 256, "device": "cpu", "dtype": "float32", **plugged.engine_args, **own}
    llm = LLM(EMBEDDED_MODEL, parts=parts, **arguments)
    llm.generate([WARM_UP], SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
    llm.reset_prefix_cache()
    engine, scheduler = llm.llm_engine, core_of(llm).scheduler
    scheduler.spec_decoding_stats = SpecDecodingStats()
    pool = scheduler.kv_cache_manager.block_pool
    sampling = SamplingParams(temperature=0.0, max_tokens=plugged.max_tokens, ignore_eos=True)
    adapters = plugged.adapters or [None] * len(plugged.prompts)
    for index, (prompt, adapter) in enumerate(zip(plugged.prompts, adapters, strict=True)):
        engine.add_request(str(index), prompt, sampling, lora_request=adapter)
    served, outputs, free = Served([], []), {}, pool.get_num_free_blocks()
    while engine.has_unfinished_requests():
        finished = [output for output in engine.step() if output.finished]
        outputs.update((output.request_id, output.outputs[0]) for output in finished)
        served.steps += 1
        served.most_running = max(served.most_running, len(scheduler.running) + len(finished))
        served.most_blocks = max(served.most_blocks, free - pool.get_num_free_blocks())
    completions = [outputs[str(index)] for index in range(len(plugged.prompts))]
    served.token_ids = [list(completion.token_ids) for completion in completions]
    served.texts = [completion.text for completion in completions]
    served.preemptions = scheduler.num_preemptions
    served.rows = {"blocks free again at the end": f"{pool.get_num_free_blocks()} of {free}"}
    if plugged.says is not None:
        served.rows |= plugged.says(llm)
    return served


def rows_of(served: Served) -> dict[str, object]:
    """Return the rows of the table, by name: counts only. One run of each says nothing about
    speed.
    """
    of_steps = {
        "requests at once": served.most_running, "steps": served.steps, "preemptions": served.preemptions,
        "most blocks after a step": served.most_blocks,
    }  # fmt: skip
    return {**(of_steps if served.steps else {}), **served.rows, **served.equal}


def _verdict(yours: Served, ours: Served, same: bool) -> str:
    if same:
        return f"the same {sum(map(len, yours.token_ids))} tokens as ours; the first answer: {yours.texts[0]!r}"
    wrong = [name for name, value in ours.equal.items() if yours.equal[name] != value]
    if wrong:
        difference = f"{yours.equal[wrong[0]]}, but with ours {ours.equal[wrong[0]]}"
        return f"{wrong[0]}: {difference}. Its checks pass, and yet it is wrong."
    answers = zip(yours.token_ids, yours.texts, ours.token_ids, ours.texts, strict=True)
    index = next(i for i, (*mine, ids, text) in enumerate(answers) if mine != [ids, text])
    return (
        f"request {index} differs from ours: its checks pass, and yet the text is wrong.\n"
        f"  yours: {yours.texts[index]!r}\n  ours:  {ours.texts[index]!r}"
    )
