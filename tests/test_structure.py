"""Test which package may import which, and how large each part may be."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import structure
from repository import ROOT

import widgets

CODE = ROOT / "vllm"
ENGINE = CODE / "minivllm"
WIDGETS = ROOT / "widgets"

# From the bottom up: a layer imports itself and those listed before it.
ENGINE_LAYERS = (
    "errors", "logger", "config", "sampling_params", "inputs", "outputs", "platforms", "memory", "core",
    "structured_output", "kernels", "kv_connector", "models", "lora", "worker", "executor", "engine", "entrypoints",
    "__main__",
)  # fmt: skip
BESIDE_THE_ENGINE = ("minivllm_simulate", "minivllm_lab")
LAYERS = (*ENGINE_LAYERS, *BESIDE_THE_ENGINE)
SHARED_BY_WIDGETS = (
    "theme", "svg", "plot", "strip", "knobs", "spec", "advice", "mend", "swept", "session", "live", "page",
    "lesson_widget", "notebook",
)  # fmt: skip
WITHOUT_TORCH = [layer for layer in ENGINE_LAYERS[: ENGINE_LAYERS.index("kernels")] if layer != "platforms"]
HEAVY = {"torch", "triton", "transformers", "numba"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_files(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def imported_modules(path: Path) -> frozenset[str]:
    """Return every module that an import statement names, even inside functions."""
    names = structure.source(path).imports
    assert not any(name.startswith(".") for name in names), f"{path}: imports are absolute here"
    return names


def packages(path: Path) -> set[str]:
    """Return the top-level packages that a file imports."""
    return {module.partition(".")[0] for module in imported_modules(path)}


def layer_of(module: str) -> str:
    """Return the layer of a module of ours, or "" for any other."""
    package, _, rest = module.partition(".")
    layer = rest.partition(".")[0] if package == "minivllm" else package
    return layer if layer in LAYERS else ""


def own_layer(path: Path) -> str:
    return layer_of(".".join(path.relative_to(CODE).with_suffix("").parts))


def files() -> list[Path]:
    """Return the files of the engine and of what stands beside it."""
    paths = python_files(ENGINE, *(CODE / package for package in BESIDE_THE_ENGINE))
    return [path for path in paths if path != ENGINE / "__init__.py"]


def upward_imports(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        allowed = LAYERS[: LAYERS.index(own_layer(path)) + 1]
        for module in imported_modules(path):
            layer = layer_of(module)
            if (layer and layer not in allowed) or module.split(".")[0] == "widgets":
                yield f"{relative(path)} imports {module}"


def test_no_layer_imports_one_above_it():
    assert [relative(path) for path in files() if not own_layer(path)] == [], "add it to LAYERS"
    assert [*upward_imports(files())] == []


def foreign_imports_of_widgets() -> Iterator[str]:
    """Yield each import of another widget's folder, and of a module of the shell that stands above
    the importing one.
    """
    for path in python_files(WIDGETS):
        folder = path.parent.name
        below = SHARED_BY_WIDGETS
        if folder == "shell" and path.stem in below:
            below = below[: below.index(path.stem)]
        for module in imported_modules(path):
            top, _, own = module.partition(".")
            if top != "widgets" or not own or (folder != "shell" and own.startswith(f"{folder}.")):
                continue
            if not own.startswith("shell.") or own.split(".")[1] not in below:
                yield f"{relative(path)} imports {module}"


def test_a_widget_imports_only_its_own_parts_and_the_shell():
    folders = {path.parent.name for path in python_files(WIDGETS) if path.parent != WIDGETS}
    assert folders == {*widgets.names(), "shell"}
    assert [*foreign_imports_of_widgets()] == []


def files_of_a_page() -> list[Path]:
    """Return our files that are loaded with a widget or with an exercise's checks."""
    graph = structure.imports()
    checks = sorted((ROOT / "lessons" / "exercises" / "checks").glob("*.py"))
    found, pending = set[str](), {name for name in graph if name.startswith("widgets")}
    pending = pending.union(*(structure.known(structure.source(path).loads, graph) for path in checks))
    while pending:
        found |= pending
        pending = set[str]().union(*(graph[name] for name in pending)) - found
    return [*checks, *(path for path in python_files(CODE, WIDGETS) if structure.module_of(path) in found)]


def test_no_torch_where_a_page_or_a_front_end_runs_it():
    loaded = files_of_a_page()
    assert CODE / "minivllm_lab" / "disaggregation" / "pools.py" in loaded, "a model that a widget shows"
    beside = python_files(CODE / "minivllm_simulate", *(ENGINE / layer for layer in WITHOUT_TORCH))
    for path in {*loaded, *beside}:
        assert HEAVY.isdisjoint(packages(path)), relative(path)


def printed_by(code: str, *flags: str) -> list[str]:
    """Run code in a fresh interpreter; return the lines that it prints."""
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines()


def test_core_and_a_front_end_whose_core_is_another_process_load_no_torch():
    code = (
        "import sys, minivllm.core.scheduler, minivllm.memory, minivllm_simulate.virtual_clock\n"
        "print({'torch', 'triton', 'numpy'} & sys.modules.keys())\n"
        "from minivllm.engine import async_llm, llm_engine, mp_client\n"
        "from minivllm.entrypoints import llm\n"
        "from minivllm.entrypoints.cli import main\n"
        "from minivllm.entrypoints.openai import api_server\n"
        "from minivllm.entrypoints.proxy import proxy\n"
        f"print({HEAVY} & sys.modules.keys())"
    )
    assert printed_by(code, "-P") == ["set()", "set()"]


def test_a_generation_loads_nothing_of_the_server_nor_of_what_stands_beside_the_engine():
    """Nor does recording its steps load anything: torch's dispatch modes would import for three
    seconds, in which nothing is served.
    """
    code = (
        "import sys, torch\n"
        "from minivllm.kernels.cpu.replay import CpuRecorder\n"
        "before = {*sys.modules}\n"
        "CpuRecorder()(lambda: torch.ones(3).add_(1))\n"
        "print(sys.modules.keys() - before)\n"
        "from minivllm import LLM, SamplingParams\n"
        "from minivllm.config import EMBEDDED_MODEL\n"
        "LLM(EMBEDDED_MODEL, device='cpu', max_model_len=64).generate('def', SamplingParams(max_tokens=4))\n"
        "server = {'fastapi', 'starlette', 'uvicorn', 'pydantic', 'prometheus_client', 'jinja2', 'llguidance'}\n"
        "ours = ('minivllm.entrypoints.openai', 'minivllm_simulate', 'minivllm_lab')\n"
        "own = {name for name in sys.modules if name.startswith(ours)}\n"
        "print((server | own) & sys.modules.keys())"
    )
    assert printed_by(code, "-P") == ["set()", "set()"]


def classes_in(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]


def private_methods(classes: Iterable[ast.ClassDef]) -> set[str]:
    methods = (part for node in classes for part in node.body if isinstance(part, ast.FunctionDef))
    return {method.name for method in methods if re.match(r"_(?!_)", method.name)}


@functools.cache
def classes_of_core() -> dict[str, ast.ClassDef]:
    return {node.name: node for path in python_files(ENGINE / "core") for node in classes_in(path)}


@functools.cache
def derives_from_core() -> re.Pattern[str]:
    """Return a pattern of class statements that name a class of `minivllm.core` as a base."""
    return re.compile(rf"class \w+\([^)]*\b(?:{'|'.join(classes_of_core())})\b")


def private_overrides(path: Path) -> set[str]:
    """Return the private methods of `minivllm.core` that classes in this file override."""
    if not derives_from_core().search(path.read_text()):  # of hundreds of files, few need be parsed
        return set()
    bases = [(node, {ast.unparse(base).rpartition(".")[2] for base in node.bases}) for node in classes_in(path)]
    derived = [node for node, names in bases if names & classes_of_core().keys()]
    return private_methods(derived) & private_methods(classes_of_core().values())


def test_private_overrides_are_found(tmp_path: Path):
    path = tmp_path / "derived.py"
    path.write_text(
        "class Own(core.Scheduler):\n"
        "    def __init__(self): ...\n"
        "    def schedule(self): ...\n"
        "    def _make_output(self, step): ...\n"
        "    def _mine(self): ...\n"
    )
    assert private_overrides(path) == {"_make_output"}


def test_only_the_core_overrides_its_private_methods():
    """To change a decision, give the scheduler a policy (`core/policy.py`)."""
    paths = python_files(*(ROOT / name for name in ("vllm", "widgets", "benchmarks", "lessons", "tests", "tools")))
    assert len(paths) > 500
    outside = (path for path in paths if ENGINE / "core" not in path.parents)
    assert {relative(path): overrides for path in outside if (overrides := private_overrides(path))} == {}


def test_no_script_imports_another():
    scripts = sorted((ROOT / "vllm").glob("[0-9][0-9]_*.py"))
    assert scripts
    for path in scripts:
        assert not any(package == "widgets" or package[0].isdigit() for package in packages(path)), path.name
        for loader in ("import_module", "runpy"):
            assert loader not in path.read_text(), f"{path.name} loads a module by name"


def test_the_folder_vllm_does_not_pose_as_vllm():
    assert not (ROOT / "vllm" / "__init__.py").exists()
    code = "from importlib.util import find_spec; spec = find_spec('vllm'); print(spec is None or bool(spec.origin))"
    assert printed_by(code, "-P") == ["True"], "the repository root is on sys.path, so `vllm/` poses as a package"


def test_every_part_is_within_its_budget():
    for name, size in structure.sizes().items():
        assert size <= structure.BUDGETS[name], f"make {name} smaller, or raise BUDGETS with a line in CHANGELOG.md"


def test_no_modules_import_each_other():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert structure.circles(graph) == [["b", "c"]], "a circle would be found"
    assert structure.circles(structure.imports()) == []
