"""Give the site a Python that runs its widgets in the browser: Pyodide, and our sources in one zip.

Pyodide comes from npm's registry, pinned by version and hash, and is kept outside the repository.
The pages load it from the site itself.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import structure

from minivllm.errors import MinivllmError

VERSION = "314.0.7"
SHA512 = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
"""The hash that npm's registry gives for this version."""
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json", "package.json")
"""The files that the browser loads, and the one that names Pyodide's authors and licence."""
ENTRY = "widgets.shell.page"
"""The module that the worker imports."""
SECONDS = 120


class NotAvailable(Exception):
    """Pyodide cannot be had on this machine now."""


def add(root: Path, static: Path, widgets: Iterable[str]) -> str:
    """Add Pyodide and the sources of these widgets to the site's static files. Return why the site
    has to do without, or "".
    """
    try:
        archive = downloaded()
    except NotAvailable as reason:
        return str(reason)
    with tarfile.open(archive) as package:
        for name in FILES:
            source = package.extractfile(f"package/{name}")
            assert source, f"{archive} has no {name}"
            path = static / "pyodide" / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(source.read())
    write_sources(root, static / "sources.zip", widgets)
    return ""


def downloaded(package: str = "pyodide", version: str = VERSION, sha512: str = SHA512) -> Path:
    """Return a package of npm's, Pyodide's or a pinned other one, from the cache or from npm's
    registry.

    Raises:
        NotAvailable: npm is missing, or it cannot download the package.
        MinivllmError: the package is not the pinned one.
    """
    name = f"{package}-{version}.tgz"
    kept = cache() / name
    if not kept.is_file():
        with tempfile.TemporaryDirectory() as folder:
            pack(Path(folder), f"{package}@{version}")
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(Path(folder, name), kept)
    if base64.b64encode(hashlib.sha512(kept.read_bytes()).digest()).decode() != sha512:
        kept.unlink()
        raise MinivllmError(f"{name} does not have the pinned hash, so it was deleted: build again, or check npm")
    return kept


def cache() -> Path:
    """Return the folder for downloads, outside the repository."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "vllm-from-first-principles"


def pack(folder: Path, package: str) -> None:
    """Download a package, `name@version`, into a folder.

    Raises:
        NotAvailable: npm is missing, or it cannot download the package.
    """
    command = ["npm", "pack", "--silent", "--fetch-retries=0", "--pack-destination", str(folder), package]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
    except FileNotFoundError:
        raise NotAvailable("npm is not installed") from None
    except subprocess.CalledProcessError as error:
        raise NotAvailable(f"npm cannot download {package}: {error.stderr.strip()[-200:]}") from error
    except subprocess.TimeoutExpired:
        raise NotAvailable(f"npm did not download {package} within {SECONDS} s") from None


def write_sources(root: Path, file: Path, widgets: Iterable[str]) -> None:
    """Write a zip of the modules that the page's Python may import, and of the data beside them."""
    modules = modules_of(root, [ENTRY, *(f"widgets.{name}" for name in widgets)])
    data = {path for module in modules.values() for path in module.parent.glob("*.json")}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted({*modules.values(), *data}):
            name = path.relative_to(root).as_posix().removeprefix("vllm/")
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)


def modules_of(root: Path, entries: Iterable[str]) -> dict[str, Path]:
    """Map every module of ours that these modules import, directly or not, to its file."""
    pending = [*entries]
    modules: dict[str, Path] = {}
    while pending:
        name = pending.pop()
        if not name or name in modules:
            continue
        pending.append(name.rpartition(".")[0])  # its package, or the module whose attribute it is
        for path in files_of(root, name):
            modules[name] = path
            pending += structure.source(path).imports
    return modules


def files_of(root: Path, module: str) -> Iterator[Path]:
    """Yield the file of one of our modules, and nothing for any other name."""
    base = root if module.partition(".")[0] == "widgets" else root / "vllm"
    path = base.joinpath(*module.split("."))
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    yield from (file for file in candidates if file.is_file())
