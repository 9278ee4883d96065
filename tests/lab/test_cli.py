"""The argument types that scripts share: what is out of range is refused in words."""

import argparse

import pytest

from minivllm.lab.cli import positive_int, whole_number


def test_both_limits_are_allowed():
    assert [whole_number(2, 5)(text) for text in ("2", "5")] == [2, 5]
    assert positive_int("1") == 1
    assert positive_int("123456789") == 123456789


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (whole_number(2, 5), "1", "from 2 to 5, got 1"),
        (whole_number(2, 5), "6", "from 2 to 5, got 6"),
        (positive_int, "0", "at least 1, got 0"),
        (positive_int, "2.5", "'2.5' is not a whole number"),
    ],
)
def test_anything_else_is_refused(parse, text, words):
    with pytest.raises(argparse.ArgumentTypeError) as refusal:
        parse(text)
    assert words in str(refusal.value)
