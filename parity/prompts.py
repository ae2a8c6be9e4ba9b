"""Requests to record, an object a line: `{"input_ids": [...]}` or `{"prompt": "..."}`, and `"sampling_params": {}`."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .fingerprint import vocabulary_of
from .json_text import parsed

ALLOWED = ("input_ids", "prompt", "sampling_params")
DEFAULTS = {"temperature": 0}


def read_requests(path: Path, model: Path, max_new_tokens: int) -> list[dict]:
    """What to ask, `input_ids` and `sampling_params` each, with everything in it that the log has to say.

    Texts are tokenized as they stand, by the checkpoint's tokenizer. `max_new_tokens` is of lines that say nothing.

    Raises:
        ValueError: a line that cannot be asked or could not be logged; with its number.
    """
    vocabulary, tokenizer, requests = vocabulary_of(model), None, []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            entry = _checked(parsed(line))
            if "prompt" in entry:
                tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
            ids = _ids_of(entry, tokenizer, vocabulary)
            requests.append({"input_ids": ids, "sampling_params": _sampling_of(entry, max_new_tokens)})
        except (ValueError, OSError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not requests:
        raise ValueError(f"{path} holds no prompts")
    return requests


def _checked(entry: object) -> dict:
    if not isinstance(entry, dict) or len({"input_ids", "prompt"} & set(entry)) != 1:
        raise ValueError("there must be `input_ids`, a list of numbers, or a `prompt`, a text, and not both")
    unknown = sorted(set(entry) - set(ALLOWED))
    if unknown:
        raise ValueError(f"unknown field `{unknown[0]}`; there are {', '.join(ALLOWED)}")
    return entry


def _ids_of(entry: dict, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int | None) -> list[int]:
    if "prompt" in entry:
        if not isinstance(entry["prompt"], str) or not entry["prompt"]:
            raise ValueError(f"`prompt` is {str(entry['prompt'])[:60]!r}, but must be a text")
        ids = tokenizer.encode(entry["prompt"], add_special_tokens=False)
        if not ids:
            raise ValueError("the checkpoint's tokenizer makes no tokens of the `prompt`: has it a vocabulary?")
    else:
        ids = entry["input_ids"]
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise ValueError(f"`input_ids` is {str(ids)[:60]}, but must be a list of numbers, of at least one")
    if not all(0 <= token < (vocabulary or 2**31) for token in ids):
        raise ValueError(f"a token is outside the vocabulary of {vocabulary}")
    return ids


def _sampling_of(entry: dict, max_new_tokens: int) -> dict:
    given = entry.get("sampling_params", {})
    if not isinstance(given, dict):
        raise ValueError(f"`sampling_params` is {given!r}, but must be an object")
    sampling = {"max_new_tokens": max_new_tokens} | DEFAULTS | given
    budget = sampling["max_new_tokens"]
    if type(budget) is not int or budget < 1:
        raise ValueError(f"`max_new_tokens` is {budget!r}, but must be a number of at least 1")
    if sampling.get("n", 1) != 1:
        raise ValueError(f"`n` is {sampling['n']!r}, but a request has one answer in a log")
    return sampling
