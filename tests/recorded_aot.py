"""The worker of `minivllm_lab.aot` with a record: what MINIVLLM_COMPILED, a JSON file, has is not
compiled again. With MINIVLLM_COMPILED_WRITE=1, what had to be compiled is added to it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm_lab import aot

RECORD = Path(os.environ["MINIVLLM_COMPILED"])
record: dict[str, dict] = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
"""The kernel's name, target and figures of each compilation, by its key."""
compiled_figures = aot.figures_of


def recorded_figures(source: Any, target: Any, options: Mapping[str, Any]) -> dict:
    """Return the figures of the record, or compile."""
    key = _key(source, target, options)
    if key in record:
        return record[key]["figures"]
    figures = compiled_figures(source, target, options)
    if os.environ.get("MINIVLLM_COMPILED_WRITE"):
        name = f"sm_{target.arch}" if target.backend == "cuda" else target.arch
        _add_to_record(key, {"kernel": source.name, "target": name, "figures": figures})
    return figures


def _key(source: Any, target: Any, options: Mapping[str, Any]) -> str:
    """Return a compilation's key. It covers the source of the kernel and of all that it calls, its
    arguments, options and target, the compiler's version and tools, and the environment variables
    that it reads.

    Triton's own key also covers the compiler's files, of which each version of Python has others.
    """
    from triton import __version__
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend

    backend, variables = make_backend(target), sorted(get_cache_invalidating_env_vars().items())
    parsed: Any = backend.parse_options(dict(options))
    parts = (__version__, source.hash(), backend.hash(), parsed.hash(), variables)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _forget_line_numbers() -> None:
    """Set the first line of each kernel that is loaded from now on to 0. Otherwise a kernel has
    another key once a line is added above it, though only a debugger sees the difference.
    """
    from triton.runtime.jit import JITCallable

    initialize = JITCallable.__init__

    def initialized(self: Any, fn: Any) -> None:
        initialize(self, fn)
        self.starting_line_number = 0

    JITCallable.__init__ = initialized  # pyright: ignore[reportAttributeAccessIssue]


def _add_to_record(key: str, entry: dict) -> None:
    """Add a compilation to the record, which is sorted by kernel name; only one process at a time
    may do so.
    """
    record[key] = entry
    ordered = sorted(record.items(), key=lambda item: (item[1]["kernel"], item[1]["target"], item[0]))
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in ordered)
    RECORD.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    _forget_line_numbers()
    aot.figures_of = recorded_figures
    aot.serve()
