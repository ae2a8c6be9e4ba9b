"""Raw recordings of SGLang's engine, as its observing plugin and a script write them, made into logs.

A recording is one JSON object: versions, `engine_args`, `algorithm_config`, `runs` (request and response each, a batch
named as "batch of requests 1 and 2") and `steps`, the events of the plugin in the order in which they happened.
"""

import re
from pathlib import Path

from .fingerprint import config_of, describe, vocabulary_of
from .log import Commit, Header, Log, Request, Step


def convert(raw: dict, model: Path) -> Log:
    """The log of a raw recording.

    Args:
        raw: the recording. model: the checkpoint that SGLang ran, for its fingerprint and end tokens.
    Raises:
        ValueError: something is missing or does not fit together; nothing of a recording is left out in silence.
    """
    try:
        events = [event for event in raw["steps"] if event["event"] == "step"]
        requests, ids = _requests(raw["runs"])
        log = Log(_header(raw, model, {event["mask_id"] for event in events}), requests, [], [])
        _check_model(log, model)
        add_steps(log, events, ids)
    except KeyError as error:
        raise ValueError(f"the recording has no {error}") from None
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError(f"the recording is not as SGLang's observer writes it: {error}") from None
    return log


def _check_model(log: Log, model: Path) -> None:
    """A recording says little of its model, but another vocabulary or another mask token is not this one's."""
    mask, own, size = log.header.model["mask_token_id"], config_of(model).get("mask_token_id"), vocabulary_of(model)
    largest = max([mask, *(token for request in log.requests for token in request.prompt + request.output)])
    if size is not None and largest >= size:
        raise ValueError(f"the recording has the token {largest}, but {model} has {size}: it ran another model")
    if own not in (None, mask):
        raise ValueError(f"the recording has the mask token {mask}, but {model} has {own}: it ran another model")


def add_steps(log: Log, events: list[dict], ids: dict[str, int]) -> None:
    """Adds what the plugin's events tell. `ids` has the requests' numbers by SGLang's ids."""
    counts = {}
    for number, event in enumerate(events):
        for row, name in enumerate(event["rids"]):
            if name not in ids:
                raise ValueError(f"step {number} is of request {name!r}, which no response has")
            _add(log, ids[name], {key: event[key][row] for key in PER_ROW}, log.header.model["mask_token_id"], counts)
    for entries in (log.steps, log.commits):  # of a batch they come mixed
        entries.sort(key=lambda entry: entry.request)


PER_ROW = ("positions", "block_in", "block_out", "argmax", "confidence", "argmax_margin")


def _requests(runs: list[dict]) -> tuple[list[Request], dict[str, int]]:
    """The requests in order, and their numbers by SGLang's ids."""
    requests, ids = [], {}
    for run in runs:
        asked, answered = run["request"], run["response"]
        if isinstance(asked, str):  # a batch of what was asked alone before
            asked = [runs[int(number)]["request"] for number in re.findall(r"\d+", asked)]
        pairs = zip(asked, answered, strict=True) if isinstance(asked, list) else [(asked, answered)]
        for one, response in pairs:
            ids[response["meta_info"]["id"]] = len(requests)
            reason = response["meta_info"]["finish_reason"]["type"]
            prompt, sampling, output = one["input_ids"], one["sampling_params"], response["output_ids"]
            requests.append(Request(len(requests), prompt, sampling, output, reason))
    return requests, ids


def _header(raw: dict, model: Path, masks: set[int]) -> Header:
    if len(masks) != 1:
        raise ValueError(f"the recording has the mask tokens {sorted(masks)}, but must have one")
    arguments = dict(raw["engine_args"])
    return Header(
        engine={"name": "sglang"}
        | {name: raw[name] for name in ("torch", "transformers")}
        | {"version": raw["sglang"]},
        model=describe(model) | {"mask_token_id": masks.pop()},
        algorithm={"name": arguments["dllm_algorithm"]} | raw["algorithm_config"],
        dtype=arguments["dtype"],
        backend={"attention": arguments["attention_backend"], "device": arguments["device"]},
        seed=arguments["random_seed"],
        notes={"engine_args": arguments},
    )


def _add(log: Log, request: int, row: dict, mask: int, counts: dict[tuple[int, int], int]) -> None:
    """Adds what happened to one row in one step: a pass with nothing masked only stored the block."""
    size, start = log.header.algorithm["block_size"], row["positions"][0]
    block, prompt = start // size, len(log.requests[request].prompt)
    # A mask token of the prompt itself is text: SGLang protects it.
    masked = [token == mask and start + i >= prompt for i, token in enumerate(row["block_in"])]
    if not any(masked):
        log.commits.append(Commit(request, block, start, row["block_in"]))
        return
    step = counts.get((request, block), 0)
    counts[request, block] = step + 1
    hidden = [
        [value if is_masked else None for value, is_masked in zip(row[key], masked, strict=True)]
        for key in ("argmax", "confidence", "argmax_margin")
    ]
    log.steps.append(Step(request, block, step, start, row["block_in"], row["block_out"], *hidden))
