"""Count the numbers that a function allocates, for checks of exercises: a forbidden tensor is
larger than the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


def numbers_made(act: Callable[[], object]) -> int:
    """Count the numbers in all tensors that `act` makes; views of existing tensors do not count.

    Raises:
        AssertionError: it leaves torch for numpy, where nothing can be counted.
    """
    with mock.patch.multiple(torch.Tensor, numpy=_refused, __array__=_refused), _Made() as counter:
        act()
    return counter.numbers


class _Made(TorchDispatchMode):
    """Count the numbers in the results of all operations whose memory is not that of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler, which takes three seconds, to skip it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)}
        new = (x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor))
        self.numbers += sum(x.numel() for x in new if x.untyped_storage().data_ptr() not in known)
        return result


def _refused(*_args: object, **_kwargs: object) -> NoReturn:
    raise AssertionError("it leaves torch for numpy, where allocations cannot be counted: stay in torch")
