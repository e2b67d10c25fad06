"""The run folder: everything one run leaves behind, in one place, readable without this package.

config.json     command, settings, versions, hardware, date; written once
log.jsonl       one JSON object per line, each with its "step" and a checksum
checkpoint.pt   everything needed to go on; `torch.load(..., weights_only=True)` reads it
checkpoint-previous.pt   the one before it, in case it is damaged
result.json     the finished run's numbers, tables and sentences; its presence means "finished"
*.png           figures
page.html       all of it on one page
"""

import contextlib
import errno
import io
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from hebbian_softmax.lab.base import environment
from hebbian_softmax.lab.base.checkpoints import is_whole, read_checkpoint, write_checkpoint
from hebbian_softmax.lab.base.console import quoted, say
from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.base.files import (
    TEMPORARY,
    cannot_write,
    locked,
    locked_in_turn,
    remove_temporary,
    sync_folder,
    write_atomic,
)
from hebbian_softmax.lab.base.json_files import object_from_json, read_json, to_json, with_checksum, write_json
from hebbian_softmax.lab.base.ranks import current_ranks

FORMAT = 1
UNNAMED = f"{TEMPORARY}run-"  # the beginning of the name of a run folder that has no config yet
# The entries that every config has.
CONFIG = {"command": str, "settings": dict, "versions": dict, "hardware": dict, "started": str}


@dataclass(frozen=True)
class Run:
    """A run folder and the `config.json` in it, made by `create_run` or `open_run`."""

    path: Path
    config: Mapping[str, Any]

    @property
    def command(self) -> str:
        """The words after `hebbian`."""
        return str(self.config["command"])

    @property
    def typed(self) -> str:
        """The words after `hebbian` as one types them."""
        return typed_command(self.command, self.settings)

    @property
    def settings(self) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = self.config["settings"]
        return settings

    @property
    def finished(self) -> bool:
        """Whether the run has a result."""
        return (self.path / "result.json").exists()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from writing to this run."""
        with locked(self.path, wait=False) as got:
            if not got:
                raise LabError(f"{self.path} is in use by another process: wait for it or stop it first")
            remove_temporary(self.path)
            yield

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one record, which names its step. It is on disk when this returns."""
        path = self.path / "log.jsonl"
        line = (to_json(with_checksum(record)) + "\n").encode()
        try:
            with open(path, "ab", buffering=0) as file:
                before = file.tell()
                try:
                    if file.write(line) != len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(file.fileno())
                except OSError:
                    os.truncate(path, before)
                    raise
        except OSError as error:
            raise cannot_write(path, error) from error

    def records(self) -> list[dict[str, Any]]:
        """Return the log, oldest record first, without a last line that a killed process did not finish."""
        return [record for _, record in self._log_lines()]

    def cut_log(self, step: int) -> None:
        """Drop the records after `step`, since a run that goes on from there writes them again."""
        kept = b"".join(line for line, record in self._log_lines() if record["step"] <= step)
        path = self.path / "log.jsonl"
        if path.exists() and path.stat().st_size != len(kept):
            write_atomic(path, kept)

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint, and keep the one before it. The old ones stay until the new one is whole."""
        newest, previous = self._checkpoints()
        # A damaged checkpoint must not take the place of a good one.
        old_name = previous if is_whole(newest) else None
        write_atomic(newest, partial(write_checkpoint, state), old_name=old_name)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Return the newest checkpoint on the CPU, or None if there is none yet.

        If it is damaged, a run that is not finished goes on from the one before it, with a note.
        """
        newest, previous = self._checkpoints()
        if not newest.exists() and not previous.exists():
            return None
        try:
            return read_checkpoint(newest)
        except Exception as error:  # damaged bytes raise many types of error inside torch and pickle
            why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({reason(error)})"
            what, cause = f"{newest} {why}", error
        try:
            state = read_checkpoint(previous) if previous.exists() else None
        except Exception as error:
            what += f", nor can {previous.name} ({reason(error)})"
            state = None
        if state is None:
            again = "delete them" if previous.exists() else "delete it"
            again += " and result.json" if self.finished else ""
            raise LabError(
                f"{what}: put a copy of it back if you have one, or {again} and resume again to start this run over"
            ) from cause
        if self.finished:
            raise LabError(
                f"{what}, and {previous.name} beside it is not of the end of the run: "
                "delete result.json and resume the run, which then goes on from there"
            ) from cause
        if current_ranks().first:
            say(f"note: {what}: going on from {previous.name}, which is of step {state.get('step')}")
        return state

    def drop_checkpoints(self) -> None:
        """Delete the weights."""
        for path in self._checkpoints():
            path.unlink(missing_ok=True)

    def _checkpoints(self) -> tuple[Path, Path]:
        """Return the paths of the newest checkpoint and of the one before it."""
        return self.path / "checkpoint.pt", self.path / "checkpoint-previous.pt"

    def save_result(self, result: Mapping[str, Any]) -> None:
        """Write `result.json`, which marks the run as finished."""
        write_json(self.path / "result.json", result)

    def result(self) -> dict[str, Any] | None:
        """Return the content of `result.json`, or None if the run is not finished."""
        path = self.path / "result.json"
        return read_json(path, "delete it and resume the run to make it again") if path.exists() else None

    def remove_if_unused(self) -> None:
        """Remove the folder of a run that failed before it did anything, as there is nothing to resume."""
        if [path.name for path in self.path.iterdir()] == ["config.json"]:
            (self.path / "config.json").unlink()
            self.path.rmdir()

    def _log_lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Yield the lines of the log with their records. Only a run that is not finished may lack the end of a line."""
        path = self.path / "log.jsonl"
        try:
            lines = io.BytesIO(path.read_bytes()).readlines() if path.exists() else []
        except OSError as error:
            raise LabError(f"{path} cannot be read ({reason(error)})") from error
        for number, line in enumerate(lines, start=1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("it does not end")
                record = object_from_json(line)
                if type(record.get("step")) is not int:
                    raise ValueError("it has no step")
                if not all(value is None or isinstance(value, str | int | float) for value in record.values()):
                    raise ValueError("a value is neither text nor a number")
                yield line, record
            except ValueError as error:
                if number == len(lines) and _is_begun(line) and not self.finished:
                    return
                raise LabError(f"{path}, line {number} is damaged ({reason(error)}): remove that line") from error


def _is_begun(line: bytes) -> bool:
    """Return whether a line is the beginning of a record, as a killed process leaves it, and no whole one."""
    try:
        object_from_json(line[:-1])
    except ValueError:
        return not line.endswith(b"\n")
    return False  # the last byte is not the end of the line that it was


def typed_command(command: str, settings: Mapping[str, Any]) -> str:
    """Return a command as one types it: a corpus of the user's own stands in place of the word `corpus`.

    >>> typed_command("train corpus", {"corpus": "my-text"}), typed_command("compare glyphs", {})
    ('train my-text', 'compare glyphs')
    """
    verb, _, name = command.partition(" ")
    corpus = settings.get("corpus")
    return f"{verb} {quoted(corpus)}" if name == "corpus" and isinstance(corpus, str) and corpus else command


def config_now(command: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `config.json` for a run that starts here and now."""
    commit = environment.commit()  # known in a checkout of this project; an installed package has its version
    return {
        "format": FORMAT,
        "command": command,
        "settings": dict(settings),
        "versions": environment.versions() | ({"commit": commit} if commit != "unknown" else {}),
        "hardware": environment.hardware(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def create_run(folder: Path, name: str, command: str, settings: Mapping[str, Any]) -> Run:
    """Create a run folder `folder/name-DATE-TIME`, or one called `…-2` and so on if there is one already.

    The folder gets its name once `config.json` is in it. A process that is killed before leaves a hidden folder, which
    the next call removes.
    """
    config = config_now(command, settings)
    path = folder / f"{name}-{datetime.fromisoformat(config['started']):%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked_in_turn(folder, f"{folder} is in use by another process"):
            for left in folder.glob(f"{UNNAMED}*"):
                shutil.rmtree(left)
            unnamed = folder / f"{UNNAMED}{os.getpid()}"
            try:
                unnamed.mkdir()
                write_json(unnamed / "config.json", config)
                named, number = path, 1
                while named.exists():
                    number += 1
                    named = path.with_name(f"{path.name}-{number}")
                unnamed.rename(named)
            except BaseException:
                shutil.rmtree(unnamed, ignore_errors=True)
                raise
            sync_folder(folder)
    except FileExistsError as error:
        raise LabError(f"{folder} is a file: choose another folder with --runs") from error
    except OSError as error:
        raise cannot_write(path, error) from error
    return open_run(named)


def open_run(path: Path) -> Run:
    """Open an existing run folder, finished or not."""
    try:
        if not (path / "config.json").is_file():
            raise LabError(f"{path} is not a run folder: it has no config.json")
    except OSError as error:  # no permission, a name too long
        raise LabError(f"{path} cannot be read ({reason(error)})") from error
    config = read_json(path / "config.json", "put it back as it was, or start a new run")
    if config.get("format") != FORMAT:
        raise LabError(
            f"{path} has run format {config.get('format')!r}, this version reads {FORMAT}: "
            "use the version of hebbian-softmax that wrote it"
        )
    try:
        for name, kind in CONFIG.items():
            if not isinstance(config.get(name), kind):
                raise ValueError(f"{name!r} is missing or of another type")
        datetime.fromisoformat(config["started"])
    except ValueError as error:
        raise LabError(f"{path / 'config.json'} is not the config of a run ({error})") from error
    return Run(path, config)


def last_unfinished(folder: Path, command: str, alike: Mapping[str, Any]) -> Run:
    """Return the newest unfinished run of `command` in `folder` that has the settings of `alike`.

    Damaged runs and runs in use are noted and skipped.
    """
    unfinished = []
    for path in sorted(folder.glob("[!.]*/config.json")) if folder.is_dir() else ():
        try:
            run = open_run(path.parent)
            same = all(run.settings.get(name) == value for name, value in alike.items())
            if run.command == command and same and not run.finished:
                with run.held():
                    unfinished.append(run)
        except (LabError, OSError) as error:
            say(f"note: skipped: {error}")
    if not unfinished:
        raise LabError(
            f"{folder} has no unfinished run of 'hebbian {typed_command(command, alike)}' to go on with: "
            "start one without --resume"
        )
    return max(unfinished, key=lambda run: (datetime.fromisoformat(run.config["started"]).astimezone(), run.path.name))
