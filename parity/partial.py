"""The answers of a recording that is under way, kept in a file as they come, so that nothing is lost or asked twice.

JSON lines: first what is being recorded, then an answer a line with its request's number and a hash of what was asked.
"""

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from filelock import FileLock, Timeout  # which torch and huggingface_hub need too

from .json_text import parsed
from .sglang_client import Answer


def content(value: object) -> str:
    """A hash that changes with the value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class Partial:
    """The file of one recording: opened, or opened again.

    Args:
        about: what is being recorded; a file that was begun with something else is refused, if it holds answers.
        requests: all of them, as they are sent.
    Raises:
        ValueError: the file is of another recording, is damaged elsewhere than at its end, or is being written by
            another recorder.
    """

    def __init__(self, path: Path, about: dict, requests: list[dict]):
        self.path, self.hashes = path, [content(request) for request in requests]
        about = about | {"requests": content(self.hashes)}
        self._lock = FileLock(f"{path}.lock", timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise ValueError(f"{path} is being written by another recorder") from None
        try:
            entries = self._read()
            if len(entries) == 1 and entries[0] != about:  # begun, and nothing of it was ever answered
                entries = []
                path.unlink()
            if entries:
                self._check_same(entries[0], about)
            self.answers = dict(self._answer(number, entry) for number, entry in enumerate(entries[1:], start=2))
            self._file = open(path, "ab")
        except BaseException:
            self._unlock()
            raise
        if not entries:
            self._append(about)

    def __enter__(self) -> "Partial":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()
        self._unlock()

    def _unlock(self) -> None:
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()

    def keep(self, number: int, answer: Answer) -> None:
        """Adds an answer; it is on the disk when this returns."""
        self._append({"request": number, "content": self.hashes[number]} | asdict(answer))
        self.answers[number] = answer

    def remove(self) -> None:
        self._file.close()
        self.path.unlink()

    def _append(self, entry: dict) -> None:
        self._file.write((json.dumps(entry) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self) -> list[dict]:
        """The entries so far. A last line without its end was being written when the recorder was killed: it goes."""
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self.path, len(whole))
        try:
            return [parsed(line) for line in whole.splitlines()]
        except ValueError as error:
            raise ValueError(f"{self.path} is damaged: {error}; remove it to begin anew") from None

    def _check_same(self, begun: object, about: dict) -> None:
        if not isinstance(begun, dict):
            raise ValueError(f"{self.path} is damaged: its first line is no object; remove it to begin anew")
        for name in begun | about:
            if begun.get(name) != about.get(name):
                was, now = str(begun.get(name))[:200], str(about.get(name))[:200]
                raise ValueError(
                    f"{self.path} was begun with another `{name}`: {was}, now {now}. Record with what it was begun "
                    "with, or remove it to begin anew."
                )

    def _answer(self, line: int, entry: object) -> tuple[int, Answer]:
        try:
            number, hashed = entry.pop("request"), entry.pop("content")
            if self.hashes[number] != hashed:
                raise ValueError(f"request {number} asks for something else")
            return number, Answer(**entry)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path}, line {line}: {error!r}; remove the file to begin anew") from None
