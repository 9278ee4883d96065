"""A recorded run is the engine's run, and a file that is no recording is refused in one line."""

import os
import re
import signal
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import pytest

from minivllm import LLM, LoRARequest, SamplingParams
from minivllm.config import EMBEDDED_MODEL
from minivllm.core import step_events
from minivllm.core.block_pool import BlockPool
from minivllm.core.step_events import StepRecorder
from minivllm.engine.mp_client import SyncMPClient
from minivllm.entrypoints.xray.page import script
from minivllm.errors import EngineDeadError, MinivllmError
from minivllm_lab import step_recording
from minivllm_lab.inside import core_of
from minivllm_lab.step_recording import read_lines, record, replay
from widgets import xray

HEADER = '{"xray":1,"model":"m"}\n'
KEY = (
    '{"key":0,"t":0.0,"num_blocks":9,"block_size":4,"max_num_seqs":2,"max_num_batched_tokens":8,'
    '"requests":[],"cached":[],"waiting":[0,[]]}\n'
)
ADAPTERS = Path(__file__).parents[1] / "lora_adapters"
PROMPTS = ["def add(a, b):", "def add(a, b):", "import os"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(EMBEDDED_MODEL, device="cpu", max_model_len=64, block_size=4, num_gpu_blocks_override=40, max_num_seqs=2)


@pytest.fixture(scope="module")
def recorded(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "run.jsonl"
    with record(llm, path):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return path


def test_a_run_is_recorded_and_is_the_same_as_without(llm: LLM, recorded: Path) -> None:
    tokens = sum(one.num_tokens for state in replay(recorded) for one in state.batch)
    alone = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    with record(llm, recorded.with_name("again.jsonl")):
        watched = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in watched] == [one.outputs[0].token_ids for one in alone]
    prompts = sum(len(one.prompt_token_ids or ()) for one in alone)
    assert tokens >= prompts + 3 * 23 - 2 * len(alone[0].prompt_token_ids or ())
    *_, last = replay(recorded)
    assert (last.requests, last.waiting) == ({}, (0, []))
    pool: BlockPool = core_of(llm).scheduler.kv_cache_manager.block_pool
    assert pool.kv_event_queue is None, "nobody watches after the end"
    assert b"def" not in recorded.read_bytes()


def test_a_watcher_that_fails_costs_nobody_an_answer(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(StepRecorder, "observe", fail)
    with record(llm, tmp_path / "run.jsonl"):
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [len(one.outputs[0].token_ids) for one in outputs] == [24] * 3
    assert core_of(llm).step_recorder is None


def test_what_was_kept_back_can_be_taken_after_the_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several servers one stops watching while the others' requests decode on."""
    monkeypatch.setattr(step_events, "SECONDS_KEPT_BACK", 1000)
    core, engine = core_of(llm), llm.llm_engine
    core.start_step_events()
    engine.add_request("a", PROMPTS[0], PARAMS)
    for _ in range(9):
        engine.step()
    core.stop_step_events()
    told = core.take_step_events()
    engine.abort_request(["a"])
    assert told[-1].startswith(b'{"step":9,')
    assert core.take_step_events() == []


@pytest.mark.usefixtures("warm_processes")
def test_with_the_core_in_a_process_one_recording_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    remote = LLM(EMBEDDED_MODEL, device="cpu", max_model_len=64, num_gpu_blocks_override=40, multiprocess=True)
    for number, runs in enumerate((True, False, True)):
        path = tmp_path / f"{number}.jsonl"
        with record(remote, path):
            if runs:
                remote.generate(PROMPTS[0], PARAMS, use_tqdm=False)
            assert remote.reset_prefix_cache()
        assert not list(replay(path))[-1].cached, "the reset, after which no step comes"


@pytest.mark.usefixtures("warm_processes")
def test_a_recording_ends_with_the_engine(tmp_path: Path) -> None:
    """What has happened is said by the call that met it, and the file holds what was told before."""
    remote = LLM(EMBEDDED_MODEL, device="cpu", max_model_len=64, num_gpu_blocks_override=40, multiprocess=True)
    client, path = remote.llm_engine.engine_core, tmp_path / "run.jsonl"
    assert isinstance(client, SyncMPClient)

    with record(remote, path):
        remote.generate(PROMPTS[0], PARAMS, use_tqdm=False)
        os.kill(int(client.cores.names()[0]), signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            remote.generate(PROMPTS[0], PARAMS, use_tqdm=False)
    assert remote.llm_engine.step_watchers == []
    *_, last = replay(path)
    assert last.step >= 24


def test_the_slots_of_adapters_are_told_as_the_ranks_have_them(tmp_path: Path) -> None:
    """Evicted, pinned, removed; also what no step tells, since nothing runs."""
    llm = LLM(EMBEDDED_MODEL, device="cpu", max_model_len=64, enable_lora=True, max_loras=2, max_lora_rank=16)
    adapters = {name: LoRARequest(name, number, str(ADAPTERS / name)) for number, name in enumerate("abc", start=1)}
    core, seen = core_of(llm), []
    path = tmp_path / "run.jsonl"

    def slots() -> list[tuple[str, bool]]:
        names = {one.lora_int_id: name for name, one in adapters.items()}
        held = core.executor.collective_rpc("lora_slots")[0]
        return [(names.get(one, ""), one in core.scheduler.pinned_loras) for one in held]

    with record(llm, path):
        for act in ("a", "b", "c", "a", "pin c", "b", "remove b", "remove c"):
            word, name = act.split() if " " in act else ("", act)
            if word:
                getattr(llm.llm_engine, f"{word}_lora")(adapters[name].lora_int_id)
            else:
                llm.generate(PROMPTS[0], PARAMS, lora_request=adapters[name], use_tqdm=False)
            seen.append(slots())
    assert [slots for slots in seen if ("c", True) in slots], "it was pinned"
    assert ("", False) in seen[-1]
    assert list(changes(state.slots for state in replay(path))) == [[("", False)] * 2, *changes(seen)]


def changes(values: Iterable[list]) -> Iterator[list]:
    return (value for value, _ in groupby(values))


def test_a_recording_that_does_not_tell_slots_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text(HEADER + KEY.replace("}", ',"max_loras":2}') + '{"step":1,"t":0.0}\n')
    assert [state.slots for state in replay(path)] == [[], []]


def test_an_unfinished_last_line_is_left_out(recorded: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(recorded.read_bytes()[:-7])
    assert read_lines(cut) == read_lines(recorded)[:-1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "empty"),
        (HEADER, "line 1: there is no step"),
        ("[]\n", "line 1: Expected `object`"),
        ('{"xray":2}\n' + KEY, "line 1: its format is 2, and 1 is read here"),
        (HEADER + '{"step":1,"t":0.0}\n', "line 2: the first step comes before any state"),
        (HEADER + KEY.replace('"num_blocks":9', '"num_blocks":99999999'), "line 2: a pool of 99999999 blocks"),
        (HEADER + KEY.replace('"cached":[]', '"cached":[9]'), "line 2: block 9 of a pool of 9"),
        (HEADER + KEY + '{"step":1,"t":0.0,"batch":[4]}\n', "line 3: step 1 names request 4"),
        (HEADER + KEY + '{"step":1,"t":0.0,"stored":[-1]}\n', "line 3: block -1 of a pool of 9"),
        (HEADER + KEY + '{"step":1,"t":0.0,"stored":["1"]}\n', "line 3: Expected `int`, got `str`"),
        (HEADER + KEY + "\xff\xfe\n", "line 3: JSON is malformed"),
    ],
)
def test_what_is_no_recording_is_refused_in_one_line(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.jsonl"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(MinivllmError, match=re.escape(words)) as refused:
        read_lines(path)
    assert len(str(refused.value).splitlines()) == 1


def test_what_is_too_large_or_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MinivllmError, match="cannot be read: No such file"):
        read_lines(tmp_path / "missing")
    (tmp_path / "long").write_text(HEADER * 12)
    monkeypatch.setattr(step_recording, "MOST_LINES", 10)
    with pytest.raises(MinivllmError, match="more than 10 lines"):
        read_lines(tmp_path / "long")
    monkeypatch.setattr(step_recording, "MOST_BYTES", 10)
    with pytest.raises(MinivllmError, match="record fewer steps"):
        read_lines(tmp_path / "long")


def test_the_widget_has_the_run_and_a_picture_for_where_no_kernel_runs(recorded: Path) -> None:
    widget = xray.show(recorded)
    assert widget.described["text"].encode() == recorded.read_bytes()
    picture = widget.still()
    assert picture.startswith("<svg")
    step, held = map(int, re.findall(r"Step (\d+): 2 requests run .* hold (\d+) of 39 blocks", picture)[0])
    assert step > 5
    assert picture.count("<text") >= held > 10


def test_page_and_picture_have_the_same_colours() -> None:
    told = re.search(r"const HUES = \[(.*?)\]", script())
    assert told
    assert tuple(re.findall(r'"(#\w+)"', told[1])) == xray.HUES
