"""`LLM` as vLLM's offline users know it: prompt formats, results, stops, and what happens when
input is bad.
"""

import itertools
import json
import shutil

import pytest
from engine.mixed_requests import run_out
from refusals import assert_refused

from minivllm import LLM, SamplingParams, StructuredOutputsParams
from minivllm.config import EMBEDDED_MODEL
from minivllm.core.engine_messages import EngineCoreRequest
from minivllm.errors import MinivllmError
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import RequestOutputKind
from minivllm_lab.engines.inside import core_of, runner_of

SETTINGS = {"device": "cpu", "max_model_len": 256, "num_gpu_blocks_override": 65}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return LLM(EMBEDDED_MODEL, **SETTINGS)


@pytest.fixture
def idle(llm):
    """Yield the engine, and expect nothing to be left in it afterwards."""
    yield llm
    assert not llm.llm_engine.has_unfinished_requests()
    assert not llm.llm_engine.output_processor.states
    assert not llm.llm_engine._children
    assert llm.reset_prefix_cache(), "some request still holds a block"


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def test_all_forms_of_a_prompt(idle):
    text = "def add(a, b):"
    ids = idle.llm_engine.tokenizer.encode(text).ids
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    outputs = idle.generate(forms, GREEDY)
    assert len({tuple(tokens(output)) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == [text, None, text, None]
    assert all(output.prompt_token_ids == ids for output in outputs)
    for form in forms:
        [alone] = idle.generate(form, GREEDY)
        assert tokens(alone) == tokens(outputs[0])


def test_what_a_result_holds(idle):
    [output] = idle.generate("import os", SamplingParams(temperature=0.0, max_tokens=5, logprobs=1, ignore_eos=True))
    [completion] = output.outputs
    assert output.finished
    assert completion.finished()
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
    assert len(completion.token_ids) == 5
    assert completion.text == idle.llm_engine.tokenizer.decode(completion.token_ids)
    logprobs = [entry[token] for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(logprob.logprob for logprob in logprobs))
    assert all(logprob.rank == 1 for logprob in logprobs), "greedy takes the most likely"
    assert "".join(logprob.decoded_token for logprob in logprobs) == completion.text
    assert output.metrics.arrival_time <= output.metrics.first_token_time <= output.metrics.last_token_time


def test_several_completions_have_seeds_of_their_own_and_share_the_prompt(idle):
    prompt = list(range(1, 40))
    params = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    [output] = idle.generate([prompt], params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    results = [completion.token_ids for completion in output.outputs]
    assert len({tuple(ids) for ids in results}) > 1
    alone = [idle.generate([prompt], params.child(index))[0] for index in range(4)]
    assert [tokens(each) for each in alone] == results


def test_requests_without_a_seed_differ_but_the_engines_seed_repeats_them():
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    runs = [
        [tokens(output) for output in LLM(EMBEDDED_MODEL, **SETTINGS, seed=3).generate([[5]] * 3, params)] for _ in "ab"
    ]
    assert runs[0] == runs[1]
    assert len({tuple(ids) for ids in runs[0]}) == 3


def test_a_stop_token_ends_and_leaves_no_text(idle):
    [free] = idle.generate([[5, 6]], GREEDY)
    stop = tokens(free)[3]
    first = tokens(free).index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop])
    [output] = idle.generate([[5, 6]], params)
    completion = output.outputs[0]
    assert completion.token_ids == tokens(free)[: first + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == idle.llm_engine.tokenizer.decode(completion.token_ids[:-1])


def test_end_of_sequence_stops_unless_ignored_or_too_early(idle):
    [eos] = idle.llm_engine.generation_config.eos_token_ids
    params = {"temperature": 0.0, "max_tokens": 6, "logit_bias": {eos: 100.0}}
    [stopped, ignoring, waiting] = idle.generate(
        [[5]] * 3,
        [SamplingParams(**params), SamplingParams(**params, ignore_eos=True), SamplingParams(**params, min_tokens=3)],
    )
    assert tokens(stopped) == [eos]
    completion = stopped.outputs[0]
    assert (completion.finish_reason, completion.stop_reason, completion.text) == ("stop", None, "")
    assert tokens(ignoring) == [eos] * 6
    [both] = idle.generate([[5]], SamplingParams(**params, ignore_eos=True, min_tokens=3))
    assert eos not in tokens(both)[:3], "an end that is ignored is still none of the first min_tokens"
    assert tokens(both)[3:] == [eos] * 3
    assert eos not in tokens(waiting)[:3]
    assert tokens(waiting)[3:] == [eos]


def test_a_stop_string_ends_the_request_in_the_core_too(idle):
    word = idle.llm_engine.tokenizer.encode("return").ids
    assert idle.llm_engine.tokenizer.decode(word) == "return"
    base = {"temperature": 0.0, "max_tokens": 200, "logit_bias": {word[0]: 100.0}}
    params = SamplingParams(**base, stop=["nret"], ignore_eos=True)
    before = core_of(idle).scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    [output] = idle.generate([[7]], params)
    assert output.outputs[0].text == "retur"
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "nret")
    assert core_of(idle).scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == before
    including = SamplingParams(**base, stop="nret", include_stop_str_in_output=True)
    assert idle.generate([[7]], including)[0].outputs[0].text == "returnret"


def stream(llm, **changes):
    llm.llm_engine.add_request("a stream", "class A", SamplingParams(**changes))
    return run_out(llm.llm_engine)


def test_streams_say_all_so_far_or_what_is_new(idle):
    settings = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, "stop": ["never to be seen"], "logprobs": 0}
    cumulative = stream(idle, **settings)
    deltas = stream(idle, **settings, output_kind=RequestOutputKind.DELTA)
    final = stream(idle, **settings, output_kind=RequestOutputKind.FINAL_ONLY)
    assert len(cumulative) == len(deltas) == 20
    assert len(final) == 1
    assert [output.finished for output in cumulative] == [False] * 19 + [True]
    whole = final[0].outputs[0]
    assert cumulative[-1].outputs[0].text == whole.text == "".join(output.outputs[0].text for output in deltas)
    assert whole.token_ids == [token for output in deltas for token in output.outputs[0].token_ids]
    assert whole.logprobs == [entry for output in deltas for entry in output.outputs[0].logprobs]
    texts = [output.outputs[0].text for output in cumulative]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


BAD = [
    ("", GREEDY, "the prompt is empty"), ([[]], GREEDY, "the prompt is empty"),
    ([[4096]], GREEDY, "the vocabulary is 0 to 4095"), ([[1] * 256], GREEDY, "may have 255"),
    ([["a", "b"]], GREEDY, "a prompt is a string"), (17, GREEDY, "prompts are int"),
    ({"text": "a"}, GREEDY, "prompt_token_ids"), ({"prompt": 5}, GREEDY, "it must be a string"),
    ({"prompt": "a", "cache_salt": ""}, GREEDY, "cache_salt"),
    ({"prompt": "a", "cache_salt": "\ud800"}, GREEDY, "cache_salt.* is not valid text"),
    ({"prompt": "a", "cache_slat": "b"}, GREEDY, "a prompt has no key 'cache_slat'; did you mean 'cache_salt'"),
    ("\ud800", GREEDY, "half a character"), (b"abc", GREEDY, "prompts are bytes"),
    ([[True, 2]], GREEDY, "a prompt is a string"),
    ("a", [GREEDY, GREEDY], "there are 1 prompts, but 2 in sampling_params"),
    ("a", {"temperature": 0}, "must be SamplingParams"),
    ("a", SamplingParams(stop_token_ids=[5000]), "stop_token_ids has the token id 5000"),
    ("a", SamplingParams(allowed_token_ids=[0], min_tokens=2), "nothing could be generated"),
]  # fmt: skip


@pytest.mark.parametrize(("prompts", "params", "said"), BAD, ids=lambda value: str(value)[:30])
def test_bad_input_is_one_clear_error(idle, prompts, params, said):
    assert_refused(said, idle.generate, prompts, params)


def test_ids_are_unique_among_unfinished_requests_and_may_look_like_any_other(idle):
    several = SamplingParams(n=2, seed=0, max_tokens=4, ignore_eos=True)
    names = ["a", "0_a", "a-0", "0_a-0"]
    for name in names:
        idle.llm_engine.add_request(name, [1], several)
        assert_refused(f"request '{name}' exists already", idle.llm_engine.add_request, name, [2], several)
    finished = [output for _ in range(4) for output in idle.llm_engine.step() if output.finished]
    assert [(output.request_id, len(output.outputs)) for output in finished] == [(name, 2) for name in names]
    assert_refused("must be a string", idle.llm_engine.add_request, 5, [1], GREEDY)


def test_a_request_that_breaks_on_its_way_in_leaves_nothing(idle, monkeypatch):
    def breaks(*_):
        raise RuntimeError("no text")

    monkeypatch.setattr("minivllm.engine.detokenizer.IncrementalDetokenizer", breaks)
    with pytest.raises(RuntimeError, match="no text"):
        idle.generate([[1], [2]], SamplingParams(n=3))


EXTREMES = [
    {"temperature": 2.0, "allowed_token_ids": [5, 6]}, {"temperature": 1e-300}, {"top_p": 1e-320}, {"top_k": 2**70},
    {"repetition_penalty": 1e6, "temperature": 1e-2}, {"repetition_penalty": 1e-6, "temperature": 1e-2},
    {"allowed_token_ids": {5}, "bad_words": ["def"]}, {"seed": -(2**70)},
]  # fmt: skip


@pytest.mark.parametrize("extreme", EXTREMES, ids=str)
def test_extreme_parameters_give_tokens_and_leave_the_neighbours_alone(idle, extreme):
    wild = SamplingParams(**{"seed": 1, "max_tokens": 8, "ignore_eos": True, **extreme})
    [alone] = idle.generate([[7]], GREEDY)
    [neighbour, output] = idle.generate([[7], [8]], [GREEDY, wild])
    assert tokens(neighbour) == tokens(alone)
    assert all(0 <= token < 4096 for token in tokens(output))
    assert set(tokens(output)) <= set(wild.allowed_token_ids or range(4096))


def test_a_request_that_forbids_every_token_ends_no_other(idle):
    word = idle.llm_engine.tokenizer.encode("return").ids
    nothing = SamplingParams(max_tokens=8, ignore_eos=True, allowed_token_ids=word, bad_words=["return"])
    [alone] = idle.generate([[7]], GREEDY)
    assert tokens(idle.generate([[7], [8]], [GREEDY, nothing])[0]) == tokens(alone)


def test_refused_calls_leave_no_ids_behind_for_a_step_that_need_not_come(idle):
    """This holds for a call alone and for one behind a waiting request, which is not ended."""
    engine, scheduler, params = idle.llm_engine, core_of(idle).scheduler, SamplingParams(max_tokens=2, temperature=0.0)
    expected = idle.generate("import", params, use_tqdm=False)
    before = set(scheduler.finished_req_ids)
    for _ in range(3):
        assert_refused("prompt 1", idle.generate, ["import", ""], params, use_tqdm=False)
        assert scheduler.finished_req_ids == before
    engine.add_request("waiting", "import", params)
    assert_refused("prompt 1", idle.generate, ["import", ""], params, use_tqdm=False)
    assert scheduler.finished_req_ids == before
    assert tokens(run_out(engine)[-1]) == tokens(expected[0])


def test_a_worker_hears_of_an_id_that_it_has_though_a_later_request_of_that_id_was_refused(idle):
    core = core_of(idle)
    request = EngineCoreRequest("again", [1, 2, 3], SamplingParams(max_tokens=8, seed=0), (), 0.0)
    core.add_request(request)
    core.step()
    for _ in range(2):
        core.abort_requests(["again"])
        assert core.scheduler.finished_req_ids == {"again"}
        core.add_request(request)
    core.step()
    core.abort_requests(["again"])
    idle.generate("import", SamplingParams(max_tokens=1), use_tqdm=False)
    assert "again" not in runner_of(core).batch.row_of


def test_a_request_fills_the_models_length_and_the_pool_must_hold_that():
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    small = LLM(EMBEDDED_MODEL, max_model_len=64, num_gpu_blocks_override=5)
    [output] = small.generate([[1] * 60], params)
    assert (len(tokens(output)), output.outputs[0].finish_reason) == (4, "length")
    settings = {"max_model_len": 65, "num_gpu_blocks_override": 5}
    assert_refused("max_model_len = 65 .* set max_model_len to 64 or less", LLM, EMBEDDED_MODEL, **settings)


def test_models_that_cannot_be():
    for name in ("~nouser/x", "a" * 300, "a\0b"):
        with pytest.raises(MinivllmError, match="there is no model directory") as refused:
            LLM(name)
        assert len(str(refused.value)) < 200
        assert_refused("there is no model directory", LLM, EMBEDDED_MODEL, **SETTINGS, tokenizer=name)
    assert_refused("model is ''; it must be a directory", LLM, "")
    assert_refused("there is no model directory", LLM, "./nothing-here")
    assert_refused("model is None; it must be a directory, or a name", LLM, None)


def test_without_a_tokenizer_tokens_in_and_tokens_out():
    llm = LLM(EMBEDDED_MODEL, **SETTINGS, skip_tokenizer_init=True)
    [output] = llm.generate([[1, 2]], SamplingParams(temperature=0.0, max_tokens=3, logprobs=1, ignore_eos=True))
    assert output.outputs[0].text == ""
    assert len(tokens(output)) == 3
    assert_refused("give token ids", llm.generate, "a text", GREEDY)
    constrained = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), detokenize=False)
    for params, said in ((SamplingParams(stop="a"), "use stop_token_ids"), (constrained, "constrains text")):
        assert_refused(said, llm.generate, [[1]], params)


def test_the_ledger_is_logged_once_and_adds_up(capsys):
    llm = LLM(EMBEDDED_MODEL, device="cpu", max_model_len=512, max_num_seqs=4)
    logged = capsys.readouterr().err
    assert "KV cache" in logged
    assert "512 tokens per request" in logged
    ledger = core_of(llm).ledger
    assert sum(row.bytes for row in ledger.rows) == ledger.device.memory_bytes
    assert ledger.usable_blocks == 4 * 512 // 16, "as many as requests can fill"
    caches = runner_of(llm).attention.kv_caches
    allocated = sum(cache.keys.nbytes + cache.values.nbytes for cache in caches)
    assert allocated == ledger.num_blocks * 16 * ledger.bytes_per_token
    llm.generate([[1]], GREEDY)
    assert "KV cache" not in capsys.readouterr().err


def test_default_parameters_are_the_models_own(tmp_path):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(EMBEDDED_MODEL / name, tmp_path)
    contents = {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 7, "eos_token_id": [0, 5, 9, 4096, -1]}
    (tmp_path / "generation_config.json").write_text(json.dumps(contents))
    llm = LLM(tmp_path, **SETTINGS)
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 0.9, 7)
    assert llm.llm_engine.input_processor.eos_token_ids == (0, 5, 9), "those outside the vocabulary cannot come"
    stopping = SamplingParams(temperature=0.0, logit_bias={9: 100.0})
    [stopped] = llm.generate([[1]], stopping)
    assert (tokens(stopped), stopped.outputs[0].stop_reason) == ([9], 9), "a second end of sequence says which it was"
    [stopped] = llm.generate([[1]], SamplingParams(temperature=0.0, logit_bias={0: 100.0}))
    assert (tokens(stopped), stopped.outputs[0].stop_reason) == ([0], None), "the tokenizer's own does not"


@pytest.mark.parametrize("contents", ["", "[]", "5", "{"])
def test_a_broken_generation_config_is_no_missing_one(tmp_path, contents):
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(EMBEDDED_MODEL / name, tmp_path)
    (tmp_path / "generation_config.json").write_text(contents)
    words = "generation_config.json (cannot be read as JSON|holds)"
    assert_refused(words, LLM, tmp_path, **SETTINGS, load_format="dummy")


def test_a_bad_word_with_a_space_is_forbidden_without_it_too(idle):
    [token] = idle.llm_engine.tokenizer.encode("self").ids
    [spaced] = idle.llm_engine.tokenizer.encode(" self").ids
    for word in ("self", " self"):
        for wanted in (token, spaced):
            bias = {wanted: 100.0}
            params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logit_bias=bias, bad_words=[word])
            assert wanted not in tokens(idle.generate([[7]], params)[0])


def test_parameters_assigned_later_are_checked_and_the_callers_object_stays_as_it_was(idle):
    params = SamplingParams(temperature=1.0, max_tokens=None, stop_token_ids=[9])
    before = params.clone()
    params.temperature = 3.0
    assert_refused(r"temperature is 3\.0", idle.llm_engine.add_request, "assigned", [1], params)
    params.temperature = 1.0
    idle.generate([[1]], params)
    assert params == before
    assert params.all_stop_token_ids == frozenset()
