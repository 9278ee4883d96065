"""Engines that share keys and values answer like one that computes them all."""

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from engine.mixed_requests import greedy_answers, random_prompts, run_out

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_DRAFT, EMBEDDED_MODEL
from minivllm.core.remote_kv import LOAD_FAILED
from minivllm.worker.kv_connector_runner import KVConnectorRunner
from minivllm_lab.engines.inside import core_of

pytestmark = pytest.mark.usefixtures("warm_processes")

SMALL: dict[str, Any] = {
    "model": EMBEDDED_MODEL, "device": "cpu", "max_model_len": 128, "block_size": 8, "num_gpu_blocks_override": 128,
}  # fmt: skip


def transfer(folder: Path, **settings: Any) -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder)}
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra} | settings


def prompts(seed: int, count: int = 8) -> list[dict[str, list[int]]]:
    return random_prompts(seed, count, heads=(8, 50), tails=(1, 30))


def answers(llm: LLM, asked: list[Any]) -> list[list[int]]:
    return greedy_answers(llm, asked, max_tokens=8)


def external_hits(llm: LLM) -> int:
    return core_of(llm).scheduler.make_stats().connector_prefix_cache_stats.hits


ENGINES = [
    {"kv_cache_dtype": "int8", "max_num_batched_tokens": 24},
    {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 40, "async_scheduling": True},
    {"speculative_config": {"method": "draft_model", "model": "draft", "num_speculative_tokens": 2}},
]


@pytest.mark.parametrize("settings", ENGINES)
def test_two_engines_over_files_answer_as_one_alone(tmp_path: Path, settings: dict[str, Any]) -> None:
    if "speculative_config" in settings:
        settings["speculative_config"]["model"] = str(EMBEDDED_DRAFT)
    asked = prompts(len(settings))
    settings = SMALL | settings
    expected = answers(LLM(**settings), asked)
    first = LLM(**settings, kv_transfer_config=transfer(tmp_path))
    assert answers(first, asked) == expected
    second = LLM(**settings, kv_transfer_config=transfer(tmp_path, kv_role="kv_consumer"))
    assert answers(second, asked) == expected
    assert external_hits(second) > 100
    assert external_hits(first) < external_hits(second)


def test_files_that_are_cut_or_altered_are_noticed(tmp_path: Path) -> None:
    asked = prompts(3, 5)
    settings = SMALL | {"async_scheduling": True}
    expected = answers(LLM(**settings, kv_transfer_config=transfer(tmp_path)), asked)
    rng = Random(0)
    files = sorted(tmp_path.rglob("*.kv"))
    for file in rng.sample(files, len(files) // 3):
        content = bytearray(file.read_bytes())
        if rng.random() < 0.5:
            file.write_bytes(content[: len(content) // 2])
        else:
            content[-7] ^= 4
            file.write_bytes(content)
    again = LLM(**settings, kv_transfer_config=transfer(tmp_path, kv_load_failure_policy="recompute"))
    assert answers(again, asked) == expected
    third = LLM(**settings, kv_transfer_config=transfer(tmp_path))
    assert answers(third, asked) == expected, "what was recomputed is there again, and right"


def test_by_default_a_bad_file_fails_the_request_that_needs_it(tmp_path: Path) -> None:
    asked = [{"prompt_token_ids": list(range(40))}, {"prompt_token_ids": list(range(100, 130))}]
    answers(LLM(**SMALL, kv_transfer_config=transfer(tmp_path)), asked[:1])
    for file in tmp_path.rglob("*.kv"):
        file.write_bytes(b"nothing")
    llm = LLM(**SMALL, kv_transfer_config=transfer(tmp_path))
    llm.llm_engine.add_request("bad", asked[0], SamplingParams(max_tokens=4))
    llm.llm_engine.add_request("good", asked[1], SamplingParams(max_tokens=4, ignore_eos=True))
    last = {output.request_id: output.outputs[0] for output in run_out(llm.llm_engine)}
    assert (last["bad"].finish_reason, last["bad"].error) == ("error", LOAD_FAILED)
    assert len(last["good"].token_ids) == 4
    assert not list(tmp_path.rglob("*.kv")) or external_hits(llm) == 32


def test_ranks_save_and_load_their_parts(request: Any, tmp_path: Path) -> None:
    asked, settings = prompts(5, 4), SMALL | {"tensor_parallel_size": 2}
    expected = answers(LLM(**SMALL), asked)
    for _ in range(2):
        llm = LLM(**settings, kv_transfer_config=transfer(tmp_path))
        request.addfinalizer(llm.shutdown)
        assert answers(llm, asked) == expected
    assert external_hits(llm) > 50


def test_on_a_gpu_a_step_waits_for_the_forward_pass_before_it_and_not_for_copies(monkeypatch) -> None:
    """Copies have their own streams, and synchronizing the whole device would wait for them too."""
    happened = []
    connector = SimpleNamespace(
        register_kv_caches=lambda caches: None,
        bind_connector_metadata=lambda metadata: happened.append("bound"),
        start_load_kv=lambda: happened.append("loads begin"),
    )
    stream = SimpleNamespace(synchronize=lambda: happened.append("forward pass over"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("everything over"))
    active = KVConnectorRunner(cast(Any, connector), {"layer": (SimpleNamespace(is_cuda=True),)}, 1)
    active.pre_forward(cast(Any, SimpleNamespace(kv_connector_metadata=object(), preempted_req_ids=())))
    assert happened == ["forward pass over", "bound", "loads begin"]
