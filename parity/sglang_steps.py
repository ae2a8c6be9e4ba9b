"""The steps that the observing plugin (`sglang_observer/`) wrote in a server, brought together with the answers."""

import json
from pathlib import Path

from .log import Log
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
                event = json.loads(line)
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


def add_observed(log: Log, events: list[dict], ids: dict[str | None, int]) -> None:
    """Adds steps and commits, but for those of a prompt's whole blocks: what is cached of a prompt is not passed again,
    which says nothing of the request and something of those before it.

    Raises:
        ValueError: a request's steps do not lead to its answer; one of them may be missing.
    """
    add_steps(log, events, ids)
    size = log.header.algorithm["block_size"]
    log.commits = [c for c in log.commits if c.start + size > len(log.requests[c.request].prompt)]
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
