"""The request that all lessons follow, served by the real engine, and what happened to it in each
step.

    from minivllm_lab.pictures.followed import followed
    run = followed()                 # alone; followed("company"), followed("prefix hit"): see `SCENES`
    run.request.tokens[9].shown      # "␣a"
    run.steps[0].rows[0].slots       # where the prompt's keys and values went

The embedded model runs greedily, with blocks of four slots, once per process and scene; the same on
every machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from minivllm.config import EMBEDDED_MODEL, CacheConfig
from minivllm.core.engine_messages import EngineCoreRequest
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm.engine.core import EngineCore
from minivllm.models.tokenizer import load_tokenizer
from minivllm.sampling_params import SamplingParams
from minivllm.worker.input_batch import StepInputs
from minivllm_lab.cli import warnings_only
from minivllm_lab.engines.inside import runner_of
from minivllm_lab.engines.recording import bare_engine

PROMPT = "def add(a, b):\n    return"
NAME = "add"
"""The followed request's name in every scene."""
MAX_TOKENS = 6
BLOCK_SIZE, NUM_BLOCKS = 4, 16
MAX_NUM_BATCHED_TOKENS = 12

SCENES: dict[str, list[tuple[int, str, str]]] = {
    "alone": [(0, NAME, PROMPT)],
    "company": [(0, NAME, PROMPT), (1, "for", "for i in range("), (1, "class", "class Queue:\n    def __init__(self")],
    "prefix hit": [(0, NAME, PROMPT), (2, "print", "def add(a, b):\n    print")],
    "long prompt": [(0, NAME, PROMPT), (1, "long", "x = 1\ny = 2\nif x < y:\n    x = x + y\n    y = x")],
    "small pool": [(0, "class", "class Queue:\n    def __init__(self"), (1, NAME, PROMPT)],
    "six chats": [
        (0, name, prompt)
        for name, prompt in (
            (NAME, PROMPT),
            ("for", "for i in"),
            ("class", "class Queue:"),
            ("import", "import"),
            ("if", "if x:"),
            ("while", "while x:"),
        )
    ],
}
"""Scene -> (the step before which it arrives, name, prompt) of each request.

In "company" a decode, a whole prompt and a chunk of a prompt share a step; in "prefix hit" the
second request has the followed one's first 8 tokens, two full blocks; in "long prompt" a prompt of
25 tokens comes while it decodes; in "small pool" there are blocks for one and a half of two
requests; in "six chats" all six decode in one step.
"""
POOLS = {"small pool": (7, 16), "six chats": (32, 32)}
"""Scenes with another pool: (blocks, the greatest length of a request)."""


class Token(NamedTuple):
    """A token's id and its piece of text; `shown` makes its spaces and newlines visible."""

    id: int
    text: str

    @property
    def shown(self) -> str:
        """The piece with ␣ for a space, → for an indent (three or four spaces), and ⏎ for a
        newline.
        """
        return self.text.replace("    ", "→").replace("   ", "→").replace("\n", "⏎").replace(" ", "␣")


class Served(NamedTuple):
    """A request: its prompt and its output."""

    name: str
    prompt: tuple[Token, ...]
    output: tuple[Token, ...]

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The prompt, then the output."""
        return self.prompt + self.output


class Row(NamedTuple):
    """A request's part in a step: a row of the batch.

    - `num_computed_tokens`: tokens that the cache held before the step; `positions`, `tokens`,
      `slots`: of the tokens that this step computes. Slot s is place s % block size of block s //
      block size.
    - `block_table`: the request's blocks after scheduling; `seq_len`: tokens in the cache after the
      step.
    - `query_start`: where its tokens begin in the step's flat batch.
    - `sampled`: the token sampled after its last one; None for a chunk that does not end its
      prompt.
    """

    request: str
    num_computed_tokens: int
    tokens: tuple[Token, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    block_table: tuple[int, ...]
    seq_len: int
    query_start: int
    sampled: Token | None

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that this step computes for the request."""
        return len(self.tokens)


@dataclass(frozen=True)
class Step:
    """A step: its rows in scheduling order, and the state of queues and blocks.

    - `waiting`: requests still in the queue after scheduling.
    - `query_start_loc`: where each row's tokens begin in the flat batch, and where the last one's
      end.
    - `cached_blocks`: block -> the first 8 hexadecimal digits of the hash under which the prefix
      cache knows it, after the step.
    """

    index: int
    rows: tuple[Row, ...]
    waiting: tuple[str, ...]
    query_start_loc: tuple[int, ...]
    cached_blocks: dict[int, str]

    def row(self, request: str = NAME) -> Row | None:
        """Return a request's row, or None if it has none in this step."""
        return next((row for row in self.rows if row.request == request), None)


class Followed(NamedTuple):
    """A scene: the requests by name, and all steps. Block 0 is the null block, which never holds
    tokens.
    """

    requests: dict[str, Served]
    steps: tuple[Step, ...]
    block_size: int
    num_blocks: int
    max_num_batched_tokens: int

    @property
    def request(self) -> Served:
        """The followed request."""
        return self.requests[NAME]


@cache
def followed(scene: str = "alone") -> Followed:
    """Serve the requests of a scene and record every step."""
    with warnings_only():
        return _Recorder(SCENES[scene], *POOLS.get(scene, (NUM_BLOCKS, 32))).run()


@cache
def tokenizer() -> Tokenizer:
    """Return the embedded model's tokenizer, loaded once."""
    return load_tokenizer(EMBEDDED_MODEL)


def tokens_of(token_ids: Iterable[int]) -> tuple[Token, ...]:
    """Return the embedded model's tokens with these ids."""
    return tuple(Token(token_id, tokenizer().decode([token_id])) for token_id in token_ids)


class _Recorder:
    def __init__(self, arrivals: Iterable[tuple[int, str, str]], num_blocks: int, max_model_len: int) -> None:
        self.num_blocks, self.core = num_blocks, _engine(num_blocks, max_model_len)
        self.arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
        self.prompts = {name: tokenizer().encode(prompt).ids for _, name, prompt in self.arrivals}
        self.outputs: dict[str, list[int]] = {name: [] for name in self.prompts}
        self.steps: list[Step] = []

    def run(self) -> Followed:
        """Run and record every step until all requests have arrived and ended."""
        while self.arrivals or self.core.has_unfinished_requests():
            self._admit_arrivals()
            self._step()
        served = {name: self._served(name) for name in self.prompts}
        return Followed(served, tuple(self.steps), BLOCK_SIZE, self.num_blocks, MAX_NUM_BATCHED_TOKENS)

    def _admit_arrivals(self) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        while self.arrivals and self.arrivals[0][0] <= len(self.steps):
            _, name, _ = self.arrivals.pop(0)
            self.core.add_request(EngineCoreRequest(name, self.prompts[name], params, (), time.monotonic()))

    def _step(self) -> None:
        scheduler, runner = self.core.scheduler, runner_of(self.core)
        inputs: list[StepInputs] = []
        prepare = type(runner).prepare_inputs

        def prepare_inputs(scheduler_output: SchedulerOutput) -> StepInputs:
            inputs.append(prepare(runner, scheduler_output))
            return inputs[0]

        runner.prepare_inputs = prepare_inputs  # keeps what the model is about to be given
        scheduled = scheduler.schedule()
        waiting = tuple(request.request_id for request in scheduler.waiting)
        tables = {
            name: tuple(scheduler.kv_cache_manager.get_block_ids(name)) for name in scheduled.num_scheduled_tokens
        }
        sampled = self.core.executor.start_model(scheduled).result()
        del runner.prepare_inputs
        for output in scheduler.update_from_output(scheduled, sampled):
            self.outputs[output.request_id] += output.new_token_ids
        new = {name: ids[0] for name, ids in sampled.sampled_token_ids.items()}
        pool = scheduler.kv_cache_manager.block_pool
        self.steps.append(
            Step(
                index=len(self.steps),
                rows=tuple(self._row(inputs[0], index, tables, new) for index in range(len(inputs[0].req_ids))),
                waiting=waiting,
                query_start_loc=tuple(inputs[0].query_start_loc.tolist()),
                cached_blocks={
                    block.block_id: block.block_hash.hex()[:8] for block in pool.blocks if block.block_hash is not None
                },
            )
        )

    def _row(self, inputs: StepInputs, index: int, tables: dict[str, tuple[int, ...]], sampled: dict[str, int]) -> Row:
        name, start, end = inputs.req_ids[index], *map(int, inputs.query_start_loc[index : index + 2])
        return Row(
            request=name,
            num_computed_tokens=int(inputs.positions[start]),
            tokens=tokens_of(inputs.input_ids[start:end].tolist()),
            positions=tuple(inputs.positions[start:end].tolist()),
            slots=tuple(inputs.slot_mapping[start:end].tolist()),
            block_table=tables[name],
            seq_len=int(inputs.seq_lens[index]),
            query_start=start,
            sampled=tokens_of([sampled[name]])[0] if name in sampled else None,
        )

    def _served(self, name: str) -> Served:
        return Served(name, tokens_of(self.prompts[name]), tokens_of(self.outputs[name]))


def _engine(num_blocks: int, max_model_len: int) -> EngineCore:
    return bare_engine(
        EMBEDDED_MODEL,
        torch.device("cpu"),
        CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=num_blocks, enable_prefix_caching=True),
        max_model_len=max_model_len,
        max_num_seqs=8,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        dtype="float32",
    )
