"""Every request gets the tokens of a model into which its adapter was merged, whatever runs beside
it.

The merged models, W + scale B A in fp32, are computed here and run by `transformers`. As in
`test_equivalence`, a token's logit need only be within 1e-3 of the greatest, because sums in
another order differ in their last digits.
"""

import copy
import functools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.captured import capture_with
from engine.golden_adapters import ADAPTERS, EXPECTED, PROMPT, request
from engine.mixed_requests import run_out
from engine.test_equivalence import FAMILIES, SHAPE, assert_most_likely, random_checkpoint
from refusals import assert_refused

from minivllm import LLM, LoRARequest, SamplingParams
from minivllm.config import EMBEDDED_DRAFT, EMBEDDED_MODEL, ModelConfig, Parts
from minivllm.core.adapter_slots import AdapterSlots
from minivllm.core.block_hash import generate_block_hash_extra_keys
from minivllm.engine.lora_registry import AdapterRefused
from minivllm.errors import MinivllmError
from minivllm.kernels.packed_weights import dequantize_weight
from minivllm.memory.adapters import ALL_LINEARS, MLP_LINEARS
from minivllm.outputs import RequestOutput
from minivllm_lab.engines.inside import core_of, runner_of
from minivllm_lab.multi_lora.adapters import merge_adapter, random_adapter, write_adapter

pytestmark = pytest.mark.usefixtures("warm_processes")

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SETTINGS = {"device": "cpu", "max_model_len": 128, "enable_lora": True, "max_loras": 2, "max_cpu_loras": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def check(llm: LLM, *names: str | None) -> list:
    """Expect the recorded tokens from one call with a prompt for each adapter."""
    adapters = [request(name) for name in names]
    outputs = llm.generate([PROMPT] * len(names), GREEDY, lora_request=adapters, use_tqdm=False)
    for name, output in zip(names, outputs, strict=True):
        assert output.outputs[0].token_ids == EXPECTED[name], name
        assert output.lora_request == output.outputs[0].lora_request == request(name)
    return outputs


def answer(llm: LLM, adapter: LoRARequest | None, prompt: list[int] = PROMPT) -> RequestOutput:
    [output] = llm.generate([prompt], GREEDY, lora_request=adapter, use_tqdm=False)
    return output


def tokens_of(llm: LLM, adapter: LoRARequest | None, prompt: list[int] = PROMPT) -> list[int]:
    return answer(llm, adapter, prompt).outputs[0].token_ids


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(EMBEDDED_MODEL, **SETTINGS)


def test_mixed_in_one_batch_and_after_eviction(llm):
    """Three adapters take turns in two slots, and so do their requests in the queue."""
    manager = runner_of(llm).lora.manager
    before = manager.num_activations
    check(llm, "a", "b", None, "a")
    check(llm, *["a", "b", "c", None] * 4)
    check(llm, "c", "b")
    check(llm, "a")
    assert manager.num_activations >= before + 3
    assert set(manager.lora_index_to_id) <= {1, 2, 3}


def test_an_adapter_that_is_read_anew_hits_nothing_that_was_cached_for_it(llm, tmp_path):
    """Name, id and path stay the same; only the folder's contents differ."""
    adapter, prompt = LoRARequest("written", 9, str(tmp_path / "written")), [6, *PROMPT * 6]
    outputs = []
    for source in ("b", "a"):
        put(source, tmp_path / "written")
        llm.llm_engine.add_lora(replace(adapter, load_inplace=True))
        outputs.append(answer(llm, adapter, prompt))
    assert outputs[1].num_cached_tokens == 0
    assert outputs[1].outputs[0].token_ids == tokens_of(llm, request("a"), prompt) != outputs[0].outputs[0].token_ids
    assert llm.llm_engine.remove_lora(9)
    adapters = LoRARequest("x", 1, "p"), LoRARequest("x", 1, "p", fingerprint="1")
    keys = [generate_block_hash_extra_keys(adapter, None) for adapter in adapters]
    assert keys[0] != keys[1]


def put(source: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ADAPTERS / source, folder)


def test_a_folder_that_was_written_anew_is_not_read_as_the_old_one(llm, tmp_path):
    """Host memory has dropped the adapter, but the prefix cache has not. Both remedies that the
    refusal names work.
    """
    changed = LoRARequest("changed", 22, str(tmp_path / "changed"))
    put("b", tmp_path / "changed")
    tokens = functools.partial(tokens_of, llm, prompt=[7, *PROMPT * 6])
    wanted = {name: tokens(request(name)) for name in "ab"}
    assert tokens(changed) == wanted["b"] != wanted["a"]
    check(llm, "a", "b", "c")  # takes the places in host memory
    put("a", tmp_path / "changed")
    assert_refused("differ from those that were added: restore them, or add it again", tokens, changed)
    put("b", tmp_path / "changed")
    assert tokens(changed) == wanted["b"]
    check(llm, "a", "b", "c")
    put("a", tmp_path / "changed")
    assert tokens(replace(changed, load_inplace=True)) == wanted["a"]
    assert llm.llm_engine.remove_lora(22)


def test_nothing_takes_the_place_of_an_adapter_in_use(llm, tmp_path):
    """An adapter's weights stay while a request uses it. Both remedies that the refusal names
    work: wait for the request, or use another id.
    """
    engine = llm.llm_engine
    put("b", tmp_path / "used")
    used = LoRARequest("used", 23, str(tmp_path / "used"), load_inplace=True)
    assert [tokens_of(llm, used) for _ in range(2)] == [EXPECTED["b"]] * 2
    engine.add_request("x", PROMPT, GREEDY, lora_request=used)
    engine.step()
    put("a", tmp_path / "used")
    with pytest.raises(AdapterRefused, match=r"requests use the adapter 'used'.*wait until.*or give that one an id of"):
        engine.add_lora(used)
    assert engine.add_lora(LoRARequest("used", 24, str(tmp_path / "used")))
    assert run_out(engine)[-1].outputs[0].token_ids == EXPECTED["b"]
    assert engine.add_lora(used)
    for number in (23, 24):
        assert tokens_of(llm, LoRARequest("used", number, str(tmp_path / "used"))) == EXPECTED["a"]
        assert engine.remove_lora(number)


TIGHT = {"num_gpu_blocks_override": 17, "max_num_seqs": 6, "block_size": 2, "max_model_len": 24}
ENGINES = [
    TIGHT | {"max_num_batched_tokens": 4},
    {"async_scheduling": True, "speculative_config": NGRAM},
    {"speculative_config": {"method": "draft_model", "model": str(EMBEDDED_DRAFT), "num_speculative_tokens": 3}},
    {"lora_dtype": "float32", "max_lora_rank": 64, "parts": Parts(lora_slots=AdapterSlots), "use_kv_cache": False},
]


@pytest.mark.parametrize("changes", ENGINES)
def test_the_same_tokens_whatever_the_engine_is_set_to(changes):
    llm = LLM(EMBEDDED_MODEL, **SETTINGS | changes)
    check(llm, *["a", "b", "c", None] * 2)
    check(llm, "c", "a")


def test_decode_steps_as_graphs(llm):
    """Decode steps are captured on a GPU; here they are computed again on the same buffers."""
    runner = runner_of(llm)
    capture_with(runner, lambda function: function)
    try:
        check(llm, "a", None, "b", "b")
        check(llm, None, None)
        check(llm, "c", "b", None)
        assert runner.cuda_graphs.decode.replays >= 20
    finally:
        runner.cuda_graphs.release_graphs()


@pytest.fixture(scope="module")
def two_ranks():
    """Start two ranks under a core in its own process."""
    llm = LLM(EMBEDDED_MODEL, **SETTINGS, max_lora_rank=64, tensor_parallel_size=2, multiprocess=True)
    yield llm
    llm.shutdown()


def test_two_ranks_have_a_part_each(two_ranks):
    check(two_ranks, *["a", "b", "c", None] * 3)
    check(two_ranks, "c", "a")
    broken = LoRARequest("dora", 9, str(ADAPTERS / "dora"))
    assert_refused("use_dora", answer, two_ranks, broken)
    check(two_ranks, "b", None)


def test_adapters_are_managed_across_processes(two_ranks):
    engine = two_ranks.llm_engine
    check(two_ranks, "a", "b")
    assert engine.list_loras() >= {1, 2}
    assert engine.pin_lora(2)
    assert engine.remove_lora(1)
    assert not engine.remove_lora(1)
    assert 1 not in engine.list_loras()
    assert_refused("no adapter", engine.add_lora, LoRARequest("none", 5, str(ADAPTERS / "none")))
    assert engine.remove_lora(2)
    check(two_ranks, "a", "c")


# ---- other models, other adapters ----------------------------------------------------------------


MLP = ("gate_up_proj", *MLP_LINEARS)
RANKS = {
    "small": (1, ["q_proj"]),
    "usual": (8, ALL_LINEARS),
    "odd": (13, ["v_proj", "down_proj", "k_proj"]),
    "large": (64, ALL_LINEARS),
}


def write_adapters(config: ModelConfig, folder: Path) -> None:
    for number, (name, (rank, targets)) in enumerate(RANKS.items()):
        tensors = random_adapter(config, rank, number, targets, "float32", strength=0.3)
        write_adapter(folder / name, tensors, rank, 2 * rank, targets, "base")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_tokens_of_a_merged_model(tmp_path, family):
    model = random_checkpoint(family, tmp_path / "model", len(family), **SHAPE | FAMILIES[family])
    write_adapters(ModelConfig.from_pretrained(tmp_path / "model"), tmp_path)
    settings = {"skip_tokenizer_init": True, "max_num_seqs": 6, "max_num_batched_tokens": 24, "block_size": 8}
    adapters = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 64}
    check_merged(LLM(tmp_path / "model", device="cpu", dtype="float32", **settings, **adapters), model, tmp_path)


def check_merged(llm: LLM, model, folder: Path) -> None:
    """Expect the merged models' tokens for mixed prompts, with adapters of every rank and with
    none.
    """
    prompts = [[(7 * place + 5 * start) % 150 for place in range(3 + 5 * start)] for start in range(5)] * 2
    names = [None, *RANKS] * 2
    adapters = [name and LoRARequest(name, 51 + list(RANKS).index(name), str(folder / name)) for name in names]
    wanted = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    outputs = llm.generate(prompts, wanted, lora_request=adapters, use_tqdm=False)
    models = {name: copy.deepcopy(model) for name in RANKS}
    for name, changed in models.items():
        merge_adapter(changed, folder / name)
    models[None] = model
    texts = {}
    for name, prompt, output in zip(names, prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert_most_likely(models[name], prompt, tokens)
        texts[name] = tuple(tokens)
    assert len(set(texts.values())) >= 4, "the adapters say different things"


def test_the_tokens_of_a_model_merged_into_the_numbers_that_integers_stand_for(tmp_path):
    """The adapter is added to the rounded base's output, and is not rounded itself."""
    transformers = pytest.importorskip("transformers")
    llm = LLM(EMBEDDED_MODEL, **SETTINGS, max_lora_rank=64, quantization="int8")
    model = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()
    for (layer, name), method in runner_of(llm).lora.manager.modules.items():
        linear = getattr(runner_of(llm).model.layers[layer], "mlp" if name in MLP else "self_attn").get_submodule(name)
        numbers = dequantize_weight(linear.packed, linear.scales)
        for piece in method.slices:
            where = f"model.layers.{layer}.{'mlp' if piece.name in MLP else 'self_attn'}.{piece.name}"
            model.get_submodule(where).weight.data.copy_(numbers[piece.first : piece.last])
    write_adapters(ModelConfig.from_pretrained(EMBEDDED_MODEL), tmp_path)
    check_merged(llm, model, tmp_path)


# ---- requests that come and go -------------------------------------------------------------------


def test_a_folder_that_vanishes_ends_its_own_requests_only(llm, tmp_path):
    engine = llm.llm_engine
    put("b", tmp_path / "gone")
    gone = LoRARequest("gone", 21, str(tmp_path / "gone"))
    engine.add_lora(gone)
    shutil.rmtree(tmp_path / "gone")
    check(llm, "a", "b", "c")  # takes the places in host memory
    assert 21 not in engine.list_loras()
    engine.add_request("gone", PROMPT, GREEDY, lora_request=gone)
    engine.add_request("a", PROMPT, GREEDY, lora_request=request("a"))
    with pytest.raises(MinivllmError):
        run_out(engine)
    outputs = {output.request_id: output.outputs[0] for output in run_out(engine)}
    assert "adapter 'gone' cannot be used" in outputs["gone"].error
    assert outputs["a"].token_ids == EXPECTED["a"]
    assert_refused("prompt 0: there is no adapter", answer, llm, gone)  # no step fails a second time
    put("b", tmp_path / "gone")
    assert tokens_of(llm, gone) == EXPECTED["b"]
    engine.remove_lora(21)
    check(llm, "b", "a")


def test_a_pinned_adapter_keeps_its_slot_and_the_scheduler_counts_it(llm):
    engine, manager = llm.llm_engine, runner_of(llm).lora.manager
    check(llm, "b")
    assert engine.pin_lora(2)
    slot = manager.lora_index_to_id.index(2)
    check(llm, *["a", "c", "b", None] * 2)
    assert manager.lora_index_to_id[slot] == 2
    assert core_of(llm).scheduler.running_loras() == {2}
    engine.add_lora(request("a"))
    engine.pin_lora(1)
    engine.add_lora(request("c"))
    assert_refused("all max_loras = 2 slots", engine.pin_lora, 3)
    assert_refused("no adapter 77", engine.pin_lora, 77)
    assert engine.remove_lora(1)
    assert engine.remove_lora(2)
    assert core_of(llm).scheduler.running_loras() == set()
    check(llm, "c", "a", "b")


def test_wrong_requests_are_refused_and_nothing_is_queued(llm):
    for adapter, message in (
        ("a", "must be a LoRARequest"),
        (LoRARequest("none", 31, str(ADAPTERS / "none")), "no adapter"),
        (LoRARequest("other", 1, str(ADAPTERS / "b")), "lora_int_id 1 is that of 'a'"),
        (LoRARequest("big", 32, str(ADAPTERS / "big")), "rank 32.*max_lora_rank 16"),
    ):
        llm.llm_engine.add_lora(request("a"))
        assert_refused(message, llm.generate, [PROMPT, PROMPT], GREEDY, lora_request=adapter, use_tqdm=False)
        assert not llm.llm_engine.has_unfinished_requests()
    assert_refused("2 prompts, but 1 in", llm.generate, [PROMPT, PROMPT], GREEDY, lora_request=[request("a")])
    check(llm, "a")


def test_without_the_setting_an_adapter_is_refused():
    llm = LLM(EMBEDDED_MODEL, device="cpu", max_model_len=64)
    assert_refused("set enable_lora=True", answer, llm, request("a"))
    assert_refused("set enable_lora=True", llm.llm_engine.add_lora, request("a"))
    assert llm.llm_engine.list_loras() == set()


def test_the_slots_stand_in_the_ledger(llm):
    manager = runner_of(llm).lora.manager
    row = next(row for row in core_of(llm).ledger.rows if row.name == "LoRA slots")
    config = ModelConfig.from_pretrained(EMBEDDED_MODEL)
    hidden, mlp, kv = config.hidden_size, config.intermediate_size, config.num_key_value_heads * config.head_dim
    into_and_out = (3 * hidden + hidden + 2 * kv) + (hidden + hidden) + (2 * hidden + 2 * mlp) + (mlp + hidden)
    assert row.bytes == manager.slot_bytes == 2 * 16 * config.num_hidden_layers * into_and_out * 4


def test_several_completions_use_the_adapter(llm):
    several = SamplingParams(temperature=1.0, top_k=1, seed=0, max_tokens=8, n=3)
    (output,) = llm.generate([PROMPT], several, lora_request=request("c"), use_tqdm=False)
    assert [completion.token_ids for completion in output.outputs] == [EXPECTED["c"]] * 3
