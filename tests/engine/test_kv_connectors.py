"""Engines that share keys and values answer as one that computes all of them."""

import json
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_DRAFT, EMBEDDED_MODEL
from minivllm.core.remote_kv import LOAD_FAILED
from minivllm.errors import MinivllmError
from minivllm.worker.kv_connector_runner import ActiveKVConnector

pytestmark = pytest.mark.usefixtures("warm_processes")

SMALL: dict[str, Any] = {
    "model": EMBEDDED_MODEL,
    "device": "cpu",
    "max_model_len": 128,
    "block_size": 8,
    "num_gpu_blocks_override": 128,
}


def transfer(folder: Path, **settings: Any) -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder)}
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra} | settings


def prompts(seed: int, count: int = 8) -> list[dict[str, list[int]]]:
    """Random token ids; many begin alike."""
    rng = Random(seed)
    heads = [[rng.randrange(500) for _ in range(rng.randint(8, 50))] for _ in range(3)]
    tails = [[rng.randrange(500) for _ in range(rng.randint(1, 30))] for _ in range(count)]
    return [{"prompt_token_ids": rng.choice(heads) + tail} for tail in tails]


def answers(llm: LLM, asked: list[Any]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(asked, params, use_tqdm=False)]


def external_hits(llm: LLM) -> int:
    stats = llm.llm_engine.engine_core.engine_core.scheduler.make_stats()
    return stats.connector_prefix_cache_stats.hits


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_cache_dtype": "int8", "max_num_batched_tokens": 24},
        {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 40, "async_scheduling": True},
        {"speculative_config": {"method": "draft_model", "model": "draft", "num_speculative_tokens": 2}},
    ],
    ids=["plain", "int8 in chunks", "preempted", "drafts"],
)
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


@pytest.mark.parametrize("ahead", [False, True])
def test_files_that_are_cut_or_altered_are_noticed(tmp_path: Path, ahead: bool) -> None:
    asked = prompts(3, 5)
    settings = SMALL | {"async_scheduling": ahead}
    expected = answers(LLM(**settings, kv_transfer_config=transfer(tmp_path)), asked)
    rng = Random(0)
    files = sorted(tmp_path.rglob("*.safetensors"))
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
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(b"nothing")
    llm = LLM(**SMALL, kv_transfer_config=transfer(tmp_path))
    llm.llm_engine.add_request("bad", asked[0], SamplingParams(max_tokens=4))
    llm.llm_engine.add_request("good", asked[1], SamplingParams(max_tokens=4, ignore_eos=True))
    last = {}
    while llm.llm_engine.has_unfinished_requests():
        last |= {output.request_id: output.outputs[0] for output in llm.llm_engine.step()}
    assert (last["bad"].finish_reason, last["bad"].error) == ("error", LOAD_FAILED)
    assert len(last["good"].token_ids) == 4
    assert not list(tmp_path.rglob("*.safetensors")) or external_hits(llm) == 32


def test_ranks_save_and_load_their_parts(tmp_path: Path) -> None:
    asked, settings = prompts(5, 4), SMALL | {"tensor_parallel_size": 2}
    expected = answers(LLM(**SMALL), asked)
    for _ in range(2):
        llm = LLM(**settings, kv_transfer_config=transfer(tmp_path))
        try:
            assert answers(llm, asked) == expected
            hits = external_hits(llm)
        finally:
            llm.shutdown()
    assert hits > 50


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_connector": "Nothing"}, "there is no kv_connector"),
        ({"kv_connector": "ExampleConnector"}, "needs a folder"),
        ({"kv_role": "kv_both"}, "lacks kv_connector"),
        ({"kv_connector": "ExampleConnector", "kv_role": "both"}, "unknown kv_role"),
        ({"kv_connector": "ExampleConnector", "color": 1}, "no key 'color'"),
        ({"kv_connector": "ExampleConnector", "engine_id": "\ud800"}, "half of a character"),
        ({"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"x": "\ud800"}}, "half of a character"),
        (
            {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": "a\0"}},
            "null byte",
        ),
        ("ExampleConnector", "must be a dictionary"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(MinivllmError, match=message) as refused:
        LLM(**SMALL, kv_transfer_config=settings)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("other", [{"pipeline_parallel_size": 2}, {"data_parallel_size": 2}, {"use_kv_cache": False}])
def test_what_does_not_go_with_a_connector_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    with pytest.raises(MinivllmError, match=next(iter(other))):
        LLM(**SMALL | other, kv_transfer_config=json.loads(json.dumps(transfer(tmp_path))))


def test_on_a_gpu_a_step_waits_for_the_forward_pass_before_it_and_not_for_copies(monkeypatch) -> None:
    """Copies have streams of their own, for which a wait for the whole device would wait too."""
    happened = []
    connector = SimpleNamespace(
        register_kv_caches=lambda caches: None,
        bind_connector_metadata=lambda metadata: happened.append("bound"),
        start_load_kv=lambda: happened.append("loads begin"),
    )
    stream = SimpleNamespace(synchronize=lambda: happened.append("forward pass over"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("everything over"))
    active = ActiveKVConnector(cast(Any, connector), {"layer": (SimpleNamespace(is_cuda=True),)}, 1)
    active.pre_forward(cast(Any, SimpleNamespace(kv_connector_metadata=object(), preempted_req_ids=())))
    assert happened == ["forward pass over", "bound", "loads begin"]
