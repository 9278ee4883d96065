"""The script that trains the siblings: it builds what is shipped, and compares only seeds that all
siblings have.
"""

import json

import pytest

from minivllm.config import EMBEDDED_MODEL, EMBEDDED_SIBLINGS, ModelConfig
from minivllm.memory import kv_bytes_per_token
from minivllm_simulate.memory import num_parameters


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("train_siblings")


def test_it_builds_what_ships(script):
    assert [EMBEDDED_MODEL.parent / name for name in script.SIBLINGS] == list(EMBEDDED_SIBLINGS.values())
    for name, shape in script.SIBLINGS.items():
        shipped = ModelConfig.from_pretrained(EMBEDDED_MODEL.parent / name)
        built = script.build_model(shape)
        config = ModelConfig.from_dict(built.config.to_dict())
        assert num_parameters(config) == num_parameters(shipped) == sum(p.numel() for p in built.parameters())
        a_token = kv_bytes_per_token(shipped, "float32")
        assert kv_bytes_per_token(config, "float32") == a_token
        assert script.cached_numbers(shape) * shipped.num_hidden_layers * 4 == a_token


def test_only_seeds_that_all_have_are_compared(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "RUNS", tmp_path)
    monkeypatch.setattr(script, "SIBLINGS_COMPARED", tmp_path / "compared.json")
    script.compare()
    assert not script.SIBLINGS_COMPARED.exists()
    losses = {"mha": (4.0, 4.25, 1.0), "gqa": (4.5, 4.5), "mqa": (5.0, 4.0), "mla": (4.0, 4.5)}
    for kind, of_seeds in losses.items():
        for seed, loss in enumerate(of_seeds):
            folder = script.run_directory(f"tiny-python-{kind}", seed)
            folder.mkdir()
            facts = {"seed": seed, "held_out_loss": loss, "parameters": 9, "tokens_seen": 7, "minutes": 1.5}
            (folder / "training.json").write_text(json.dumps(facts))
    script.compare()
    figures = json.loads(script.SIBLINGS_COMPARED.read_text())["figures"]
    mha = figures["tiny-python-mha"]
    assert mha["held_out_loss_of_seed"] == {"0": 4.0, "1": 4.25}
    assert (mha["held_out_loss_mean"], mha["held_out_loss_spread"], mha["minutes"]) == (4.125, 0.25, 3.0)
    assert figures["tiny-python-mqa"]["held_out_loss_spread"] == 1.0
    assert figures["tiny-python-mla"]["num_key_value_heads"] is None
