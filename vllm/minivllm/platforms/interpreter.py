"""Spare Triton's interpreter work whose result it does not use, which is half of a kernel's time
there.

For each integer addition, subtraction and product it computes in 64 bits whether the result fits,
and uses that in debug mode only. Each function that a kernel calls, such as `tl.sum`, patches the
language's modules again, although the launch has already done so. And a type's dtype is looked up
in a table that is rebuilt for every look-up.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any


def leave_out_what_is_not_used() -> None:
    """Patch the interpreter for all kernels of this process. A Triton build without these hooks is
    left unchanged.
    """
    from triton.runtime import interpreter

    semantic: Any = getattr(interpreter, "interpreter_semantic", None)
    if hasattr(semantic, "binary_op_sanitize_overflow_impl"):
        semantic.binary_op_sanitize_overflow_impl = _in_debug_mode(semantic)
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _Patches(interpreter._patch_lang)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)


def _in_debug_mode(semantic: Any) -> Callable[..., None]:
    check = semantic.binary_op_sanitize_overflow_impl

    def checked(*operands: Any) -> None:
        if semantic.builder.options.debug:  # else nobody reads the result
            check(*operands)

    return checked


def _remembered(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache the look-up of NumPy's dtype for each of the language's types, by the type's name."""
    known: dict[str, Any] = {}

    def dtype_of(type_: Any) -> Any:
        if type_.name not in known:
            known[type_.name] = look_up(type_)
        return known[type_.name]

    return dtype_of


class _Patches:
    """Patches of the language's modules, each applied once per launch; `restore` undoes them at its
    end.
    """

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._patched: frozenset[str] = frozenset()
        self._scopes: list[Any] = []

    def __call__(self, function: Any) -> Any:
        # Modules that this launch has not patched yet.
        if not (modules := _languages(function)) <= self._patched:
            self._scopes.append(self._patch(function))
            self._patched |= modules
        return self

    def restore(self) -> None:
        """Undo the patches in reverse order: each has saved the state that it patched."""
        while self._scopes:
            self._scopes.pop().restore()
        self._patched = frozenset()


@functools.lru_cache(maxsize=1024)
def _languages(function: Any) -> frozenset[str]:
    """Return the names of the Triton language modules that a function refers to."""
    modules = (value.__name__ for value in function.__globals__.values() if isinstance(value, ModuleType))
    return frozenset(name for name in modules if name in ("triton.language", "triton.language.core"))
