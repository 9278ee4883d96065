"""A directory whose tokenizer files have another format is refused with a remedy, and that remedy
works.
"""

import json
import shlex
import sys

import pytest
from refusals import assert_refused
from tokenizers import pre_tokenizers

from minivllm.errors import MinivllmError
from minivllm.models.loader import weight_files
from minivllm.models.tokenizer import load_tokenizer


def test_a_vocabulary_and_merges_can_be_converted_by_the_command_in_the_refusal(tmp_path):
    folder = tmp_path / "somebody's model"
    folder.mkdir()
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({piece: index for index, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(MinivllmError, match=r"has no tokenizer\.json, only a tokenizer in another form") as refusal:
        load_tokenizer(folder)
    python, option, code = shlex.split(str(refusal.value).partition("once: ")[2])
    assert (python, option) == (sys.executable, "-c")
    exec(code, {})
    assert load_tokenizer(folder).encode("ab").ids == [256]


def test_without_any_tokenizer_there_is_no_advice(tmp_path):
    assert_refused(r"has no tokenizer\.json$", load_tokenizer, tmp_path)


FORMS = [
    ("model-00001-of-00002.safetensors", r"model\.safetensors\.index\.json is missing"),
    ("pytorch_model.bin", "pickles, which can run code"),
    ("other", r"has no model\.safetensors$"),
]


@pytest.mark.parametrize(("present", "advice"), FORMS)
def test_weights_in_another_form_are_named(tmp_path, present, advice):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / present).touch()
    assert_refused(advice, weight_files, tmp_path)
