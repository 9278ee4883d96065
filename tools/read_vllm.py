"""Open a stop of the reading tour: vLLM's file at the line, and ours beside it.

    make read STOP=3                    # or: uv run python tools/read_vllm.py 3
    make read STOP=3 ROW=2              # its second row
    make read STOP=3 PRINT=1            # without a pager; so it is where no terminal is

vLLM's source archive is fetched once, from the package index that uv or pip is set up for (PyPI
unless UV_DEFAULT_INDEX, UV_INDEX_URL, PIP_INDEX_URL or pip's configuration names another). Its
SHA-256 must be the one in `vllm_names.json`. Of its files only those of the tour are kept, in
`minivllm/` below $XDG_CACHE_HOME, which is ~/.cache by default.
"""

from __future__ import annotations

import argparse
import ast
import base64
import configparser
import functools
import hashlib
import html
import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

import vllm_lines

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser, positive_int, run
from minivllm_lab.progress import track

ROOT = Path(__file__).resolve().parents[1]
TOUR = ROOT / "lessons" / "reading"
RECORD = ROOT / "tools" / "vllm_names.json"
PYPI = "https://pypi.org/simple"
INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
SIMPLE = "application/vnd.pypi.simple.v1+json, text/html;q=0.2"
HREF = re.compile(r"""<a\b[^>]*\bhref\s*=\s*["']([^"']+)["']""", re.IGNORECASE)
OUR_CELL = re.compile(r"\[[^\]]*\]\(\.\./\.\./([^)#]+)\)|`([^`]+)`")
TAKES_A_LINE = {"less", "more", "most", "vi", "vim", "view", "nvim", "nano"}
SECONDS = 60
CHUNK = 1 << 20


@dataclass(frozen=True)
class Place:
    """Lines of a file, and the name of what stands there."""

    path: str
    first: int
    last: int
    name: str

    def __str__(self) -> str:
        return f"{self.path}, lines {self.first} to {self.last}: {self.name}"


@dataclass(frozen=True)
class Row:
    """A row of a stop's table: lines of vLLM's, and our functions beside them."""

    theirs: Place
    ours: tuple[Place, ...]


# The pages of the tour


def stop_page(number: int) -> Path:
    """Return a stop's page.

    Raises:
        MinivllmError: the tour has no such stop.
    """
    pages = stop_pages()
    if not 1 <= number <= len(pages):
        raise MinivllmError(f"there is no stop {number}: the tour has stops 1 to {len(pages)}")
    return pages[number - 1]


def stop_pages() -> list[Path]:
    """Return the pages of all stops, in order."""
    return sorted(TOUR.glob("[0-9][0-9]_*.md"))


def rows(page: Path, version: str) -> list[Row]:
    """Return the rows of a stop's table."""
    name = f"{vllm_lines.TOUR}{page.name}"
    ranges = vllm_lines.line_ranges(name, page.read_text(), version)
    return [_row(each) for each in ranges if each.row]


def _row(each: vllm_lines.LineRange) -> Row:
    name = " to ".join(filter(None, (each.begins, each.ends)))
    theirs = Place(each.path, each.first, each.last, name)
    return Row(theirs, tuple(our_places(each.row.split(" | ")[2])))


def our_places(cell: str) -> Iterator[Place]:
    """Yield the functions that a table cell names after a link to their file.

    Raises:
        MinivllmError: the file has no such function.
    """
    path = ""
    for link, name in OUR_CELL.findall(cell):
        if link:
            path = link
        elif path:
            yield our_place(path, name)


@functools.cache
def _tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def our_place(path: str, name: str) -> Place:
    """Find a function, a class, or a method (`Class.method`) in one of our files.

    Raises:
        MinivllmError: it is not there.
    """
    owner, _, last = name.rpartition(".")
    for node in ast.walk(_tree(path)):
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and child.name == last
            if named and (not owner or getattr(node, "name", "") == owner):
                return Place(path, child.lineno, child.end_lineno or child.lineno, name)
    raise MinivllmError(f"{path} has no {name}")


# vLLM's source


def cache_folder(version: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder that keeps vLLM's files."""
    base = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "minivllm" / f"vllm-{version}"


def source_files(paths: set[str], version: str, sha256: str, archive: Path | None = None) -> Path:
    """Return the folder that holds these files of vLLM's; fetch the archive if one is missing.

    `archive`: the source archive, if it is here already.

    Raises:
        MinivllmError: there is no archive, or it is not the one that the tour was written for.
    """
    folder = cache_folder(version)
    if all((folder / path).is_file() for path in paths):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    fetched = archive or fetch(version, folder.parent)
    try:
        check_hash(fetched, sha256)
        unpack(fetched, paths, folder)
    finally:
        if archive is None:
            fetched.unlink(missing_ok=True)
    return folder


def check_hash(archive: Path, sha256: str) -> None:
    """Raise `MinivllmError` unless a file has this SHA-256."""
    try:
        with archive.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise MinivllmError(f"cannot read {archive}: {error.strerror}") from None
    if digest != sha256:
        name = archive.name.removesuffix(".part")
        raise MinivllmError(f"{name} has the SHA-256 {digest}, expected {sha256}: it is not vLLM's release")


def unpack(archive: Path, paths: set[str], folder: Path) -> None:
    """Write these files of an archive below a folder.

    Raises:
        MinivllmError: the archive has no such file.
    """
    left = set(paths)
    with tarfile.open(archive) as members:
        for member in members:
            path = member.name.partition("/")[2]
            content = members.extractfile(member) if path in left else None
            if content is None:
                continue
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished = target.with_suffix(".part")
            unfinished.write_bytes(content.read())
            unfinished.replace(target)
            left.remove(path)
    if left:
        raise MinivllmError(f"{archive.name} has no {', '.join(sorted(left))}")


# The package index


def index_url(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of the package index that uv or pip uses here."""
    for name in INDEX_VARIABLES:
        if environment.get(name):
            return environment[name]
    return pip_option("index-url", environment) or PYPI


def pip_option(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return an option of pip's configuration files, "" if none sets it."""
    home = Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    files = [Path("/etc/pip.conf"), Path.home() / ".pip" / "pip.conf", home / "pip" / "pip.conf"]
    files += [Path(sys.prefix) / "pip.conf"]
    if environment.get("PIP_CONFIG_FILE"):
        files.append(Path(environment["PIP_CONFIG_FILE"]))
    parser = configparser.RawConfigParser()
    try:
        parser.read(files)  # a later file goes before an earlier one, as in pip
    except configparser.Error as error:
        raise MinivllmError(f"pip's configuration cannot be read: {str(error).splitlines()[0]}") from None
    for section in ("download", "global"):
        if parser.has_option(section, name):
            return parser.get(section, name)
    return ""


def fetch(version: str, folder: Path) -> Path:
    """Download vLLM's source archive into a folder, and return the file.

    Raises:
        MinivllmError: the index cannot be reached, or has no such archive.
    """
    index = index_url()
    target = folder / f"vllm-{version}.tar.gz.part"
    try:
        with opened(f"{index.rstrip('/')}/vllm/") as page:
            address = archive_address(page.read().decode(), page.url, page.headers.get_content_type(), version)
        with opened(address) as response, target.open("wb") as file:
            size = int(response.headers.get("Content-Length") or 0)
            for _ in track(range(max(1, -(-size // CHUNK))), f"vllm-{version}.tar.gz"):
                file.write(response.read(CHUNK))
            shutil.copyfileobj(response, file)
        if "#sha256=" in address:
            check_hash(target, address.rpartition("=")[2])
    except MinivllmError:
        target.unlink(missing_ok=True)
        raise
    except (OSError, ValueError) as error:
        target.unlink(missing_ok=True)
        reason = getattr(error, "reason", None) or error
        host = urlsplit(index).hostname or index
        raise MinivllmError(
            f"vLLM's source could not be fetched from {host}: {reason}. Fetch vllm-{version}.tar.gz "
            "from vLLM's page on PyPI where there is a network, and pass it with --archive FILE"
        ) from None
    return target


def archive_address(page: str, address: str, kind: str, version: str) -> str:
    """Return the address of the source archive that a project's page of an index lists, with the hash
    that the page has for it, as in `…#sha256=0a1b`.

    Raises:
        MinivllmError: the page does not list this version's source archive.
    """
    name = f"vllm-{version}.tar.gz"
    for link in file_links(page, kind):
        if file_name(link) == name:
            return urljoin(address, link)
    raise MinivllmError(f"the package index {urlsplit(address).hostname} has no {name}")


def file_links(page: str, kind: str) -> list[str]:
    """Return the links to files on a project's page of an index, with their hashes where it has them."""
    if not kind.endswith("json"):
        return [html.unescape(link) for link in HREF.findall(page)]
    files = json.loads(page).get("files", ())
    hashes = (file.get("hashes", {}).get("sha256") for file in files)
    return [file["url"] + (f"#sha256={digest}" if digest else "") for file, digest in zip(files, hashes, strict=True)]


def file_name(link: str) -> str:
    """Return the name of the file that a link leads to."""
    return unquote(urlsplit(link).path).rpartition("/")[2]


def opened(address: str):
    """Open an address. A name and a password in it are sent as pip sends them."""
    parts = urlsplit(address)
    headers = {"Accept": f"{SIMPLE}, */*;q=0.1"}
    if parts.username:
        both = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(both.encode()).decode()}"
        address = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    certificates = os.environ.get("PIP_CERT") or pip_option("cert") or None
    context = ssl.create_default_context(cafile=certificates) if parts.scheme == "https" else None
    return urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=SECONDS, context=context)


# Showing


def shown(place: Place, root: Path) -> str:
    """Return the lines of a place with their numbers, under a title."""
    lines = (root / place.path).read_text().splitlines()
    numbered = [f"{number:5}  {lines[number - 1]}" for number in range(place.first, place.last + 1)]
    return "\n".join([str(place), *numbered, ""])


def print_rows(chosen: list[Row], folder: Path) -> None:
    """Print the lines of each row: vLLM's, then ours."""
    for row in chosen:
        print(shown(row.theirs, folder))
        for place in row.ours:
            print(shown(place, ROOT))


def pager() -> list[str]:
    """Return the command of the pager, [] if there is none."""
    if os.environ.get("PAGER"):
        return shlex.split(os.environ["PAGER"])
    return next(([name, *more] for name, more in (("less", ["-N"]), ("more", [])) if shutil.which(name)), [])


def page_rows(chosen: list[Row], folder: Path, command: list[str]) -> None:
    """Print the places of each row, then open the first row's file at its line, and ours after it.

    Raises:
        MinivllmError: the pager does not start.
    """
    first = chosen[0]
    for row in chosen:
        print(f"vLLM  {row.theirs}")
        for place in row.ours:
            print(f"ours  {place}")
    line = [f"+{first.theirs.first}"] if Path(command[0]).name in TAKES_A_LINE else []
    files = [folder / first.theirs.path, *(ROOT / place.path for place in first.ours[:1])]
    try:
        subprocess.run([*command, *line, *map(str, files)], check=False)
    except OSError as error:
        raise MinivllmError(f"the pager {command[0]!r} does not start: {error.strerror}") from None


def main(arguments: argparse.Namespace) -> None:
    """Open or print one stop."""
    record = json.loads(RECORD.read_text())
    version = record["version"]
    all_rows = rows(stop_page(arguments.stop), version)
    if arguments.row is not None and arguments.row > len(all_rows):
        raise MinivllmError(f"stop {arguments.stop} has rows 1 to {len(all_rows)}, no row {arguments.row}")
    chosen = all_rows if arguments.row is None else [all_rows[arguments.row - 1]]
    paths = {row.theirs.path for page in stop_pages() for row in rows(page, version)}
    folder = source_files(paths, version, record["sha256"], arguments.archive)
    command = pager()
    if arguments.print or not command or not (sys.stdin.isatty() and sys.stdout.isatty()):
        print_rows(chosen, folder)
    else:
        page_rows(chosen, folder, command)


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    flags = Parser(description=__doc__)
    flags.add_argument("stop", type=positive_int, help="the stop's number, as in 3")
    flags.add_argument("--row", type=positive_int, metavar="N", help="one row of its table (default: all)")
    flags.add_argument("--print", action="store_true", help="print the lines instead of opening a pager")
    flags.add_argument("--archive", type=Path, metavar="FILE", help="vLLM's source archive, if it is here already")
    return flags


if __name__ == "__main__":
    run(main, parser())
