"""The trained adapters: what the script teaches, and that each is recognized by its text in one
batch with the others.
"""

import ast
import json
import random

import pytest

from minivllm import LLM, LoRARequest, SamplingParams
from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm_lab.multi_lora.adapters import read_adapter
from minivllm_simulate.memory.adapters import adapter_parameters

FUNCTION = '''\
def find(self, name, default=None):
    """Looks it up.

    And more."""
    # at first
    if name in self:
        value = self.get(
            name)  # it is there

    else:
        for one in self: yield one
        value = {"a": default}
    return value
'''


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("train_adapters")


def test_functions_lose_their_docstrings_and_comments(script):
    (result,) = script.functions_of(f"import os\n\nclass A:\n    {FUNCTION.replace(chr(10), chr(10) + '    ')}\n")
    assert "Looks it up" not in result
    assert "at first" not in result
    ast.parse(result)
    assert script.functions_of("def f():\n" + "    pass\n" * 40) == script.functions_of("def f(:") == []


def test_braces_close_and_statements_end_where_pythons_tokenizer_says(script):
    (function,) = script.functions_of(FUNCTION)
    assert script.with_braces(function).split("\n") == [
        "def find(self, name, default=None) {",
        "    if name in self {",
        "        value = self.get(",
        "            name);  # it is there",
        "    }",
        "",
        "    else {",
        "        for one in self: yield one;",
        '        value = {"a": default};',
        "    }",
        "    return value;",
        "}",
        "",
        "",
    ]


def test_a_session_ends_with_an_empty_prompt_and_a_stub_is_one_line(script):
    (function,) = script.functions_of(FUNCTION)
    lines = script.as_session(function).split("\n")
    assert lines[0] == ">>> def find(self, name, default=None):"
    assert {line[:4] for line in lines[1:-1]} == {"... "}
    assert lines[-2:] == ["... ", ""]
    assert script.as_stub(function) == "def find(self, name, default=None): ...\n"


@pytest.mark.parametrize("name", ["braces", "doctest", "stubs"])
def test_a_text_is_recognised_by_half_its_lines(script, name: str):
    (function,) = script.functions_of(FUNCTION)
    spoken = {task: style.rewrite(function) * 2 for task, style in script.TASKS.items()}
    assert [task for task, text in spoken.items() if script.TASKS[name].speaks(text)] == [name]
    assert not script.TASKS[name].speaks(function * 2)
    assert not script.TASKS[name].speaks("")


def test_windows_begin_as_prompts_do_half_the_time(script):
    tokenizer = script.load_tokenizer(EMBEDDED_MODEL)
    pairs = script.rewritten(script.functions_of(FUNCTION), script.TASKS["doctest"])
    texts = [tokenizer.decode(script.row(tokenizer, pairs, random.Random(seed))) for seed in range(20)]
    plain = sum(text.startswith("def find") for text in texts)
    assert 5 <= plain <= 15
    assert all(text.startswith((">>> def find", "def find")) for text in texts)


def test_what_ships_is_what_the_script_makes(script):
    config = ModelConfig.from_pretrained(EMBEDDED_MODEL)
    assert [path.name for path in sorted(script.ADAPTERS.iterdir()) if path.is_dir()] == sorted(script.TASKS)
    for name, task in script.TASKS.items():
        stored, tensors = read_adapter(script.ADAPTERS / name)
        assert (stored["r"], tuple(stored["target_modules"])) == (task.rank, task.targets)
        assert sum(tensor.numel() for tensor in tensors.values()) == adapter_parameters(config, task.rank, task.targets)
        facts = json.loads((script.ADAPTERS / name / "training.json").read_text())
        assert facts["parameters"] == adapter_parameters(config, task.rank, task.targets)


def test_each_learned_its_own_text_and_is_recognised(script):
    figures = json.loads(script.COMPARED.read_text())["figures"]
    for name in script.TASKS:
        losses = {spoken: figure["held_out_loss"][name] for spoken, figure in figures.items()}
        assert min(losses, key=losses.__getitem__) == name
        assert losses[name] < losses["base"] - 0.4
        counts = {spoken: figure["recognised"][name] for spoken, figure in figures.items()}
        assert counts.pop(name) >= 0.75 * script.PROMPTS
        assert max(counts.values()) <= 0.05 * script.PROMPTS


def test_in_one_batch_each_speaks_its_own_way(script):
    llm = LLM(EMBEDDED_MODEL, device="cpu", dtype="float32", max_model_len=128, enable_lora=True, max_loras=3)
    figures = json.loads(script.COMPARED.read_text())["figures"]
    named = [LoRARequest(name, index, str(script.ADAPTERS / name)) for index, name in enumerate(script.TASKS, start=1)]
    prompt, sampling = script.SHOWN[0], SamplingParams(temperature=0.0, max_tokens=script.NEW_TOKENS)
    outputs = llm.generate([prompt] * 4, sampling, lora_request=[None, *named])
    for name, output in zip(("base", *script.TASKS), outputs, strict=True):
        text = output.outputs[0].text
        assert [task for task, style in script.TASKS.items() if style.speaks(text)] == [name] * (name != "base")
        assert text[:60] == figures[name]["texts"][prompt][:60]
