"""Names, order and defaults are vLLM's where vLLM has them; an unknown argument is refused in one
line.

`vllm_signatures.json` lists vLLM's signatures by file.
"""

import argparse
import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest
from refusals import assert_refused

import minivllm
from minivllm import EngineArgs, KVTransferConfig, SamplingParams
from minivllm.config.flags import FlexibleArgumentParser
from minivllm.inputs import parse_prompt

VLLM = json.loads((Path(__file__).parent / "vllm_signatures.json").read_text())
METHODS = {
    name: found for path in VLLM.values() if isinstance(path, dict) for name, found in path.items() if "." in name
}
ENGINE_ARGS = VLLM["vllm/engine/arg_utils.py"]["EngineArgs"]
OWN = {"device", "multiprocess", "parts", "static_batching", "use_kv_cache"}
"""Arguments of the engine that vLLM lacks."""


def defaults(arguments: dict) -> dict:
    """Return the defaults that are literals, except the model's."""
    return {name: value["default"] for name, value in arguments.items() if "default" in value and name != "model"}


def test_every_name_that_is_handed_on_exists():
    assert all(getattr(minivllm, name) for name in minivllm.__all__)


@pytest.mark.parametrize("name", METHODS)
def test_parameters_of_methods_are_vllms_with_its_defaults_and_its_first_ones_if_given_by_place(name):
    owner, method = name.split(".")
    own = dict(inspect.signature(getattr(getattr(minivllm, owner), method)).parameters)
    own.pop("self", None)
    by_place = [parameter.name for parameter in own.values() if parameter.kind is not parameter.KEYWORD_ONLY]
    wanted = METHODS[name]
    assert by_place == list(wanted)[: len(by_place)]
    assert set(own) <= set(wanted)
    for parameter, value in wanted.items():
        if parameter in own and "default" in value:
            assert own[parameter].default == value["default"], parameter


def test_parameters_have_vllms_fields_and_defaults():
    wanted = VLLM["vllm/sampling_params.py"]["SamplingParams"]
    own = {field.name: field.default for field in fields(SamplingParams)}
    arguments = {field: value for field, value in defaults(wanted).items() if field in own}
    assert set(own) - set(wanted) <= {"all_stop_token_ids", "bad_words_token_ids"}
    assert arguments == {field: own[field] for field in arguments}
    assert SamplingParams(**arguments) == SamplingParams()


def test_outputs_have_vllms_fields():
    for name in ("CompletionOutput", "RequestOutput"):
        assert all(hasattr(getattr(minivllm, name), field) for field in VLLM["vllm/outputs.py"][name])
    completion = minivllm.CompletionOutput(0, "a", [1], None, None)
    output = minivllm.RequestOutput("0", "p", [0], None, [completion], True)
    assert "request_id='0', prompt='p', prompt_token_ids=[0], prompt_logprobs=None, outputs=[Comp" in repr(output)
    later = minivllm.RequestOutput("0", "p", [0], None, [minivllm.CompletionOutput(0, "ab", [1, 2], None, None)], True)
    output.add(later, aggregate=False)
    assert output.outputs == later.outputs


def test_an_engines_arguments_are_vllms_with_its_defaults():
    own = {field.name: field.default for field in fields(EngineArgs)}
    assert own.keys() - ENGINE_ARGS.keys() <= OWN
    arguments = {name: value for name, value in defaults(ENGINE_ARGS).items() if name in own}
    assert EngineArgs(**arguments) == EngineArgs()
    assert EngineArgs(**dict.fromkeys(own.keys() - {"model"})) == EngineArgs()


@pytest.mark.parametrize("settings", [EngineArgs, KVTransferConfig, SamplingParams])
def test_an_unknown_argument_is_refused_with_the_nearest_known_one_or_where_they_are_listed(settings):
    *_, known = fields(settings)
    words = f"{settings.__name__} has no argument .*; did you mean '{known.name}'"
    assert_refused(words, settings, **{f"{known.name}s": 1})
    assert_refused(rf"'zzz'; help\(minivllm.{settings.__name__}\) lists the arguments$", settings, zzz=1)


def test_arguments_are_assigned_and_checked_when_an_engine_is_made():
    args = EngineArgs()
    args.block_size = 0
    assert_refused("block_size is 0", minivllm.LLMEngine.from_engine_args, args)
    with pytest.raises(AttributeError, match="blok_size"):
        args.blok_size = 5  # type: ignore[attr-defined]


def test_a_command_line_makes_an_engines_arguments(capsys):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="script"))
    parser.set_defaults(model="some/model")
    parser.add_argument("--top-k", type=int)
    line = ["--max_model_len", "64", "--no-enable-prefix-caching", "--top_k=3"]
    arguments = parser.parse_args(line)
    assert (arguments.max_model_len, arguments.top_k, arguments.block_size) == (64, 3, EngineArgs().block_size)
    expected = EngineArgs(model="some/model", max_model_len=64, enable_prefix_caching=False)
    assert EngineArgs.from_cli_args(arguments) == expected
    assert {field.name for field in fields(EngineArgs)} - {"parts"} <= set(vars(arguments))
    assert EngineArgs.from_cli_args(argparse.Namespace()) == EngineArgs()
    for flag, hint in (("--max_model_lens", "did you mean --max-model-len?"), ("--zzz=1", "script --help lists them")):
        with pytest.raises(SystemExit):
            parser.parse_args([flag])
        assert hint in capsys.readouterr().err.splitlines()[-1]


def test_prompts_have_vllms_keys():
    for name, keys in VLLM["vllm/inputs/llm.py"].items():
        assert set(getattr(minivllm, name).__annotations__) - {"cache_salt"} <= set(keys)
    assert parse_prompt({"prompt": "a", "prompt_token_ids": [1]}) == ("a", [1], None)
    assert_refused("a prompt has no key 'prompts'; did you mean 'prompt'", parse_prompt, {"prompts": "a"})
    wrong = {"prompt": "a", "multi_modal_data": None}
    assert_refused("no key 'multi_modal_data'; known: prompt, prompt_token_ids, cache_s", parse_prompt, wrong)
