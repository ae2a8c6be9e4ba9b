"""The log of a block-diffusion run: JSON lines, one header, then requests, each followed by its blocks and steps.

    {"type": "header", "format": "clover-parity", "version": 2, "counts": {...}, "engine": {...}, "model": {...}, ...}
    {"type": "request", "request": 0, "prompt": [...], "sampling": {...}, "output": [...], "finish_reason": "length"}
    {"type": "step", "request": 0, "block": 2, "step": 0, "start": 64, "before": [...], "after": [...], ...}
    {"type": "commit", "request": 0, "block": 2, "start": 64, "tokens": [...]}

A step's `before` and `after` are the block's tokens, the mask token where nothing was filled; `confidences`, `tokens`
and `margins` have one entry a position of the block: the probability of the likeliest token, that token, and how far
its logit is above the second one's; null where nothing was masked. Steps may be missing (a server that shows none).
`counts` says how many requests, steps and commits follow, so that a log that lost its end is not taken for a whole one.
"""

import json
import os
from collections import defaultdict
from dataclasses import asdict, dataclass, field, fields
from itertools import takewhile
from pathlib import Path
from types import NoneType
from typing import get_args, get_origin, get_type_hints

from .json_text import parsed

FORMAT, VERSION = "clover-parity", 2
FINISH_REASONS = ("stop", "length")


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


def counts(log: Log) -> dict[str, int]:
    return {"request": len(log.requests), "step": len(log.steps), "commit": len(log.commits)}


def check_new(path: Path) -> None:
    """Raises a `ValueError` if a log can't be written there, or would take the place of something."""
    if path.exists():
        raise ValueError(f"{path} is there already: remove it, or name another file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: {path.parent} is no folder that can be written to")


def write_log(path: Path, log: Log) -> None:
    """Writes a log, a request followed by its steps and commits: under its name it is there as a whole or not at all.

    Raises:
        ValueError: the log could not be read again, or not as what it is.
    """
    draft = path.with_name(path.name + ".draft")
    try:
        with open(draft, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in _lines(log))
            file.flush()
            os.fsync(file.fileno())
        if read_log(draft) != log:
            raise ValueError("the log reads otherwise than it was written: its steps must be in the requests' order")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _lines(log: Log) -> list[dict]:
    lines = [{"type": "header", "format": FORMAT, "version": VERSION, "counts": counts(log)} | asdict(log.header)]
    of = defaultdict(list)
    for kind, entries in (("request", log.requests), ("step", log.steps), ("commit", log.commits)):
        for entry in entries:
            of[entry.request].append({"type": kind} | asdict(entry))
    return lines + [line for request in sorted(of) for line in of[request]]


def read_log(path: Path) -> Log:
    """Reads a log.

    Raises:
        ValueError: a line that is no JSON, of an unknown kind or version, or with a field missing, unknown, of the
            wrong type or of the wrong length, or that does not go with the lines before it; with the file's name and
            the line's number. Or there are other counts of them than the header says.
    """
    log, expected, number = None, {}, 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                if number == 1:
                    log, expected = _begun(parsed(line))
                else:
                    _add(log, parsed(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if log is None:
        raise ValueError(f"{path}, line 1: the file is empty, but a log begins with its header")
    if counts(log) != expected:
        raise ValueError(f"{path}: the header counts {expected}, but there are {counts(log)}: the log is not whole")
    return log


def _begun(entry: object) -> tuple[Log, dict]:
    """An empty log of a header, and what it says will follow."""
    if _kind_of(entry) != "header":
        raise ValueError(f"a {entry['type']} before the header")
    named = entry.get("format"), entry.get("version")
    if named != (FORMAT, VERSION):
        raise ValueError(f"format and version are {named}, but must be {(FORMAT, VERSION)}")
    fields_ = {name: value for name, value in entry.items() if name not in ("type", "format", "version", "counts")}
    log, expected = Log(_checked(Header, fields_), [], [], []), entry.get("counts")
    _check_header(log.header)
    if not isinstance(expected, dict) or set(expected) != set(counts(log)):
        raise ValueError(f"`counts` is {expected!r}, but must have {', '.join(counts(log))}")
    return log, expected


def _kind_of(entry: object) -> str:
    kind = entry.get("type") if isinstance(entry, dict) else entry
    if not isinstance(entry, dict) or kind not in KINDS:
        raise ValueError(f"`type` is {repr(kind)[:60]}, but must be one of {', '.join(KINDS)}")
    return kind


def _add(log: Log, entry: object) -> None:
    """Adds one more line."""
    kind = _kind_of(entry)
    if kind == "header":
        raise ValueError("a second header")
    value = _checked(KINDS[kind], {name: item for name, item in entry.items() if name != "type"})
    if kind == "request":
        _check_request(value, log)
        log.requests.append(value)
        return
    if value.request != len(log.requests) - 1:
        raise ValueError(f"`request` is {value.request}, but a {kind} follows its request: {len(log.requests) - 1}")
    _check_block(value, log.header)
    if kind == "step":
        _check_step(value, log)
        log.steps.append(value)
    else:
        _check_commit(value, log)
        log.commits.append(value)


def _check_header(header: Header) -> None:
    model, algorithm = header.model, header.algorithm
    threshold = algorithm.get("threshold")
    needed = {
        "model": {
            "architectures": _all(model.get("architectures"), str),
            "fingerprint": isinstance(model.get("fingerprint"), str),
            "mask_token_id": are_tokens([model.get("mask_token_id")]),
            "eos_token_ids": are_tokens(model.get("eos_token_ids")),
        },
        "algorithm": {
            "name": isinstance(algorithm.get("name"), str),
            "threshold": type(threshold) in (int, float) and 0 <= threshold <= 1,
            "block_size": type(algorithm.get("block_size")) is int and algorithm["block_size"] >= 1,
        },
    }
    for name, conditions in needed.items():
        for key, holds in conditions.items():
            if not holds:
                raise ValueError(f"`{key}` is {getattr(header, name).get(key)!r} in `{name}`, but must be {WHAT[key]}")


WHAT = {
    "architectures": "a list of names",
    "fingerprint": "a text",
    "mask_token_id": "a token's id",
    "eos_token_ids": "a list of ids",
    "name": "a text",
    "threshold": "a number in [0, 1]",
    "block_size": "a whole number from 1 on",
}


def _all(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def are_tokens(value: object) -> bool:
    """Whether it is a list of what may be ids; whether a vocabulary has them is another question."""
    return _all(value, int) and all(0 <= token < 2**31 for token in value)


def _check_request(request: Request, log: Log) -> None:
    if request.request != len(log.requests):
        raise ValueError(f"`request` is {request.request}, but must be {len(log.requests)}: they are in order")
    for name in ("prompt", "output"):
        tokens = getattr(request, name)
        if not tokens or not are_tokens(tokens):
            raise ValueError(f"`{name}` is {str(tokens)[:60]}, but must be a list of ids, of at least one")
    budget = request.sampling.get("max_new_tokens")
    if type(budget) is not int or budget < len(request.output):
        raise ValueError(f"`max_new_tokens` is {budget!r}, but {len(request.output)} tokens are in the output")
    if not are_tokens(request.sampling.get("stop_token_ids") or []):
        raise ValueError(f"`stop_token_ids` is {request.sampling['stop_token_ids']!r}, but must be a list of ids")
    if type(request.sampling.get("ignore_eos", False)) is not bool:
        raise ValueError(f"`ignore_eos` is {request.sampling['ignore_eos']!r}, but must be true or false")
    if request.finish_reason not in FINISH_REASONS:
        raise ValueError(f"`finish_reason` is {request.finish_reason!r}, but must be {' or '.join(FINISH_REASONS)}")


def _check_block(entry: Step | Commit, header: Header) -> None:
    size = header.algorithm["block_size"]
    for field_ in fields(entry):
        value = getattr(entry, field_.name)
        if isinstance(value, list) and len(value) != size:
            raise ValueError(f"`{field_.name}` has {len(value)} entries, but must have the block's {size}")
        if field_.name in ("before", "after") and not are_tokens(value):
            raise ValueError(f"`{field_.name}` is {str(value)[:60]}, but must be a list of ids")
    if entry.block < 0 or entry.start != entry.block * size:
        raise ValueError(f"`start` is {entry.start}, but block {entry.block} starts at {entry.block * size}")


def _check_step(step: Step, log: Log) -> None:
    """A step has a decision where something is masked, changes nothing else and follows from the one before it."""
    prompt, mask = len(log.requests[step.request].prompt), log.header.model["mask_token_id"]
    last = log.steps[-1] if log.steps and log.steps[-1].request == step.request else None
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


def _check_commit(commit: Commit, log: Log) -> None:
    """What is stored of a block is what its last step left, or a prompt's own tokens, for which there was none."""
    ours = takewhile(lambda step: step.request == commit.request, reversed(log.steps))
    last = next((step for step in ours if step.block == commit.block), None)
    size, prompt = len(commit.tokens), log.requests[commit.request].prompt
    if last is None and commit.start + size > len(prompt):
        raise ValueError(f"a commit of block {commit.block}, which has no steps")
    expected = last.after if last else prompt[commit.start : commit.start + size]
    if commit.tokens != expected:
        raise ValueError(f"`tokens` of the commit is {commit.tokens}, but the block was left as {expected}")


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
