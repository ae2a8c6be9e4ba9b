"""The steps that the observing plugin (`sglang_observer/`) wrote in a server, brought together with the answers."""

import json
from pathlib import Path

from .json_text import parsed
from .log import Commit, Log, Request
from .sglang_raw import PER_ROW, add_steps

SETTINGS = ("algorithm", "threshold", "block_size", "mask_id")


def read_steps(path: Path, ids: set[str | None]) -> list[dict]:
    """The events about the requests with these ids, in order.

    Others are left out: a server is warmed up, asked how it is, asked by others, and asked again where an answer was
    cut. So is what further tensor-parallel ranks wrote, who take every step too.

    Raises:
        ValueError: a line that is no event; with its number.
    """
    found, ranks = [], {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break  # it was being written when the server was killed, or is just now
            try:
                event = parsed(line)
                if event["event"] == "step":
                    found += part_of(event, ids, ranks)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: no step of the observer: {error!r}") from None
    return found


def part_of(event: dict, ids: set[str | None], ranks: dict[str, int]) -> list[dict]:
    """The event with only the rows about these requests, each of the first rank that told of it; none if none is."""
    rows = [
        row
        for row, name in enumerate(event["rids"])
        if name in ids and ranks.setdefault(name, event.get("rank", 0)) == event.get("rank", 0)
    ]
    if not rows:
        return []
    return [event | {key: [event[key][row] for row in rows] for key in ("rids", *PER_ROW)}]


def observed_settings(events: list[dict]) -> dict:
    """What all events say of the algorithm; nothing if there are none.

    Raises:
        ValueError: they say different things, as if the server had been started again with others.
    """
    said = {json.dumps([event[name] for name in SETTINGS]) for event in events}
    if len(said) > 1:
        raise ValueError(f"the steps are of servers with different settings ({', '.join(SETTINGS)}): {sorted(said)}")
    return dict(zip(SETTINGS, json.loads(said.pop()), strict=True)) if said else {}


def is_of_the_request(commit: Commit, request: Request, size: int) -> bool:
    """Whether the block is neither the prompt's alone nor has the answer's end."""
    return len(request.prompt) < commit.start + size < len(request.prompt) + len(request.output)


def add_observed(log: Log, events: list[dict], ids: dict[str | None, int]) -> None:
    """Adds steps and commits, but for those of which the request does not decide whether they are seen.

    What is cached of a prompt's whole blocks is not passed again, which says something of the requests before it. And
    the server answers without waiting for the pass that stores an answer's last block.

    Raises:
        ValueError: a request's steps do not lead to its answer; one of them may be missing.
    """
    add_steps(log, events, ids)
    size = log.header.algorithm["block_size"]
    log.commits = [commit for commit in log.commits if is_of_the_request(commit, log.requests[commit.request], size)]
    spelled = [{} for _ in log.requests]
    for step in log.steps:
        spelled[step.request] |= dict(enumerate(step.after, start=step.start))
    for request, tokens in zip(log.requests, spelled, strict=True):
        start = len(request.prompt)
        found = [tokens.get(position) for position in range(start, start + len(request.output))]
        if found != request.output:
            raise ValueError(
                f"request {request.request} was answered with {request.output}, but its steps lead to {found}: were "
                "they all observed, and is the file of steps the server's?"
            )
