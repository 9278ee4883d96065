"""Check refusals, each of which is one line that says what is wrong."""

from collections.abc import Callable

import pytest

from minivllm.errors import MinivllmError


def assert_refused(words: str, function: Callable, *arguments: object, **settings: object) -> None:
    """Call `function`, which must raise a `MinivllmError` of one line that matches `words`."""
    with pytest.raises(MinivllmError, match=words) as refusal:
        function(*arguments, **settings)
    assert "\n" not in str(refusal.value)
