"""Check random requests over a prefill and a decode engine: does any token differ from a plain
engine's, is any block lost?

    uv run --group nixl python benchmarks/disaggregation_equality.py --json RESULT.json     # six minutes of one core
    uv run python benchmarks/disaggregation_equality.py --requests 60 --only TCPConnector

For each connector, pairs of engines are set up at random. Each side has its own pool (sometimes too
small for the batch), token budget, prefix cache and steps ahead; both have the same block size and
cache dtype, and now and then both have two ranks. Requests, as in
`same_tokens.py`, arrive at random moments and go through both engines as a proxy would send them.
Some are served by the prefill engine alone, and some are aborted: on the prefill engine, between
the engines, while they load, or while they decode. Both engines step in random order. Every request
that is not aborted must get the tokens of a plain engine, and in the end every block of both sides
must be free. The table is followed by one line of JSON; the exit code is 1 if a token differs, a
block is lost or a request never ends.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import chain
from typing import Any

from same_tokens import ENOUGH_BLOCKS, SETTINGS, Batch, generated, random_batch, random_settings

from minivllm.config import EMBEDDED_MODEL
from minivllm.entrypoints.llm import LLM
from minivllm.models.tokenizer import load_tokenizer
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams
from minivllm_lab.cli import benchmark_parser, positive_int, run
from minivllm_lab.corpus import held_out_texts
from minivllm_lab.disaggregation.server_pair import free_ports
from minivllm_lab.inside import core_of
from minivllm_lab.progress import track
from minivllm_lab.results import record, report
from minivllm_lab.tables import table

CONNECTORS = ("TCPConnector", "NixlConnector", "ExampleConnector")
REQUESTS_OF_A_PAIR = 40
LEASE = 4.0
SECONDS_WITHOUT_PROGRESS = 60.0
TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
PHASES = ("prefill", "between", "loading", "decoding")


@dataclass
class Tally:
    """Counts for one connector."""

    requests: int = 0
    tokens: int = 0
    differing: int = 0
    failed: int = 0
    stuck: int = 0
    held_blocks: int = 0
    external_tokens: int = 0
    preemptions_prefill: int = 0
    preemptions_decode: int = 0
    aborted: Counter[str] = field(default_factory=Counter)


@dataclass
class Journey:
    """A request on its way through both engines.

    `abort` names the phase in which the request is aborted, and after how many steps of that phase
    (tokens while decoding). `alone` means that the prefill engine serves all of it.
    """

    name: str
    prompt: list[int]
    params: SamplingParams
    abort: tuple[str, int] | None
    alone: bool
    phase: str = "prefill"
    steps: int = 0
    told: dict[str, Any] | None = None
    tokens: list[int] = field(default_factory=list)
    error: str | None = None

    def aborts_now(self) -> bool:
        """Return whether the request is due to be aborted."""
        if self.abort is None or self.abort[0] != self.phase:
            return False
        return (len(self.tokens) if self.phase == "decoding" else self.steps) >= self.abort[1]


class Pair:
    """A prefill and a decode engine in this process, which also does the work of the proxy between
    them.
    """

    def __init__(self, connector: str, sides: list[dict[str, Any]], policy: str, draw: random.Random) -> None:
        self.draw, self.speaks = draw, connector != "ExampleConnector"
        self.folder = tempfile.TemporaryDirectory()
        self.prefill, self.decode = (
            LLM(EMBEDDED_MODEL, **SETTINGS | side, kv_transfer_config=self._settings(connector, role, policy, side))
            for role, side in zip(("kv_producer", "kv_consumer"), sides, strict=True)
        )
        self.under_way: dict[str, Journey] = {}

    def _settings(self, connector: str, role: str, policy: str, side: dict[str, Any]) -> dict[str, Any]:
        extra: dict[str, Any] = {"kv_lease_duration": LEASE}
        if connector == "TCPConnector":
            port = free_ports(1)[0] if side.get("tensor_parallel_size", 1) > 1 else 0
            extra |= {"secret": "known to both of them", "port": port}
        elif connector == "ExampleConnector":
            extra = {"shared_storage_path": self.folder.name}
        else:
            os.environ |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)[0]), "UCX_TLS": "sm,tcp,self"}
            os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
        return {
            "kv_connector": connector,
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": extra,
        }

    def serve(self, journeys: list[Journey]) -> bool:
        """Start the requests at random moments and serve them to the end. Return whether all of
        them ended.
        """
        waiting, last, until = list(journeys), None, time.monotonic() + SECONDS_WITHOUT_PROGRESS
        while waiting or self.under_way:
            if waiting and self.draw.random() < 0.5:
                self._begin(waiting.pop(0))
            self._abort_some()
            self._hand_over()
            for llm in self.draw.sample((self.prefill, self.decode), 2):
                if self.draw.random() < 0.8:
                    self._step(llm)
            now = [(one.name, one.phase, len(one.tokens)) for one in self.under_way.values()]
            if now != last:
                last, until = now, time.monotonic() + SECONDS_WITHOUT_PROGRESS
            if time.monotonic() > until:
                return False
        return True

    def held_blocks(self) -> int:
        """Count the blocks that are not free on either side once all leases have ended."""
        until = time.monotonic() + LEASE + 5
        while any(is_busy(llm) for llm in (self.prefill, self.decode)) and time.monotonic() < until:
            for llm in (self.prefill, self.decode):
                self._step(llm)
            time.sleep(0.005)
        pools = [core_of(llm).scheduler.kv_cache_manager.block_pool for llm in (self.prefill, self.decode)]
        return sum(pool.num_usable_blocks - pool.get_num_free_blocks() for pool in pools)

    def shutdown(self) -> None:
        """Shut both engines down."""
        for llm in (self.prefill, self.decode):
            llm.shutdown()
        self.folder.cleanup()

    def _begin(self, journey: Journey) -> None:
        self.under_way[journey.name] = journey
        if journey.alone:
            self._add(self.prefill, journey, journey.params)
            return
        params = replace(journey.params, max_tokens=1)
        self._add(self.prefill, journey, with_params(params, TO_DECODE if self.speaks else None))

    def _add(self, llm: LLM, journey: Journey, params: SamplingParams) -> None:
        llm.llm_engine.add_request(journey.name, {"prompt_token_ids": journey.prompt}, params)

    def _abort_some(self) -> None:
        for journey in [one for one in self.under_way.values() if one.aborts_now()]:
            llm = self.prefill if journey.alone or journey.phase == "prefill" else self.decode
            llm.llm_engine.abort_request([journey.name])
            del self.under_way[journey.name]
            journey.error = "aborted"

    def _step(self, llm: LLM) -> None:
        if not is_busy(llm):
            for journey in self.under_way.values():
                journey.steps += llm is self.prefill and journey.phase == "between"
            return
        for output in llm.llm_engine.step():
            if journey := self.under_way.get(output.request_id):
                self._take(journey, output, llm is self.prefill)
        for journey in self.under_way.values():
            journey.steps += (llm is self.prefill) == (journey.phase in ("prefill", "between"))

    def _take(self, journey: Journey, output: RequestOutput, is_prefill: bool) -> None:
        """Handle an engine's output: hand the request over to the other engine, or finish it."""
        choice = output.outputs[0]
        if choice.finish_reason == "error":
            journey.error = str(output)
            del self.under_way[journey.name]
        elif journey.alone or not is_prefill:
            journey.phase, journey.tokens = "decoding", list(choice.token_ids)
            if output.finished:
                del self.under_way[journey.name]
        elif output.finished:
            journey.phase, journey.steps, journey.told = "between", 0, output.kv_transfer_params
            if journey.abort and journey.abort[0] == "between":
                journey.error = "aborted"
                del self.under_way[journey.name]

    def _hand_over(self) -> None:
        """Send the decode engine every request that the prefill engine has finished."""
        for journey in self.under_way.values():
            if journey.phase == "between":
                journey.phase, journey.steps = "loading", 0
                self._add(self.decode, journey, with_params(journey.params, journey.told))


def is_busy(llm: LLM) -> bool:
    """Return whether an engine has unfinished requests."""
    return core_of(llm).has_unfinished_requests()


def with_params(params: SamplingParams, told: dict[str, Any] | None) -> SamplingParams:
    """Return the sampling params with the connector's parameters, as a proxy would add them."""
    return replace(params, extra_args={"kv_transfer_params": told} if told else None)


def random_sides(draw: random.Random) -> list[dict[str, Any]]:
    """Draw settings of a prefill and a decode engine whose caches are compatible."""
    sides = [random_settings(draw) for _ in range(2)]
    ranks = draw.random() < 0.04
    for side in sides:
        side.pop("tensor_parallel_size", None)
        if ranks:
            side["tensor_parallel_size"] = 2
    sides[1].pop("kv_cache_dtype", None)
    sides[1] |= {name: sides[0][name] for name in ("block_size", "kv_cache_dtype") if name in sides[0]}
    sides[1]["num_gpu_blocks_override"] = draw.choice([104 // sides[0]["block_size"] + 3, 400])
    return sides


def joined(batches: Iterable[Batch]) -> Batch:
    """Join several batches into one."""
    prompts, params = zip(*batches, strict=True)
    return [*chain(*prompts)], [*chain(*params)]


def random_journeys(draw: random.Random, batch: Batch, first: int) -> Iterator[Journey]:
    """Yield the batch's requests as journeys, some of which are to be aborted."""
    for index, (prompt, params) in enumerate(zip(*batch, strict=True)):
        abort = (draw.choice(PHASES), draw.randrange(6)) if draw.random() < 0.2 else None
        yield Journey(f"r{first + index}", prompt, params, abort, alone=draw.random() < 0.15)


def compare(connector: str, draw: random.Random, texts: list[list[int]], most: int, tally: Tally) -> None:
    """Serve about `most` requests with one pair of engines and with a plain engine, and count
    differences.
    """
    sides = random_sides(draw)
    policy = draw.choice(["fail", "recompute"])
    same_cache = {name: sides[0][name] for name in ("kv_cache_dtype", "block_size") if name in sides[0]}
    plain = LLM(EMBEDDED_MODEL, **SETTINGS | same_cache | ENOUGH_BLOCKS)
    pair, done = Pair(connector, sides, policy, draw), 0
    while done < most:
        batch = joined(random_batch(draw, texts) for _ in range(draw.randrange(1, 4)))
        journeys, expected = list(random_journeys(draw, batch, done)), generated(plain, batch)
        done += len(journeys)
        tally.requests += len(journeys)
        ended = pair.serve(journeys)
        for journey, tokens in zip(journeys, expected, strict=True):
            count(journey, tokens, tally)
        if not ended:
            tally.stuck += len(pair.under_way)
            print(f"{connector} {sides} {policy}: {list(pair.under_way.values())} never end", file=sys.stderr)
            break
    held = pair.held_blocks()
    if held:
        print(f"{connector} {sides} {policy}: {held} blocks are still held", file=sys.stderr)
    tally.held_blocks += held
    prefill, decode = pair.prefill.llm_engine.stats, pair.decode.llm_engine.stats
    lookups = core_of(pair.decode).scheduler.make_stats().connector_prefix_cache_stats
    tally.external_tokens += lookups.hits if lookups else 0
    tally.preemptions_prefill += prefill.num_preemptions
    tally.preemptions_decode += decode.num_preemptions
    for llm in (plain, pair):
        llm.shutdown()


def count(journey: Journey, expected: list[int], tally: Tally) -> None:
    """Compare a request's tokens with the plain engine's; for an aborted request, only those that
    it got before.
    """
    if journey.error == "aborted":
        assert journey.abort
        tally.aborted[journey.abort[0]] += 1
        expected = expected[: len(journey.tokens)]
    elif journey.error is not None:
        print(journey.error, file=sys.stderr)
        tally.failed += 1
        return
    tally.tokens += len(journey.tokens)
    tally.differing += journey.tokens != expected


def main(arguments: argparse.Namespace) -> None:
    """Compare the requests for each connector, and exit with 1 if anything differs."""
    tokenizer = load_tokenizer(str(EMBEDDED_MODEL))
    texts = [ids for text in held_out_texts() if len(ids := tokenizer.encode(text).ids) > 100]
    names = [name for name in CONNECTORS if arguments.only in (None, name)]
    if find_spec("nixl_cu13") is None and "NixlConnector" in names:
        print("NixlConnector is skipped: uv run --group nixl installs it", file=sys.stderr)
        names.remove("NixlConnector")
    tallies, pairs = {name: Tally() for name in names}, -(-arguments.requests // REQUESTS_OF_A_PAIR)
    for number in track(range(len(names) * pairs), "comparing"):
        name = names[number % len(names)]
        draw, left = random.Random(f"{arguments.seed} {number}"), arguments.requests - tallies[name].requests
        if left > 0:
            compare(name, draw, texts, min(left, REQUESTS_OF_A_PAIR), tallies[name])
    show(tallies)
    result = record("disaggregation_equality", {name: vars(one) for name, one in tallies.items()}, seed=arguments.seed)
    report(result, arguments.json)
    if any(one.differing or one.held_blocks or one.stuck or one.failed for one in tallies.values()):
        sys.exit(1)


def show(tallies: dict[str, Tally]) -> None:
    columns = ["connector", "requests", "aborted", "tokens", "loaded", "preempted", "differing", "failed"]
    rows = [
        (
            name,
            *map(str, (one.requests, one.aborted.total(), one.tokens, one.external_tokens)),
            f"{one.preemptions_prefill} + {one.preemptions_decode}",
            *map(str, (one.differing, one.failed, one.stuck, one.held_blocks)),
        )
        for name, one in tallies.items()
    ]
    table("Random requests: two engines compared with one", [*columns, "never ended", "blocks lost"], rows)


def parser() -> argparse.ArgumentParser:
    flags = benchmark_parser(__doc__)
    flags.add_argument(
        "--requests", type=positive_int, default=340, help="random requests for each connector (default: 340)"
    )
    flags.add_argument("--only", choices=CONNECTORS, help="test only this connector")
    flags.add_argument("--seed", type=int, default=0, help="seed for all random choices (default: 0)")
    return flags


if __name__ == "__main__":
    run(main, parser())
