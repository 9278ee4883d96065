"""Skip the tests that this machine cannot run, and report each kind in one line at the end.

Whatever needs torch is imported where it is used: xdist's head process runs no test, and starts
sooner without torch.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster.hosts import why_not_here
from e2e import firefox
from e2e.chromium import HOW_TO_GET_IT, find_chromium
from make_gpu import NothingOf, forgotten, package_missing_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from warm_processes import Template

LEFT_OUT = pytest.StashKey[dict[str, int]]()
TEMPLATE = pytest.StashKey["Template"]()
OF_WORKERS = (
    "pytest", "hypothesis", "transformers", "jupytext", "nbclient", "anywidget", "playwright.sync_api",
    "ipykernel.kernelapp", "ipykernel.zmqshell", "nbconvert", "transformers.models",
)  # fmt: skip
"""What the workers of xdist have loaded when they start, apart from the engine and the server."""
BROWSER_REQUIRED = bool(os.environ.get("MINIVLLM_REQUIRE_BROWSER"))
NIXL_REQUIRED = bool(os.environ.get("MINIVLLM_REQUIRE_NIXL"))
"""Then the tests that need it are not left out, and fail where it is not installed."""


def leave_as_found() -> Iterator[None]:
    """Fail a test that leaves the process changed, rather than letting a later test fail."""
    from left_as_found import changes, put_back, seed_everything, state

    before = state()
    seed_everything()
    yield
    if left := changes(before, state()):
        put_back(before)
        pytest.fail("left behind for the tests after it:\n" + "\n".join(left), pytrace=False)


each_test_leaves_as_found = pytest.fixture(leave_as_found, autouse=True)
each_file_leaves_as_found = pytest.fixture(leave_as_found, autouse=True, scope="module")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests of each, in another order")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from distribution import ByFile

    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Fork the workers from a process that has loaded what they all need."""
    from execnet.gateway_base import ThreadExecModel
    from warm_processes import CAN_FORK, Template, WarmSubprocess

    if CAN_FORK:
        config.stash[TEMPLATE] = template = Template(*OF_WORKERS)
        ThreadExecModel.subprocess = WarmSubprocess(template, with_template=True)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreted: runs a kernel in Triton's interpreter")
    config.stash[LEFT_OUT] = {}
    os.environ.setdefault("MINIVLLM_COMPILED", str(Path(__file__).with_name("compiled.json")))
    os.environ.setdefault("MINIVLLM_AOT_WORKER", str(Path(__file__).with_name("recorded_aot.py")))
    # The clock's choice, tested in test_linear_choice.py, may differ by processor and by load.
    os.environ.setdefault("MINIVLLM_CPU_LINEAR", "panels")
    keep_bytecode()
    compute_on_one_thread()
    set_up_logging()
    hear_interrupts()
    set_up_hypothesis()
    gc.disable()
    # Triton's bindings complain of what is never taken apart. Before the end, pytest collects
    # garbage five times, which must not look at everything that is frozen.
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start the only Chromium of this process, since playwright cannot start twice in one process."""
    from e2e.browser import start_browser
    from playwright.sync_api import sync_playwright

    chromium = find_chromium()
    assert chromium, f"no Chromium on this machine: {HOW_TO_GET_IT}"
    with sync_playwright() as playwright:
        yield start_browser(playwright, chromium)


@pytest.fixture(scope="session")
def template() -> Iterator[Template | None]:
    """Start the process from which ranks, cores and servers are forked; yield None where forking is
    not possible.
    """
    from warm_processes import CAN_FORK, Template

    template = Template() if CAN_FORK else None
    yield template
    if template is not None:
        template.close()


@pytest.fixture(scope="module")
def warm_processes(template: Template | None) -> Iterator[None]:
    """Fork the ranks, cores and servers of a test file instead of starting fresh interpreters
    (`warm_processes.py`).
    """
    from warm_processes import forked

    with forked(template):
        yield


@pytest.fixture
def warm_kernels(template: Template | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the kernels of a test's notebooks, too."""
    from jupyter_client import launcher
    from warm_processes import WarmSubprocess

    if template is not None:
        monkeypatch.setattr(launcher, "Popen", WarmSubprocess(template).Popen)


def compute_on_one_thread() -> None:
    """Limit this process and those that tests start to one thread each, since the workers share few
    cores.

    Torch reads the variable only when it is loaded, which happens later.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("KMP_BLOCKTIME", "1")  # else `limit_spinning` sets it within some test


def set_up_logging() -> None:
    """Create the engine's logger before the first test rather than inside one."""
    from minivllm.logger import init_logger

    init_logger("minivllm")


def keep_bytecode() -> None:
    """Keep bytecode, here and in the processes that tests start, even where the environment
    disables it.

    Without it each process compiles torch's sources again, which takes 3.5 of its 5 s of start-up.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def hear_interrupts() -> None:
    """Handle SIGINT: a script's background job starts with it ignored, and tests of Ctrl-C would
    hang.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def set_up_hypothesis() -> None:
    """Give each property 50 examples without a deadline; a test that hangs fails all the same."""
    try:
        from hypothesis import settings
    except ImportError:  # not on every machine that runs `make gpu`
        return
    settings.register_profile("any machine", deadline=None, max_examples=50)
    settings.load_profile("any machine")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip a whole file that cannot be imported here."""
    if not (lacking := package_missing_for(module_path)):
        return None
    parent.config.stash[LEFT_OUT][f"file, {module_path.name}, whose script needs the server's packages ({lacking})"] = 1
    return NothingOf.from_parent(parent, path=module_path)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Freeze everything loaded so far, so that the garbage collector never scans it, and let it
    look for garbage less often.

    Scanning torch, hypothesis and all tests again and again took a tenth of the time of plain
    tests. Scanning the blocks of simulated KV caches, of which each run has thousands, takes
    another tenth with Python's own thresholds.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
    let_torch_log_through_the_root()


def let_torch_log_through_the_root() -> None:
    """Let torch's loggers propagate: otherwise pytest adds its handlers to all 45, six times for
    each test.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_unconfigure(config: pytest.Config) -> None:
    if TEMPLATE in config.stash:
        config.stash[TEMPLATE].close()


def missing_here() -> dict[str, str]:
    """Map each marker to what its tests need and this machine lacks."""
    from importlib.util import find_spec

    import torch

    from minivllm.kv_connector.nixl.agent import MODULES
    from minivllm.platforms.triton_utils import HAS_TRITON, INTERPRETED

    kept_out = why_not_here()
    has_nixl = any(find_spec(name.partition(".")[0]) for name in MODULES)
    needs = {
        "gpu": (torch.cuda.is_available() and not INTERPRETED, "need a CUDA device (make gpu)"),
        "interpreted": (HAS_TRITON and INTERPRETED, "need Triton, in its interpreter (TRITON_INTERPRET=1)"),
        "browser": (find_chromium() or BROWSER_REQUIRED, f"need Chromium ({HOW_TO_GET_IT})"),
        "firefox": (firefox.find_firefox(), f"need Firefox ({firefox.HOW_TO_GET_IT})"),
        "nixl": (has_nixl or NIXL_REQUIRED, "need nixl (`make test` brings it on Linux; alone: uv sync --group nixl)"),
        "two_hosts": (kept_out is None, kept_out or ""),
    }
    return {mark: reason for mark, (is_here, reason) in needs.items() if not is_here}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that need what is missing here, and put the others in order."""
    refuse_names_that_change(items)
    refuse_what_make_gpu_forgets(items)
    for mark, reason in missing_here().items():
        leave_out(mark, reason, config, items)
    put_in_order(config, items)


def put_in_order(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files for xdist's workers; without workers, keep the order."""
    seed = config.getoption("shuffle")
    if seed is None and not hasattr(config, "workerinput"):
        return
    from distribution import longest_first, shuffle  # xdist is not on every machine that runs `make gpu`

    longest_first(items) if seed is None else shuffle(items, seed)


def refuse_names_that_change(items: list[pytest.Item]) -> None:
    """Refuse a test whose name contains an object's address: xdist's workers identify a test by its
    name.
    """
    changing = next((item.nodeid for item in items if re.search(r" at 0x[0-9a-f]+", item.nodeid)), None)
    if changing:
        raise pytest.UsageError(f"this test has another name in every process; give it `ids`: {changing}")


def refuse_what_make_gpu_forgets(items: list[pytest.Item]) -> None:
    """Refuse a GPU test in a file that `make gpu` does not run."""
    if (item := forgotten(items)) is not None:
        raise pytest.UsageError(f"this test needs a GPU, and tests/gpu.txt does not have its file: {item.nodeid}")


def leave_out(mark: str, reason: str, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the items with this mark, and record how many there are."""
    left_out = {item for item in items if item.get_closest_marker(mark)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
        config.stash[LEFT_OUT][f"tests that {reason}"] = len(left_out)


def browser_is_wanting(config: pytest.Config) -> bool:
    """Return whether a browser test is required but none has run; a collect-only run requires none."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if not BROWSER_REQUIRED or config.option.collectonly or reporter is None:
        return False
    ended = [report for kind in ("passed", "failed") for report in reporter.stats.get(kind, [])]
    return not any("browser" in report.keywords for report in ended)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Report what an xdist worker left out; in the head process, fail the run if a browser test is
    missing.
    """
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash[LEFT_OUT]
    elif browser_is_wanting(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Collect what an xdist worker left out; all workers leave out the same tests."""
    node.config.stash[LEFT_OUT].update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for label, count in config.stash[LEFT_OUT].items():
        terminalreporter.write_line(f"left out: {count} {label}")
    if browser_is_wanting(config):
        terminalreporter.write_line("MINIVLLM_REQUIRE_BROWSER is set, and no browser test ran", red=True)
    for line in mutation_scores(terminalreporter):
        terminalreporter.write_line(line)


def mutation_scores(reporter: pytest.TerminalReporter) -> list[str]:
    """Report, by lesson, how many of the wrong solutions tried in this run were caught."""
    reports = [report for kind in ("passed", "failed") for report in reporter.stats.get(kind, [])]
    noted = [value for report in reports for name, value in report.user_properties if name == "mutant"]
    caught_in: dict[str, dict[str, bool]] = {}
    for number, mutant, caught in noted:
        caught_in.setdefault(number, {})[mutant] = caught
    rows = [(number, len(result), sum(result.values())) for number, result in sorted(caught_in.items())]
    lines = [f"{number:>6} {tried:>8} {caught:>7} {caught / tried:>6.0%}" for number, tried, caught in rows]
    return ["lesson  mutants  caught  score", *lines] if lines else []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Hide the event loop that a browser fixture leaves in the thread, so that other tests can run
    their own.
    """
    loop = asyncio._get_running_loop()
    if item.get_closest_marker("browser") is None:
        asyncio._set_running_loop(None)
    try:
        return (yield)
    finally:
        asyncio._set_running_loop(loop)
