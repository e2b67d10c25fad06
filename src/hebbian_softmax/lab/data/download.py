"""Downloads that survive dropped connections, killed processes and changed files."""

import errno
import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from hebbian_softmax import __version__
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.files import cannot_write, locked, sync_folder
from hebbian_softmax.lab.base.json_files import object_from_json, read_json, write_json
from hebbian_softmax.lab.base.progress import Progress, format_bytes

CHUNK = 1 << 20
RECORD = "checksums.json"
AGAIN = "delete it, and it will be downloaded again"
AGENT = f"hebbian-softmax/{__version__}"  # some servers, WikiText's among them, refuse Python's default name
TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}


def download(
    url: str,
    path: Path,
    *,
    sha256: str | None = None,
    retries: int = 4,
    backoff: float = 1.0,
    timeout: float = 30.0,
    quiet: bool = False,
) -> None:
    """Fetch `url` to `path`. If `path` exists already, only its checksum is compared.

    The checksum must be `sha256`. If none is known, that of the first download is kept in `checksums.json` beside the
    file, and `check_download` compares with it later.

    The bytes are collected in `path.part`, which is renamed once it is complete and has the right checksum, so `path`
    is whole or absent. A later call continues `path.part` if the server's file is still the same. A failed connection
    is tried again `retries` times in a row, after `backoff`, 2·`backoff`, 4·`backoff`, … seconds; bytes that arrive
    reset the count.
    """
    part = _Part(url, path)
    if not url.startswith(("http://", "https://")):
        raise _failed(part, "it is not an http or https address")
    try:
        if path.exists():
            check_download(path, sha256)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent, wait=True):  # another process may be fetching the same file
            if not path.exists():
                _fetch(part, retries, backoff, timeout, quiet)
                try:
                    _check(part.path, sha256, f"it was removed; try again, or look at what {url} sends")
                except LabError:
                    part.remove()
                    raise
                with open(part.path, "rb+") as file:  # the name comes after the bytes have reached the disk
                    os.fsync(file.fileno())
                if sha256 is None:
                    known = {**_recorded(path.parent), path.name: _digest(part.path)}
                    write_json(path.with_name(RECORD), {"sha256": known})
                part.path.replace(path)
                part.remove()
                sync_folder(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error


def check_download(path: Path, sha256: str | None = None) -> None:
    """Raise an error if a file does not have this checksum or, without one, that of its download, if it had any."""
    own = f"delete it, and it will be downloaded again; or take it out of {RECORD} if you changed it on purpose"
    _check(path, sha256 or _recorded(path.parent).get(path.name), AGAIN if sha256 else own)


class _Part:
    """The bytes received so far, and a note that tells whether the server still has the same file."""

    def __init__(self, url: str, target: Path) -> None:
        self.url, self.target = url, target
        self.path = target.with_name(target.name + ".part")
        self.note = target.with_name(target.name + ".part.json")

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def validator(self) -> str | None:
        """Return the ETag or date that the server's file had when these bytes came, for an If-Range header."""
        try:
            note = object_from_json(self.note.read_bytes())
        except (OSError, ValueError):
            return None
        return str(note["validator"]) if note.get("url") == self.url and note.get("validator") else None

    def begin(self, headers: http.client.HTTPMessage) -> None:
        """Start from nothing, and note the version of the file that the server is about to send."""
        validator = next(iter(_validators(headers)), None)
        self.path.unlink(missing_ok=True)
        write_json(self.note, {"url": self.url, "validator": validator})

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)


class _DroppedError(Exception):
    """The connection failed in a way that may not happen again."""


def _fetch(part: _Part, retries: int, backoff: float, timeout: float, quiet: bool) -> None:
    """Collect all bytes in `part.path`, trying again after dropped connections."""
    failures = 0
    with Progress(part.target.name, total=None, start=part.size(), unit="bytes", quiet=quiet) as progress:
        while True:
            before = part.size()
            try:
                _receive(part, timeout, progress)
                return
            except _DroppedError as error:
                failures = failures + 1 if part.size() <= before else 1
                if failures > retries:
                    raise _failed(part, f"{error}; is there a network?") from error
                wait = backoff * 2 ** (failures - 1)
                progress.note(f"{error}; trying again in {wait:.0f} s")
                time.sleep(wait)


def _receive(part: _Part, timeout: float, progress: Progress) -> None:
    """Make one request for the missing bytes and append the answer."""
    have, validator = part.size(), part.validator()
    headers = {"Accept-Encoding": "identity", "User-Agent": AGENT}
    if have and validator:
        headers |= {"Range": f"bytes={have}-", "If-Range": validator}
    try:
        response = urllib.request.urlopen(urllib.request.Request(part.url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and error.headers.get("Content-Range") == f"bytes */{have}":
            return  # all bytes have been received already
        if error.code == 416:
            part.remove()
            raise _DroppedError("the server's file has changed") from error
        if error.code in TRANSIENT_STATUS:
            raise _DroppedError(f"HTTP {error.code} {error.reason}") from error
        raise _failed(part, f"HTTP {error.code} {error.reason}") from error
    except http.client.InvalidURL as error:
        raise _failed(part, str(error)) from error
    except (OSError, http.client.HTTPException) as error:
        raise _DroppedError(str(getattr(error, "reason", error))) from error

    with response:
        if response.status == 206:
            # Some servers honour Range but ignore If-Range, so the version is compared here, too.
            begins_here = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            if not begins_here or validator not in _validators(response.headers):
                part.remove()
                raise _DroppedError("the server's file has changed")
        else:
            have = 0
            part.begin(response.headers)
        progress.total = None
        if response.length is not None:
            _check_space(part, response.length)
            progress.total = have + response.length
        _append(part, response, have, progress)


def _validators(headers: http.client.HTTPMessage) -> list[str]:
    """Return the headers that identify a version of the file, best first. A weak ETag does not promise equal bytes."""
    found = [headers.get("ETag", ""), headers.get("Last-Modified", "")]
    return [value for value in found if value and not value.startswith("W/")]


def _read(response: Any) -> bytes:
    """Read the next bytes. Errors of the network are told apart from those of the disk here."""
    try:
        chunk: bytes = response.read1(CHUNK)
        return chunk
    except (OSError, http.client.HTTPException) as error:
        raise _DroppedError(str(error) or type(error).__name__) from error


def _append(part: _Part, response: Any, have: int, progress: Progress) -> None:
    try:
        with open(part.path, "ab") as file:
            while chunk := _read(response):
                file.write(chunk)
                have += len(chunk)
                progress.update(have)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            part.remove()  # frees the space
        raise
    if progress.total is not None and have < progress.total:
        raise _DroppedError(f"the connection ended after {have:,} of {progress.total:,} bytes")


def _check_space(part: _Part, length: int) -> None:
    free = shutil.disk_usage(part.path.parent).free
    if length > free:
        raise LabError(
            f"no space for {part.target}: {format_bytes(length)} to come, {format_bytes(free)} free; "
            "make room, or choose another folder with --data-root or HEBBIAN_DATA"
        )


def _check(path: Path, sha256: str | None, advice: str) -> None:
    if sha256 is not None and (found := _digest(path)) != sha256.lower():
        raise LabError(f"{path} has SHA-256 {found}, expected {sha256.lower()}: {advice}")


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _recorded(folder: Path) -> dict[str, str]:
    """Return the checksums of downloads in a folder, by the names of the files."""
    path = folder / RECORD
    if not path.exists():
        return {}
    known = read_json(path, "delete it").get("sha256")
    if not isinstance(known, dict) or not all(isinstance(each, str) for each in known.values()):
        raise LabError(f"{path} does not hold checksums of downloads: delete it")
    return known


def _failed(part: _Part, reason: str) -> LabError:
    return LabError(
        f"cannot download {part.url} ({reason}): put the file at {part.target} yourself, "
        "or name a data folder that has it with --data-root or HEBBIAN_DATA"
    )
