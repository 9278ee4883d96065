"""Lesson 08's checks of its two engines: the same tokens as one, a kernel that moves every bit, and
peers that die. A `Make` callable makes the two engines.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from minivllm_lab.disaggregation.transfer_worker import until_finished
from minivllm_lab.engines.disturbed_chats import random_prompt
from minivllm_lab.paged_model import PagedModel, decoder_of
from minivllm_lab.tables import console, heading, record_table

BLOCK_SIZE, NUM_BLOCKS = 16, 200

Make = Callable[..., tuple[Any, Any]]


def paged_model(arguments: argparse.Namespace) -> PagedModel:
    """Make the lesson's model in float32 with an empty cache of its own."""
    return PagedModel(decoder_of(arguments), NUM_BLOCKS, BLOCK_SIZE)


def compare_tokens(make: Make, through_both: Callable, arguments: argparse.Namespace) -> dict:
    """Send requests through both engines and through one; compare the tokens, the bytes moved, and
    the blocks held afterwards.

    Raises:
        AssertionError: a token differs, or a block is still held.
    """
    heading("2. The prompt here, the answer there")
    (prefiller, decoder), (plain, _) = make(), make()
    tokens, results, shared = 8 if arguments.quick else 24, {}, random_prompt(96, 1)
    block_bytes = BLOCK_SIZE * decoder.model.bytes_per_token
    cases = {
        "100 tokens": random_prompt(100, 2),
        "64, four full blocks": random_prompt(64, 3),
        "one token": random_prompt(1, 4),
        "96, then 40 of its own": shared + random_prompt(40, 5),
        "the same 96, then 20": shared + random_prompt(20, 6),
        "the first one again": random_prompt(100, 2),
    }
    for name, prompt in cases.items():
        before = decoder.worker.num_bytes
        request = through_both(prefiller, decoder, name, list(prompt), tokens)
        expected = until_finished(plain, plain.add(name, list(prompt), tokens))
        assert request.output_token_ids == expected.output_token_ids, f"{name}: the tokens differ from one engine's"
        _until_released(prefiller)
        moved = decoder.worker.num_bytes - before
        results[name] = {"prompt": len(prompt), "here": request.num_cached_tokens, "bytes": moved}
    pair = _two_at_once(prefiller, decoder, random_prompt(200, 9))
    record_table(
        f"{tokens} tokens of each, greedy, against one engine",
        {name: {**each, "blocks": each["bytes"] // block_bytes, "same": "yes"} for name, each in results.items()},
        "prompt {name} | tokens {prompt} | found here {here} | blocks moved {blocks} | bytes {bytes:,} | "
        "same tokens {same}",
        f"{decoder.model.bytes_per_token:,} bytes a token. Two requests at once with one prompt of 200 tokens: "
        f"{pair['first']} and {pair['second']} blocks moved. No blocks are held at the end.",
    )
    assert prefiller.blocks.num_held == decoder.blocks.num_held == 0, "blocks are still held"
    return {"requests": results, "bytes_per_token": decoder.model.bytes_per_token, "pair": pair}


def _two_at_once(prefiller: Any, decoder: Any, prompt: list[int]) -> dict[str, int]:
    """Let two requests with the same prompt reach the decoder together; count the blocks that move
    for each.
    """
    for name in ("left", "right"):
        until_finished(prefiller, prefiller.add(name, list(prompt), 1, {"do_remote_decode": True}))
    requests = [decoder.add(name, list(prompt), 2, prefiller.params[name]) for name in ("left", "right")]
    until_finished(decoder, *requests)
    _until_released(prefiller)
    assert requests[0].output_token_ids == requests[1].output_token_ids, "one prompt, two answers"
    blocks = [-(-(len(prompt) - request.num_cached_tokens) // BLOCK_SIZE) for request in requests]
    return dict(zip(("first", "second"), blocks, strict=True))


def _until_released(engine: Any, seconds: float = 30.0) -> None:
    """Step an idle engine until it holds no blocks, or until time is up."""
    until = time.monotonic() + seconds
    while engine.blocks.num_held and time.monotonic() < until:
        engine.step()
        time.sleep(1e-4)


def transfer_case(numbers: int, num_blocks: int, block_ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Make a random cache [6, num_blocks, numbers], an empty staging buffer for these blocks,
    and their ids.
    """
    data = torch.randn(6, num_blocks, numbers)
    return data, torch.zeros(len(block_ids), 6, numbers), torch.tensor(list(block_ids), dtype=torch.int32)


def verify_kernels(
    launch: Callable[..., Tensor], gather_kernel: Any, scatter_kernel: Any, device: torch.device
) -> dict:
    """Check gathering and scattering bit for bit, also for blocks of awkward sizes.

    Raises:
        AssertionError: a number is wrong, or one was written that should not be.
    """
    heading("3. The kernel")
    sizes, block_ids = (16, 1000, 1024, 1040), [5, 2, 7, 1]
    for numbers in sizes:
        cache_, staging, ids = (tensor.to(device) for tensor in transfer_case(numbers, 9, block_ids))
        gathered = launch(gather_kernel, cache_, staging, ids)
        assert torch.equal(gathered, cache_[:, block_ids].transpose(0, 1)), f"blocks of {numbers} are gathered wrongly"
        target = torch.zeros_like(cache_)
        ids[2] = -1
        launch(scatter_kernel, target, gathered, ids)
        expected = torch.zeros_like(cache_)
        expected[:, [5, 2, 1]] = cache_[:, [5, 2, 1]]
        assert torch.equal(target, expected), f"blocks of {numbers} are scattered wrongly"
    shown = ", ".join(f"{size:,}" for size in sizes)
    console.print(f"Blocks of {shown} numbers, into one piece and back: correct bit for bit")
    return {"sizes": sizes}


def break_peers(make: Make, arguments: argparse.Namespace, lease: float = 0.4) -> dict:
    """Let a decoder die while it reads, and a prefiller before its blocks are read; check the
    blocks and the tokens.

    Raises:
        AssertionError: blocks are never freed, or a token is wrong.
    """
    heading("6. Break it")
    prompt, (prefiller, _) = random_prompt(200, 8), make(lease=lease)
    until_finished(prefiller, prefiller.add("dies", list(prompt), 1, {"do_remote_decode": True}))
    held = {"the prefiller has answered": prefiller.blocks.num_held}
    with _clock_stopped(prefiller.connector):  # however slow this machine is, the half is read in time
        _read_half(prefiller.params["dies"])
        prefiller.step()
        held["a decoder has read half of it and then died"] = while_read = prefiller.blocks.num_held
    begin = time.monotonic()
    _until_released(prefiller)
    waited = time.monotonic() - begin
    held[f"{lease:g} s after its answer, when the lease ends"] = prefiller.blocks.num_held
    assert while_read > 0 == prefiller.blocks.num_held, "the lease must hold the blocks, then free them"
    records = {then: {"blocks": blocks} for then, blocks in held.items()}
    record_table("Blocks that the prefiller holds", records, {"then": "{name}", "blocks": "{blocks}"})
    return {"held": while_read, "lease": lease, "waited": waited} | _dead_prefiller(make, prompt)


@contextmanager
def _clock_stopped(connector: Any) -> Iterator[None]:
    """Stop a connector's clock, so that no lease expires."""
    clock, now = connector.clock, connector.clock()
    connector.clock = lambda: now
    yield
    connector.clock = clock


def _read_half(params: Mapping[str, Any]) -> None:
    """Read half of the blocks, then leave."""
    with socket.create_connection((params["remote_host"], params["remote_port"])) as connection:
        body = {"request_id": params["remote_request_id"], "block_ids": params["remote_block_ids"]}
        connection.sendall(json.dumps(body).encode() + b"\n")
        size = int.from_bytes(connection.recv(8), "big")
        read = 0
        while read < size // 2:
            read += len(connection.recv(min(4096, size // 2 - read)))


def _dead_prefiller(make: Make, prompt: list[int]) -> dict:
    """Kill the prefiller before its blocks are read: the decoder computes the prompt itself."""
    (prefiller, decoder), (plain, _) = make(), make()
    until_finished(prefiller, prefiller.add("alone", list(prompt), 1, {"do_remote_decode": True}))
    prefiller.worker.listening.close()
    request = until_finished(decoder, decoder.add("alone", list(prompt), 8, prefiller.params["alone"]))
    expected = until_finished(plain, plain.add("alone", list(prompt), 8))
    assert request.output_token_ids == expected.output_token_ids, "the tokens differ from one engine's"
    console.print("With the prefiller gone, the decoder computes the prompt itself: the same 8 tokens.")
    return {"bytes_from_the_dead": decoder.worker.num_bytes}
