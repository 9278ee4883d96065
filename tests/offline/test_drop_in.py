"""Names, parameters and defaults are vLLM's, so that a script for vLLM runs, or says in one line why not.

`vllm_signatures.json` lists them by vLLM's files.
"""

import argparse
import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest

import minivllm
from minivllm import EngineArgs, MinivllmError, NotServedError, SamplingParams
from minivllm.config.flags import FlexibleArgumentParser
from minivllm.engine import vllm_engine_arguments
from minivllm.inputs import parse_prompt

VLLM = json.loads((Path(__file__).parent / "vllm_signatures.json").read_text())
METHODS = {
    name: found for path in VLLM.values() if isinstance(path, dict) for name, found in path.items() if "." in name
}
ENGINE_ARGS = VLLM["vllm/engine/arg_utils.py"]["EngineArgs"]
LLM_ARGS = VLLM["vllm/entrypoints/llm.py"]["LLM.__init__"]
BY_KEYWORDS = ("LLM.__init__", "SamplingParams.from_optional")
"""Those that hand keywords on, so that their parameters are those of a dataclass."""


def defaults(arguments: dict) -> dict:
    """The defaults that are literals, but for the model."""
    return {name: value["default"] for name, value in arguments.items() if "default" in value and name != "model"}


@pytest.mark.parametrize("name", VLLM["vllm/__init__.py"]["__all__"])
def test_every_public_name_is_there_or_says_that_it_is_not_served(name):
    if name in minivllm._NOT_SERVED:
        with pytest.raises(MinivllmError, match=f"vLLM has {name}; minivllm does not serve"):
            getattr(minivllm, name)
    else:
        assert getattr(minivllm, name)


def test_every_name_that_is_handed_on_exists():
    assert all(getattr(minivllm, name) for name in minivllm.__all__)


def test_a_kv_transfer_config_may_have_vllms_further_fields():
    config = minivllm.KVTransferConfig(kv_connector="ExampleConnector", kv_rank=0, kv_parallel_size=2)
    assert EngineArgs(model="x", kv_transfer_config=config).kv_transfer_config is config
    with pytest.raises(MinivllmError, match="did you mean 'kv_role'"):
        minivllm.KVTransferConfig(kv_connector="ExampleConnector", kv_rol="kv_both")


@pytest.mark.parametrize("name", [name for name in METHODS if name not in BY_KEYWORDS])
def test_methods_take_vllms_parameters_in_vllms_order_with_vllms_defaults(name):
    owner, method = name.split(".")
    own = inspect.signature(getattr(getattr(minivllm, owner), method)).parameters
    wanted = METHODS[name]
    assert [parameter for parameter in own if parameter in wanted] == list(wanted)
    for parameter, value in wanted.items():
        if "default" in value:
            assert own[parameter].default == value["default"], parameter


@pytest.mark.parametrize("name", ["SamplingParams", "BeamSearchParams"])
def test_parameters_have_vllms_fields_and_defaults(name):
    wanted = VLLM["vllm/sampling_params.py"][name]
    needed = {field: 2 for field, value in wanted.items() if value == "required"}
    params = getattr(minivllm, name)(**needed, **defaults(wanted))
    assert params == getattr(minivllm, name)(**needed)
    own = {field.name: field.default for field in fields(params)}
    for field, value in defaults(wanted).items():
        assert own[field] == value if field in own else getattr(params, field) in (None, value)


def test_none_of_the_optional_parameters_means_the_default():
    names = METHODS["SamplingParams.from_optional"]
    given = SamplingParams.from_optional(**dict.fromkeys(names))
    assert given == SamplingParams(max_tokens=None)
    assert SamplingParams.from_optional(logit_bias={"5": 1.0}).logit_bias == {5: 1.0}


@pytest.mark.parametrize(("path", "names"), [("vllm/outputs.py", ("CompletionOutput", "RequestOutput"))])
def test_outputs_have_vllms_fields(path, names):
    for name in names:
        assert all(hasattr(getattr(minivllm, name), field) for field in VLLM[path][name])
    completion = minivllm.CompletionOutput(0, "a", [1], None, None)
    output = minivllm.RequestOutput("0", "p", [0], None, [completion], True)
    assert "request_id='0', prompt='p', prompt_token_ids=[0], prompt_logprobs=None, outputs=[Comp" in repr(output)
    later = minivllm.RequestOutput("0", "p", [0], None, [minivllm.CompletionOutput(0, "ab", [1, 2], None, None)], True)
    output.add(later, aggregate=False)
    assert output.outputs == later.outputs


def test_values_have_vllms_fields():
    for path in ("vllm/v1/metrics/reader.py", "vllm/entrypoints/generate/beam_search/utils.py"):
        for name, wanted in VLLM[path].items():
            own = [field.name for field in fields(getattr(minivllm, name))]
            assert own == [*(["name", "labels"] if "labels" in own and name != "Metric" else []), *wanted]


def test_an_engine_takes_all_of_vllms_arguments_with_their_defaults():
    assert EngineArgs(**defaults(ENGINE_ARGS)) == EngineArgs()
    assert EngineArgs(**{name: None for name in ENGINE_ARGS if name != "model"}) == EngineArgs()
    own = {"chat_template"} | {field.name for field in fields(EngineArgs)}
    listed = {*vllm_engine_arguments.WITHOUT_EFFECT, *vllm_engine_arguments.NOT_SERVED}
    assert {*LLM_ARGS, *ENGINE_ARGS} <= own | listed
    assert not own & listed, "served, and so no longer to be listed as without effect or as not served"


@pytest.mark.parametrize("name", vllm_engine_arguments.NOT_SERVED)
def test_what_is_not_served_says_so_by_name(name):
    with pytest.raises(NotServedError, match=f"{name} is 'x'; minivllm does not serve "):
        EngineArgs(**{name: "x"})


def test_the_backend_of_grammars_may_be_named_if_it_is_the_one():
    assert EngineArgs(structured_outputs_config={"backend": "guidance"}) == EngineArgs(structured_outputs_config={})
    with pytest.raises(MinivllmError, match="the engine takes no value of it but"):
        EngineArgs(structured_outputs_config={"backend": "xgrammar"})


def test_arguments_are_assigned_and_checked_when_an_engine_is_made():
    args = EngineArgs(trust_remote_code=True)
    args.trust_remote_code = False
    args.block_size = 0
    with pytest.raises(MinivllmError, match="block_size is 0"):
        minivllm.LLMEngine.from_engine_args(args)
    with pytest.raises(NotServedError, match="enable_prompt_embeds is True; minivllm does not serve prompts as"):
        args.enable_prompt_embeds = True
    with pytest.raises(AttributeError, match="blok_size"):
        args.blok_size = 5  # type: ignore[attr-defined]
    params = SamplingParams()
    assert params.structured_outputs is None
    with pytest.raises(NotServedError, match="stream_interval is 3; minivllm does not serve outputs every few tokens"):
        params.stream_interval = 3


def test_speculation_by_its_own_names():
    args = EngineArgs(spec_method="ngram", spec_tokens=3)
    assert args == EngineArgs(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    with pytest.raises(MinivllmError, match="not both"):
        EngineArgs(spec_tokens=3, speculative_config={"method": "ngram", "num_speculative_tokens": 3})


def test_a_command_line_makes_an_engines_arguments():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="some/model")
    parser.add_argument("--top-k", type=int)
    line = [
        "--max_model_len",
        "64",
        "--no-enable-prefix-caching",
        "--top_k=3",
        "--trust-remote-code",
        "--moe-backend=x",
    ]
    given = parser.parse_args(line)
    assert (given.max_model_len, given.top_k, given.block_size) == (64, 3, EngineArgs().block_size)
    expected = EngineArgs(model="some/model", max_model_len=64, enable_prefix_caching=False)
    assert EngineArgs.from_cli_args(given) == expected
    assert "--moe-backend" not in parser.format_help()
    assert {field.name for field in fields(EngineArgs)} - {"parts"} <= set(vars(given))
    assert EngineArgs.from_cli_args(argparse.Namespace()) == EngineArgs()


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "'multi_modal_data'; minivllm does not serve media"),
        ({"prompt_embeds": [0.5]}, "does not serve prompts as embeddings"),
        ({"encoder_prompt": "a", "decoder_prompt": None}, "does not serve models with an encoder"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_prompts_of_other_kinds_are_refused_by_name(prompt, said):
    with pytest.raises(NotServedError, match=said):
        parse_prompt(prompt)


def test_prompts_have_vllms_keys():
    for name, keys in VLLM["vllm/inputs/llm.py"].items():
        assert set(keys) <= {*getattr(minivllm, name).__annotations__, "token_type_ids", "prompt_token_offsets"}
    assert parse_prompt({"prompt": "a", "prompt_token_ids": [1], "multi_modal_data": None}) == ("a", [1], None)
