"""Give the site a Python that runs its widgets, its engine and its exercises' checks in the browser:
Pyodide, our sources in one zip, and the embedded model. Give it an editor, too: CodeMirror.

The pages load all of it from the site itself.
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import npm_packages
import site_exercises
import structure

FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json", "package.json")
"""The files of Pyodide that the browser loads, and the one that names its authors and licence."""
ENTRIES = ("widgets.shell.page", "minivllm_lab.engines.page_engine")
"""The modules that the workers import."""
MODEL = ("config.json", "tokenizer.json", "model.safetensors")
"""The files of the embedded model that the page's engine reads."""
BARE = re.compile(r"(\bfrom |\bimport )(['\"])(@?[a-z][\w/-]*)\2")
"""An import of another package: a browser would not know where it is."""


def add(root: Path, static: Path, widgets: Iterable[str]) -> str:
    """Add Python, the sources of these widgets and of the exercises, and the editor to the site's
    static files. Return why the site has to do without, or "".
    """
    try:
        archives = npm_packages.downloaded()
    except npm_packages.NotAvailable as reason:
        return str(reason)
    write_pyodide(archives.pop(npm_packages.PYODIDE), static / "pyodide")
    write_editor(archives, static / "codemirror")
    write_sources(root, static / "sources.zip", widgets)
    (static / "model").mkdir()
    for name in MODEL:
        shutil.copyfile(root / "vllm" / "models" / "tiny-python" / name, static / "model" / name)
    return ""


def write_pyodide(archive: Path, folder: Path) -> None:
    """Write the files of Pyodide that the browser loads."""
    folder.mkdir()
    with tarfile.open(archive) as package:
        for name in FILES:
            (folder / name).write_bytes(content(package, name))


def write_editor(archives: Mapping[str, Path], folder: Path) -> None:
    """Write one module for each of the editor's packages, and its licence beside it."""
    folder.mkdir()
    for name, archive in archives.items():
        with tarfile.open(archive) as package:
            described = json.loads(content(package, "package.json"))
            source = content(package, posixpath.normpath(described["exports"]["import"])).decode()
            (folder / module_file(name)).write_text(BARE.sub(beside, source))
            (folder / f"{module_file(name)}.LICENSE").write_bytes(content(package, "LICENSE"))


def content(package: tarfile.TarFile, name: str) -> bytes:
    """Return one file of an npm package."""
    file = package.extractfile(f"package/{name}")
    assert file, f"{package.name} has no {name}"
    return file.read()


def module_file(name: str) -> str:
    """Return the file name of a package's module."""
    return f"{name.removeprefix('@').replace('/', '-')}.js"


def beside(imported: re.Match[str]) -> str:
    """Let an import name the file of a package beside it."""
    return f"{imported[1]}{imported[2]}./{module_file(imported[3])}{imported[2]}"


def write_sources(root: Path, file: Path, widgets: Iterable[str]) -> None:
    """Write a zip of the modules that the page's Python may import, and of the data beside them; and
    of the exercises' checks with the data that they read.
    """
    checks = site_exercises.checks(root)
    imported = {name for path in checks for name in structure.source(path).imports}
    modules = modules_of(root, [*ENTRIES, *(f"widgets.{name}" for name in widgets), *imported])
    data = {path for module in modules.values() for path in module.parent.glob("*.json")}
    recorded = sorted((root / site_exercises.RECORDED).iterdir())
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted({*modules.values(), *data, *checks, *recorded}):
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
