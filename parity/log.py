"""The log of a block-diffusion run: JSON lines, one header, then requests, each followed by its blocks and steps.

    {"type": "header", "format": "clover-parity", "version": 1, "engine": {...}, "model": {...}, ...}
    {"type": "request", "request": 0, "prompt": [...], "sampling": {...}, "output": [...], "finish_reason": "length"}
    {"type": "step", "request": 0, "block": 2, "step": 0, "start": 64, "before": [...], "after": [...], ...}
    {"type": "commit", "request": 0, "block": 2, "start": 64, "tokens": [...]}

A step's `before` and `after` are the block's tokens, the mask token where nothing was filled; `confidences`, `tokens`
and `margins` have one entry a position of the block: the probability of the likeliest token, that token, and how far
its logit is above the second one's; null where nothing was masked. Steps may be missing (a server that shows none).
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import get_args, get_origin, get_type_hints

FORMAT, VERSION = "clover-parity", 1


@dataclass
class Header:
    """Who wrote the log, of which model, and how.

    engine: name and versions. model: `architectures`, `fingerprint` (see `fingerprint.py`), `mask_token_id`,
    `eos_token_ids`. algorithm: `name`, `threshold`, `block_size`. backend: attention and whatever else was chosen.
    """

    engine: dict
    model: dict
    algorithm: dict
    dtype: str
    backend: dict = field(default_factory=dict)
    seed: int | None = None
    notes: dict = field(default_factory=dict)  # what else is known of the run


@dataclass
class Request:
    request: int
    prompt: list[int]
    sampling: dict  # as the engine was given it; `max_new_tokens` has to be there
    output: list[int]
    finish_reason: str  # "stop" or "length"


@dataclass
class Step:
    request: int
    block: int
    step: int
    start: int
    before: list[int]
    after: list[int]
    tokens: list[int | None]
    confidences: list[float | None]
    margins: list[float | None]


@dataclass
class Commit:
    request: int
    block: int
    start: int
    tokens: list[int]


@dataclass
class Log:
    header: Header
    requests: list[Request]
    steps: list[Step]
    commits: list[Commit]

    def steps_of(self, request: int) -> list[Step]:
        return [step for step in self.steps if step.request == request]


KINDS = {"header": Header, "request": Request, "step": Step, "commit": Commit}


def write_log(path: Path, log: Log) -> None:
    """Writes a log; a request is followed by its steps and commits."""
    head = {"type": "header", "format": FORMAT, "version": VERSION}
    with open(path, "w") as file:
        file.write(json.dumps(head | asdict(log.header)) + "\n")
        for request in log.requests:
            file.write(json.dumps({"type": "request"} | asdict(request)) + "\n")
            for kind, entries in (("step", log.steps), ("commit", log.commits)):
                for entry in entries:
                    if entry.request == request.request:
                        file.write(json.dumps({"type": kind} | asdict(entry)) + "\n")


def read_log(path: Path) -> Log:
    """Reads a log.

    Raises:
        ValueError: a line that is no JSON, of an unknown kind or version, or with a field missing, unknown, of the
            wrong type or of the wrong length; with the file's name and the line's number.
    """
    log = None
    for number, line in enumerate(lines_of(path), start=1):
        try:
            log = _add(log, line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if log is None:
        raise ValueError(f"{path}, line 1: the file is empty, but a log begins with its header")
    return log


def lines_of(path: Path) -> Iterator[str]:
    with open(path, encoding="utf-8") as file:
        yield from file


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number that can be compared")


def _add(log: Log | None, line: str) -> Log:
    """A log with one more line."""
    try:
        entry = json.loads(line, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(entry, dict) or entry.get("type") not in KINDS:
        kind = entry.get("type") if isinstance(entry, dict) else entry
        raise ValueError(f"`type` is {kind!r}, but must be one of {', '.join(KINDS)}")
    kind = entry.pop("type")
    if (kind == "header") != (log is None):
        raise ValueError("a second header" if log else f"a {kind} before the header")
    if kind == "header":
        named = entry.pop("format", None), entry.pop("version", None)
        if named != (FORMAT, VERSION):
            raise ValueError(f"format and version are {named}, but must be {(FORMAT, VERSION)}")
        return Log(_checked_header(_checked(Header, entry)), [], [], [])
    value = _checked(KINDS[kind], entry)
    if kind == "request":
        if value.request != len(log.requests):
            raise ValueError(f"`request` is {value.request}, but must be {len(log.requests)}: they are in order")
        if not isinstance(value.sampling.get("max_new_tokens"), int):
            raise ValueError("`sampling` has no `max_new_tokens`")
        log.requests.append(value)
    else:
        if not 0 <= value.request < len(log.requests):
            raise ValueError(f"`request` is {value.request}, which stands nowhere before")
        _check_block(value, log.header)
        if kind == "step":
            _check_step(value, log)
        (log.steps if kind == "step" else log.commits).append(value)
    return log


NEEDED = {
    "model": {"architectures": list, "fingerprint": str, "mask_token_id": int, "eos_token_ids": list},
    "algorithm": {"name": str, "threshold": (int, float), "block_size": int},
}


def _checked_header(header: Header) -> Header:
    for name, needed in NEEDED.items():
        for key, kind in needed.items():
            value = getattr(header, name).get(key)
            if not isinstance(value, kind):
                raise ValueError(f"`{name}` has {key!r}: {value!r}, but a replay needs `{key}`, a {kind}")
    size, threshold = header.algorithm["block_size"], header.algorithm["threshold"]
    if isinstance(size, bool) or size < 1 or not 0 <= threshold <= 1:
        raise ValueError(f"`block_size` is {size} and `threshold` {threshold}, but must be at least 1, and in [0, 1]")
    return header


def _check_block(entry: Step | Commit, header: Header) -> None:
    size = header.algorithm.get("block_size")
    for field_ in fields(entry):
        value = getattr(entry, field_.name)
        if isinstance(value, list) and len(value) != size:
            raise ValueError(f"`{field_.name}` has {len(value)} entries, but must have the block's {size}")
    if entry.start != entry.block * size:
        raise ValueError(f"`start` is {entry.start}, but block {entry.block} starts at {entry.block * size}")


def _check_step(step: Step, log: Log) -> None:
    """A step has a decision where something is masked, changes nothing else and follows from the one before it."""
    prompt, mask = len(log.requests[step.request].prompt), log.header.model["mask_token_id"]
    last = next((other for other in reversed(log.steps) if other.request == step.request), None)
    follows = last is not None and last.block == step.block
    expected = last.step + 1 if follows else 0
    if step.step != expected:
        raise ValueError(f"`step` is {step.step}, but must be {expected}: none of a block may be left out")
    if last is not None and not follows and mask in last.after[max(0, prompt - last.start) :]:
        raise ValueError(f"block {last.block} is left with masked positions: its last steps are missing")
    if follows and step.before != last.after:
        raise ValueError(f"`before` is {step.before}, but `after` of the step before it is {last.after}")
    for i, (before, after) in enumerate(zip(step.before, step.after, strict=True)):
        masked = before == mask and step.start + i >= prompt  # a prompt's own mask token stays
        if not masked and before != after:
            raise ValueError(f"`after` has another token at {i}, where nothing was masked")
        for name in ("tokens", "confidences", "margins"):
            if (getattr(step, name)[i] is not None) != masked:
                raise ValueError(f"`{name}` at {i} is {getattr(step, name)[i]}, but null means that nothing is masked")
        if masked and after not in (mask, step.tokens[i]):
            raise ValueError(f"`after` has {after} at {i}, but `tokens`, what was chosen there, has {step.tokens[i]}")


def _checked(kind: type, entry: dict) -> object:
    """A dataclass from a line's fields, whose names and types have to fit."""
    hints = get_type_hints(kind)
    unknown = set(entry) - set(hints)
    if unknown:
        raise ValueError(f"unknown field `{min(unknown)}`; there are {', '.join(hints)}")
    for name, value in entry.items():
        if not _is(value, hints[name]):
            raise ValueError(f"`{name}` is {str(value)[:60]!r}, but must be {hints[name]}")
    try:
        return kind(**entry)
    except TypeError as error:
        raise ValueError(str(error).replace("__init__() ", "")) from None


def _is(value: object, hint: object) -> bool:
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_is(item, get_args(hint)[0]) for item in value)
    options = get_args(hint) or (hint,)
    if isinstance(value, bool):
        return bool in options
    return isinstance(value, tuple(NoneType if o is None else o for o in options)) or (
        float in options and isinstance(value, int)
    )
