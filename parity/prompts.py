"""Prompts to record, one JSON object a line: `{"input_ids": [...]}` or `{"prompt": "..."}`."""

import json
from pathlib import Path

from transformers import AutoTokenizer


def read_prompts(path: Path, model: Path) -> list[list[int]]:
    """Token ids of every line; texts are tokenized as they stand, by the checkpoint's tokenizer.

    Raises:
        ValueError: a line that is neither; with its number.
    """
    tokenizer, prompts = None, []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: no JSON: {error}") from None
        match entry:
            case {"input_ids": [_, *_] as ids} if all(type(token) is int for token in ids):
                prompts.append(ids)
            case {"prompt": str(text)} if text:
                tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
                prompts.append(tokenizer.encode(text, add_special_tokens=False))
            case _:
                raise ValueError(f"{path}, line {number}: neither `input_ids`, a list of numbers, nor a `prompt`")
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts
