"""A proof shows what it found, and fails where it must."""

import math

import pytest
import torch

from minivllm.errors import MinivllmError
from minivllm_lab import proof
from minivllm_lab.proof import furthest, prove, refusal, show_errors


def test_errors_within_the_bound_are_shown_and_the_largest_comes_back(capsys):
    assert show_errors("A kernel", {"one": 1e-4, "two": 2e-3}, 3e-3, caption="as it was told") == 2e-3
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("A kernel, ", "one", "1e-04", "two", "2e-03", "as it was told"))


@pytest.mark.parametrize("wrong", [3e-3, math.inf, math.nan])
def test_any_error_beyond_the_bound_fails_by_name(wrong):
    with pytest.raises(AssertionError, match="two"):
        show_errors("A kernel", {"one": 1e-4, "two": wrong, "three": 1e-4}, 3e-3)


def test_the_furthest_element_counts():
    assert furthest(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.5], [3.0, 4.0]]).double()) == 0.5
    assert furthest(torch.tensor([0.0, math.nan]), torch.zeros(2)) == math.inf, "NaN must not slip through"


def test_a_refusal_is_told_and_its_absence_is_an_error():
    def refuse():
        raise MinivllmError("too much: 3 would do")

    assert refusal(refuse) == "too much: 3 would do"
    with pytest.raises(AssertionError, match="should have been refused"):
        refusal(lambda: None)
    with pytest.raises(ZeroDivisionError):
        refusal(lambda: 1 / 0)


def test_without_triton_one_line_stands_for_the_proof(monkeypatch, capsys):
    device = torch.device("cpu")
    assert prove(lambda where: {"on": where}, device) == {"on": device}
    monkeypatch.setattr(proof, "HAS_TRITON", False)
    assert prove(lambda where: 1 / 0, device) is None
    assert "no build for this platform" in capsys.readouterr().out
