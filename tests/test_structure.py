"""Test which package may import which, and how large each part may be."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import widgets
from minivllm_lab.exercise import load

ROOT = Path(__file__).resolve().parents[1]
structure = load(ROOT / "tools" / "structure.py")
CODE = ROOT / "vllm"
ENGINE = CODE / "minivllm"
WIDGETS = ROOT / "widgets"

# From the bottom up: a layer imports itself and those listed before it.
ENGINE_LAYERS = (
    "errors",
    "logger",
    "config",
    "sampling_params",
    "inputs",
    "outputs",
    "platforms",
    "memory",
    "core",
    "structured_output",
    "kernels",
    "kv_connector",
    "models",
    "lora",
    "worker",
    "executor",
    "engine",
    "entrypoints",
    "__main__",
)
BESIDE_THE_ENGINE = ("minivllm_simulate", "minivllm_lab")
LAYERS = (*ENGINE_LAYERS, *BESIDE_THE_ENGINE)
SHARED_BY_WIDGETS = (
    "theme",
    "svg",
    "plot",
    "strip",
    "knobs",
    "spec",
    "advice",
    "swept",
    "session",
    "lesson_widget",
)
WITHOUT_TORCH = (
    "errors",
    "logger",
    "config",
    "sampling_params",
    "inputs",
    "outputs",
    "memory",
    "core",
    "structured_output",
)
MODELS_OF_A_LESSON = (
    "attention_heads/siblings",
    "chunked_prefill/learner_policy",
    "chunked_prefill/prefill_first",
    "continuous_batching/learner_policy",
    "continuous_batching/scenes",
    "continuous_batching/seats",
    "disaggregation/goodput",
    "disaggregation/model_checks",
    "disaggregation/pools",
    "disaggregation/tuning",
    "flash_attention/attention_traffic",
    "flash_attention/online_softmax",
    "multi_lora/costs",
    "multi_lora/learner_policy",
    "optimization_catalog/prefix_reuse",
    "optimization_catalog/sharing",
    "paged_attention/block_size_costs",
    "paged_attention/memory_replay",
    "paged_attention/played_pool",
    "paged_attention/pool_audit",
    "preemption/costs",
    "preemption/learner_policy",
    "preemption/published_waste",
    "preemption/victims",
    "speculative_decoding/model_checks",
    "speculative_decoding/speculation",
)
HEAVY = {"torch", "triton", "transformers", "numba"}


@functools.cache
def imported_modules(path: Path) -> frozenset[str]:
    """Return every module that an import statement names, even inside functions, except in `if
    TYPE_CHECKING:` blocks.
    """
    names = set()
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        pending.extend(ast.iter_child_nodes(node))
    return frozenset(names)


def layer_of(module: str) -> str:
    """Return the layer of a module of ours, or "" for any other."""
    package, _, rest = module.partition(".")
    layer = rest.partition(".")[0] if package == "minivllm" else package
    return layer if layer in LAYERS else ""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(CODE).with_suffix("").parts)


def files() -> list[Path]:
    packages = (ENGINE, *(CODE / package for package in BESIDE_THE_ENGINE))
    return [path for folder in packages for path in sorted(folder.rglob("*.py")) if path != ENGINE / "__init__.py"]


def test_every_floor_is_known():
    assert all(layer_of(module_of(path)) for path in files())


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(CODE)))
def test_no_floor_imports_one_above_it(path):
    own = LAYERS.index(layer_of(module_of(path)))
    for module in imported_modules(path):
        if layer := layer_of(module):
            assert LAYERS.index(layer) <= own, f"{path.name} stands on layer {LAYERS[own]} and imports {module}"
        assert module.split(".")[0] != "widgets", f"{path.name} imports {module}, which stands on it"


@pytest.mark.parametrize("path", sorted(WIDGETS.rglob("*.py")), ids=lambda path: str(path.relative_to(WIDGETS)))
def test_a_widget_imports_what_all_widgets_share_and_its_own_parts(path):
    folder = path.parent.name
    assert folder in (*widgets.names(), "shell") or path.parent == WIDGETS, "a folder that no widget is known of"
    for module in imported_modules(path):
        top, _, own = module.partition(".")
        if top == "widgets" and own and not own.startswith(f"{folder}."):
            assert own.startswith("shell."), f"{path.name} imports {module}"


@pytest.mark.parametrize("path", sorted((WIDGETS / "shell").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_what_all_widgets_share_imports_what_stands_below_it(path):
    below = SHARED_BY_WIDGETS[: SHARED_BY_WIDGETS.index(path.stem)]
    for module in imported_modules(path):
        if module.startswith("widgets."):
            assert module.split(".")[2] in below, f"{path.name} imports {module}"


def places_without_torch() -> list[Path]:
    """Return the folders and files that may not import torch."""
    lab = CODE / "minivllm_lab"
    places = [ENGINE / layer for layer in WITHOUT_TORCH] + [lab / model for model in MODELS_OF_A_LESSON]
    return [
        CODE / "minivllm_simulate",
        WIDGETS,
        *(place if place.is_dir() else place.with_suffix(".py") for place in places),
    ]


@pytest.mark.parametrize("place", places_without_torch(), ids=lambda place: str(place.relative_to(ROOT)))
def test_no_torch(place):
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    assert files
    for path in files:
        heavy = {module for module in imported_modules(path) if module.split(".")[0] in HEAVY}
        assert not heavy, f"{path} imports {heavy}"


def test_core_stays_free_of_torch_at_run_time():
    code = (
        "import sys, minivllm.core.scheduler, minivllm.memory, minivllm_simulate.virtual_clock; "
        "print(sorted({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_generation_loads_nothing_of_the_server_nor_of_what_stands_beside_the_engine():
    code = (
        "import sys\n"
        "from minivllm import LLM, SamplingParams\n"
        "from minivllm.config import EMBEDDED_MODEL\n"
        "LLM(EMBEDDED_MODEL, device='cpu', max_model_len=64).generate('def', SamplingParams(max_tokens=4))\n"
        "server = {'fastapi', 'starlette', 'uvicorn', 'pydantic', 'prometheus_client', 'jinja2', 'llguidance'}\n"
        "ours = ('minivllm.entrypoints.openai', 'minivllm_simulate', 'minivllm_lab')\n"
        "own = {name for name in sys.modules if name.startswith(ours)}\n"
        "print(sorted((server | own) & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_front_end_whose_core_is_another_process_loads_no_torch():
    code = (
        "import sys\n"
        "from minivllm.engine import async_llm, llm_engine, mp_client\n"
        "from minivllm.entrypoints import llm\n"
        "from minivllm.entrypoints.cli import main\n"
        "from minivllm.entrypoints.openai import api_server\n"
        "from minivllm.entrypoints.proxy import proxy\n"
        f"print(sorted({HEAVY} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def classes_in(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]


def base_names(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).rpartition(".")[2] for base in node.bases}


def methods_of(node: ast.ClassDef) -> set[str]:
    return {method.name for method in node.body if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)}


@functools.cache
def core_methods() -> dict[str, set[str]]:
    """Return the methods of each class in `minivllm.core`, inherited ones too."""
    classes = {node.name: node for path in sorted((ENGINE / "core").rglob("*.py")) for node in classes_in(path)}

    def with_inherited(name: str) -> set[str]:
        return methods_of(classes[name]).union(*map(with_inherited, base_names(classes[name]) & classes.keys()))

    return {name: with_inherited(name) for name in classes}


def private_overrides(path: Path) -> set[str]:
    """Return the private methods of classes in `minivllm.core` that classes in this file override."""
    derived = ((node, base) for node in classes_in(path) for base in base_names(node) & core_methods().keys())
    return {
        f"{base}.{name}"
        for node, base in derived
        for name in methods_of(node) & core_methods()[base]
        if name.startswith("_") and not name.endswith("__")
    }


def test_private_overrides_are_found(tmp_path):
    path = tmp_path / "derived.py"
    path.write_text(
        "class Own(core.Scheduler):\n"
        "    def __init__(self): ...\n"
        "    def schedule(self): ...\n"
        "    def _make_output(self, step): ...\n"
        "    def _mine(self): ...\n"
    )
    assert private_overrides(path) == {"Scheduler._make_output"}


def test_only_the_core_overrides_its_private_methods():
    """To change a decision, give the scheduler a policy (`core/policy.py`)."""
    folders = [ROOT / name for name in ("vllm", "widgets", "benchmarks", "lessons", "tests", "tools")]
    paths = [path for folder in folders for path in folder.rglob("*.py") if ENGINE / "core" not in path.parents]
    assert len(paths) > 500
    results = {str(path.relative_to(ROOT)): overrides for path in paths if (overrides := private_overrides(path))}
    assert not results


def test_no_script_imports_another():
    scripts = sorted((ROOT / "vllm").glob("[0-9][0-9]_*.py"))
    assert scripts
    for path in scripts:
        for module in imported_modules(path):
            assert module.split(".")[0] != "widgets", f"{path.name} imports {module}"
            assert not module[0].isdigit()
        for loader in ("import_module", "runpy"):
            assert loader not in path.read_text(), f"{path.name} loads a module by name"


def test_the_folder_vllm_does_not_pose_as_vllm():
    assert not (ROOT / "vllm" / "__init__.py").exists()
    code = "from importlib.util import find_spec; found = find_spec('vllm'); print(found and found.origin is None)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() in ("None", "False"), "the repository root is on sys.path, so `vllm/` poses as a package"


def test_no_part_is_larger_than_its_budget():
    sizes = structure.sizes()
    over = {name: size for name, size in sizes.items() if size > structure.BUDGETS[name]}
    assert not over, "make it smaller, or raise BUDGETS in tools/structure.py with a line in CHANGELOG.md"


def test_no_budget_is_looser_than_it_must_be():
    sizes = structure.sizes()
    assert all(budget - sizes[name] < 0.03 * budget for name, budget in structure.BUDGETS.items())


def test_no_modules_import_each_other():
    assert structure.circles(structure.imports()) == []


def test_a_circle_would_be_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert structure.circles(graph) == [["b", "c"]]
