"""A recorded run is the engine's run, and a file that is not a recording is refused in one line."""

import json
import os
import signal
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from refusals import assert_refused

from minivllm import LLM, LoRARequest, SamplingParams
from minivllm.config import EMBEDDED_MODEL
from minivllm.engine.mp_client import SyncMPClient
from minivllm.errors import EngineDeadError
from minivllm_lab.engines.inside import core_of
from minivllm_lab.engines.step_recording import read_recording, record
from widgets import xray

HEADER = '{"xray":2,"model":"m"}\n'
ADAPTERS = Path(__file__).parents[2] / "lora_adapters"
PROMPTS = ["def add(a, b):", "def add(a, b):", "import os"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def test_a_run_is_recorded_and_is_the_same_as_without(tmp_path: Path) -> None:
    llm = LLM(EMBEDDED_MODEL, device="cpu", max_model_len=64, block_size=4, num_gpu_blocks_override=40, max_num_seqs=2)
    path = tmp_path / "run.jsonl"
    alone = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    llm.reset_prefix_cache()
    with record(llm, path):
        watched = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        llm.reset_prefix_cache()
    assert [output.outputs[0].token_ids for output in watched] == [output.outputs[0].token_ids for output in alone]
    _, *steps = read_recording(path)
    assert sum(row[3] for step in steps for row in step["batch"]) == 3 * 24
    assert (steps[-1]["running"], steps[-1]["num_waiting"], steps[-1]["cached"]) == ([], 0, [])
    assert max(len(step["running"]) for step in steps) == 2
    assert core_of(llm).step_recorder is None, "nobody watches after the end"
    assert b"def" not in path.read_bytes()
    assert xray.show(path).text.encode() == path.read_bytes()


@pytest.mark.usefixtures("warm_processes")
def test_a_recording_ends_with_the_engine(tmp_path: Path) -> None:
    """The failing call reports what happened, and the file keeps what was written before."""
    remote = LLM(EMBEDDED_MODEL, device="cpu", max_model_len=64, num_gpu_blocks_override=40, multiprocess=True)
    client, path = remote.llm_engine.engine_core, tmp_path / "run.jsonl"
    assert isinstance(client, SyncMPClient)

    with record(remote, path):
        remote.generate(PROMPTS[0], PARAMS, use_tqdm=False)
        os.kill(int(client.cores.processes[0].pid), signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            remote.generate(PROMPTS[0], PARAMS, use_tqdm=False)
    assert remote.llm_engine.step_watchers == []
    assert read_recording(path)[-1]["step"] >= 24


def test_the_slots_of_adapters_are_told_as_the_ranks_have_them(tmp_path: Path) -> None:
    """Adapters are evicted, pinned and removed."""
    llm = LLM(EMBEDDED_MODEL, device="cpu", max_model_len=64, enable_lora=True, max_loras=2, max_lora_rank=16)
    adapters = {name: LoRARequest(name, number, str(ADAPTERS / name)) for number, name in enumerate("abc", start=1)}
    core, seen = core_of(llm), []
    path = tmp_path / "run.jsonl"

    def slots() -> list[Any]:
        names = {adapter.lora_int_id: name for name, adapter in adapters.items()}
        held = core.executor.collective_rpc("lora_slots")[0]
        return [[names.get(adapter, ""), adapter in core.scheduler.pinned_loras] for adapter in held]

    with record(llm, path):
        for name in ("a", "b", "c", "a", "c", "b"):
            if name == "c" and len(seen) == 4:
                llm.llm_engine.pin_lora(3)
            llm.generate(PROMPTS[0], PARAMS, lora_request=adapters[name], use_tqdm=False)
            seen.append(slots())
        llm.llm_engine.remove_lora(2)
        seen.append(slots())
    assert ["c", True] in seen[-1]
    assert ["", False] in seen[-1]
    told = [step["slots"] for step in read_recording(path)[1:]]
    assert [slots for slots, _ in groupby(told) if slots != [["", False]] * 2] == [slots for slots, _ in groupby(seen)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not a recording: not enough values"),
        (HEADER, "needs a header of format 2, and a step"),
        ('{"xray":1}\n{}\n', "needs a header of format 2, and a step"),
        ("hello\n", "is not a recording: Expecting value"),
    ],
)
def test_what_is_no_recording_is_refused_in_one_line(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(content)
    assert_refused(words, xray.show, path)


def test_a_file_that_cannot_be_read_or_written_is_one_line(tmp_path: Path) -> None:
    assert_refused("cannot be read: No such file", read_recording, tmp_path / "missing")
    llm = LLM(EMBEDDED_MODEL, device="cpu", max_model_len=64, num_gpu_blocks_override=40)
    assert_refused(r"cannot record to .*missing.*No such file", record(llm, tmp_path / "missing" / "file").__enter__)
    assert json.loads(HEADER)["xray"] == 2
