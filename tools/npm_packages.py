"""Download what the site's pages and the slides load from npm's registry, pinned by version and
hash, and keep it outside the repository.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from minivllm.errors import MinivllmError

Packages = Mapping[str, tuple[str, str]]
"""Version and SHA-512 of each package, as npm's registry gives them."""

PYODIDE = "pyodide"
OF_THE_SITE: Packages = {
    PYODIDE: ("314.0.7", "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="),
    "@codemirror/autocomplete": (
        "6.20.4",
        "yF8RhOf2SXlg00+qtupzLhrglcas61boqaONiNcbPIebHCpJocpqTBA6dyrtUrQO47hqyTdeob/3XnYilT7TaQ==",
    ),
    "@codemirror/commands": (
        "6.11.1",
        "O/4hG3SC1YwcmQ0d2UVNDs+AsaNWd1iHVxbTeEBuqH+6bExAiPK3iS/BvpY6rZGURALv4ZD3sIgcCmRvw3ehBg==",
    ),
    "@codemirror/lang-python": (
        "6.2.1",
        "IRjC8RUBhn9mGR9ywecNhB51yePWCGgvHfY1lWN/Mrp3cKuHr0isDKia+9HnvhiWNnMpbGhWrkhuWOc09exRyw==",
    ),
    "@codemirror/language": (
        "6.13.1",
        "zfvU2r3TyylQLMj/te+5CnQ0rSqZi8B1oTCBbQkagcLW4Xc6imab6qN+pEJhsuNOLaJqiRyBXp9UhWA1DhVvDw==",
    ),
    "@codemirror/state": (
        "6.7.6",
        "kAz+AncRtKuIknedxT1bq4XwXv4UowhbkHU1myPrtVb/jZtImWuV5BXzv5vK6i3kYACsdiZiQKFQQ5Mq7elW8w==",
    ),
    "@codemirror/streamparser": (
        "6.0.0",
        "JTFPF6xrfjt0mnfGPgzcLiMwYmvIyNaoizp8BYzv8FE8KrT6GBGDZ190rtt+O7Wke3gG/MFHyiY9YGNeimof4w==",
    ),
    "@codemirror/view": (
        "6.43.15",
        "HHsfpqFeHyXLs983pSRe38Xajs0vFWZQ2BuX0m7Ki8w3jZ5iD8cuR3lBz2/5/X53Dhf32SBHKh6rtSTB6tKeGw==",
    ),
    "@lezer/common": (
        "1.5.5",
        "Pw7PVCndruF1pb3ebCxpSVpkMHSDjwRCLcTRw+RizUKco5QbWylwq2g4lnG/RYN7yTTQDXE9F77MwtkAyphrjg==",
    ),
    "@lezer/highlight": (
        "1.2.5",
        "O1GMVKgtf5YspFaRzpmqkVgMtIk2HG9uMAbH6wdAIdNh3TVzCsch/+cRi+6l2//UGDKe6NB9BW3cvuR5ezMQ0w==",
    ),
    "@lezer/lr": (
        "1.4.12",
        "On9HU4oMMiHPMkQDgoTnGahjgG5n/MkN38CgG77sMraKLL+3JBbeQNi1FcCXV9QRqwF9/BUXP3caHyJC1fBOTQ==",
    ),
    "@lezer/python": (
        "1.1.19",
        "MhQIURHRytsNzP/YXnqpYKW6la6voAH3kyplTOOiCdjyFY6cWWGFVmYVdHIPrElqSDf4iCDktQCockB9FxuhzQ==",
    ),
    "@marijn/find-cluster-break": (
        "1.0.4",
        "Wy0V7+SGUjnF9/TkiM1hKVDPj7jKXduPNboMVtHTA8dySMURWqfg/JZ9E2Sq8JgSJmkl7k7Qe9FLeMSrSraWmQ==",
    ),
    "crelt": (
        "1.0.7",
        "aK6BbWfhf4U/wCcLHKPJl/xa6VkVstRaPywWtMKGwuOLc/wZTyQYuoxgvZnNsBvv7Kg3YTBQYYBCggcviQczuA==",
    ),
    "style-mod": (
        "4.1.5",
        "WQ2llCZa9sZSkJA+aOwpg5DkfbAXFKGh//t3MRTBeruFiSBC+GXUmbBzrw3bXyboCWAbtCW9InDfBsXrRD/rAg==",
    ),
    "w3c-keyname": (
        "2.2.8",
        "dpojBhNsCNN7T82Tm7k26A6G9ML3NkhDsnw9n/eoxSRlVBB4CEtIQ/KTCLI2Fwf3ataSXRhYFkQi3SlnFwPvPQ==",
    ),
}
"""Pyodide, and CodeMirror with all that it imports."""
OF_THE_SLIDES: Packages = {
    "reveal.js": (
        "6.0.2",
        "JYIg5D9aoxoaLeb84O+OvAwsKWdIavVgEDScxtYEXFCT6t6TQrhNtSgogcjdCpdLsWglhJn3zyE3fUOwiH5KEg==",
    ),
}
SECONDS = 120


class NotAvailable(Exception):
    """A package cannot be had on this machine now."""


def downloaded(packages: Packages = OF_THE_SITE) -> dict[str, Path]:
    """Return the archive of each package, from the cache or from npm's registry.

    Raises:
        NotAvailable: npm is missing, or it cannot download a package.
        MinivllmError: a package is not the pinned one.
    """
    archives = {name: cache() / _file_name(name, version) for name, (version, _) in packages.items()}
    if missing := [name for name, path in archives.items() if not path.is_file()]:
        with tempfile.TemporaryDirectory() as folder:
            _pack([f"{name}@{packages[name][0]}" for name in missing], folder)
            cache().mkdir(parents=True, exist_ok=True)
            for name in missing:
                shutil.move(Path(folder, archives[name].name), archives[name])
    for name, path in archives.items():
        if base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode() != packages[name][1]:
            path.unlink()
            raise MinivllmError(
                f"{path.name} does not have the pinned hash, so it was deleted: build again, or check npm"
            )
    return archives


def cache() -> Path:
    """Return the folder for downloads, outside the repository."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "vllm-from-first-principles"


def _file_name(name: str, version: str) -> str:
    """Return the name that npm gives to a package's archive."""
    return f"{name.removeprefix('@').replace('/', '-')}-{version}.tgz"


def _pack(wanted: Collection[str], folder: str) -> None:
    """Download packages, each "name@version", into a folder.

    Raises:
        NotAvailable: npm is missing, or it cannot download them.
    """
    command = ["npm", "pack", "--silent", "--fetch-retries=0", "--pack-destination", folder, *wanted]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
    except FileNotFoundError:
        raise NotAvailable("npm is not installed") from None
    except subprocess.CalledProcessError as error:
        raise NotAvailable(f"npm cannot download {', '.join(wanted)}: {error.stderr.strip()[-200:]}") from error
    except subprocess.TimeoutExpired:
        raise NotAvailable(f"npm did not download {', '.join(wanted)} within {SECONDS} s") from None
