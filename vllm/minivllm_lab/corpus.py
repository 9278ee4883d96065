"""The embedded models' training text and the held-out part of it: Python's standard library.

Measuring how well a model still predicts (say, after quantizing its weights or its cache) requires
text that the model has not seen. File names determine which files are held out: 27 of Python
3.11's, a quarter of which are present in a distribution's Python that comes without its tests.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from minivllm.config.checks import require

HELD_OUT_ONE_IN = 50
SKIPPED = {"site-packages", "__pycache__", "encodings", "pydoc_data", "bad_coding", "lib2to3"}


def corpus_files() -> list[Path]:
    """Return the standard library's Python files in a fixed order, without number tables and dumped
    documentation.
    """
    files: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = [name for name in folders if name not in SKIPPED]  # the walk goes into what is left here
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(path for path in files if 200 < path.stat().st_size < 400_000)


def is_held_out(path: Path) -> bool:
    """Return whether a file is held out. The answer depends only on its name, so it stays the same
    when other files are added or removed.
    """
    return int(hashlib.sha256(path.name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def read_texts(paths: list[Path]) -> list[str]:
    """Return the files' contents; files that are not UTF-8 are dropped."""
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    return texts


def held_out_texts() -> list[str]:
    """Return the contents of the files that no embedded model was trained on."""
    return read_texts([path for path in corpus_files() if is_held_out(path)])


def first_passages(texts: Sequence[Sequence[int]], count: int, length: int) -> list[list[int]]:
    """Return `count` passages of `length` tokens, first those at the beginnings of texts that are
    long enough.

    Where there are fewer such texts, the second `length` tokens of each come after them, then the
    third, and so on.

    Raises:
        MinivllmError: all texts together have fewer passages.
    """
    starts = range(0, max(map(len, texts), default=0), length)
    passages = (list(text[at : at + length]) for at in starts for text in texts if len(text) >= at + length)
    selected = list(islice(passages, count))
    require(
        len(selected) == count,
        f"there are {len(selected)} held-out passages of {length} tokens, not {count}: they are cut from the files of "
        f"{sysconfig.get_paths()['stdlib']}. Ask for fewer or shorter ones, or use a Python that has all of its "
        "standard library, such as uv's",
    )
    return selected
