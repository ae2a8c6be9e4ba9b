"""The folder that a conversion makes: who may write to it, and its shards, each written whole or not at all."""

import json
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from .conversion_source import Stored, demand, read_json

RECORD = "conversion.json"  # beside a Clover: what the way back needs to know
PARTIAL = "conversion.partial.json"  # there while the folder is not finished: of what it is, and with which options
VOCABULARY = ("vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json")
SPARE = 64 * 2**20  # bytes of disk for all that is no shard


@dataclass(frozen=True)
class Planned:
    """A tensor to write: one of the source, cut or grown to `shape`, with one row set; or `value`, a new one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: Stored | None = None
    row: tuple[int, torch.Tensor] | None = None  # its index and (H,)
    value: torch.Tensor | None = None


@dataclass
class Result:
    """What the new folder is to hold, and what there is to tell of it."""

    config: PreTrainedConfig
    generation: dict | None
    tokenizer: PreTrainedTokenizerFast | None
    tensors: dict[str, Planned]
    vocabulary: tuple[int, int]  # before and after
    record: dict | None = None  # of a Clover: what the way back needs to know
    forget: int | None = None  # the token that the tokenizer loses
    notes: list[str] = field(default_factory=list)


def keep_record(source: Path, target: Path) -> None:
    """What a conversion noted beside a model, for the way back, put beside what was trained of it too."""
    if (source / RECORD).is_file() and source.resolve() != target.resolve():
        shutil.copyfile(source / RECORD, target / RECORD)


def check_target(target: Path, identity: dict) -> None:
    """Raises a `ValueError` unless `target` is new, or a half-done conversion of the same source and options."""
    if not target.exists():
        return
    demand(target.is_dir(), f"{target} is a file.")
    if (target / PARTIAL).exists():
        begun = read_json(target / PARTIAL)
        is_same = begun == identity
        of = "another source" if begun.get("source") != identity["source"] else f"other options: {begun.get('options')}"
        demand(is_same, f"{target} is a half-done conversion of {of}. Remove it, or choose another folder.")
    else:
        others = [path.name for path in target.iterdir() if path.suffix != ".new"]
        demand(not others, f"{target} exists and is no half-done conversion. Remove it, or choose another folder.")


def check_space(target: Path, size: int) -> None:
    free = shutil.disk_usage(next(path for path in (target, *target.absolute().parents) if path.exists())).free
    needed = size + SPARE
    demand(free >= needed, f"{target} needs {needed:,} bytes, and its disk has {free:,} free.")


def write_json(path: Path, content: dict) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(new, path)


def load(planned: Planned, files: dict[Path, safe_open]) -> torch.Tensor:
    """The tensor to write: a view of the source's file, if nothing of it changes."""
    if planned.origin is None:
        return planned.value
    tensor = files[planned.origin.file].get_tensor(planned.origin.name)
    if planned.row is None and planned.shape == planned.origin.shape:
        return tensor
    changed = tensor.new_empty(planned.shape)
    kept = min(len(changed), len(tensor))
    changed[:kept] = tensor[:kept]
    if planned.row is not None:
        changed[planned.row[0]] = planned.row[1]
    return changed


def write_shard(path: Path, planned: dict[str, Planned]) -> bool:
    """Writes a file of tensors unless it is there already; True if it wrote. Raises if it then does not read back."""
    new = path.with_name(path.name + ".new")
    with ExitStack() as stack:
        sources = {p.origin.file for p in planned.values() if p.origin is not None}
        files = {file: stack.enter_context(safe_open(file, "pt")) for file in sources}
        tensors = {name: load(p, files) for name, p in planned.items()}
        if path.exists() and holds(path, tensors):
            return False
        save_file(tensors, new, metadata={"format": "pt"})
        shutil.copymode(path.parent / PARTIAL, new)  # safetensors lets the owner alone read its files
        demand(holds(new, tensors), f"{new} does not read back as it was written: is the disk sound?")
        os.replace(new, path)
    return True


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def holds(path: Path, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether a file holds exactly these tensors, bit by bit."""
    try:
        with safe_open(path, "pt") as file:
            if {*file.keys()} != {*tensors}:
                return False
            pairs = ((file.get_tensor(name), tensor) for name, tensor in tensors.items())
            return all(a.dtype == b.dtype and torch.equal(bits(a), bits(b)) for a, b in pairs)
    except SafetensorError:  # cut short
        return False


def write_rest(target: Path, result: Result) -> None:
    """Tokenizer, code, and configs; config.json last, so that nothing loads a folder that is not complete."""
    if result.tokenizer is not None:
        result.tokenizer.padding_side = "left"  # generation of either kind needs it
        result.tokenizer.save_pretrained(target)
        if result.forget is not None:
            forget_token(target, result.forget)
    if result.record is not None:
        for file in Path(__file__).parents[1].glob("*_clover.py"):
            shutil.copyfile(file, target / file.name)
        write_json(target / RECORD, result.record)
    if result.generation is not None:
        write_json(target / "generation_config.json", result.generation)
    result.config.save_pretrained(target)


def not_carried(source: Path) -> list[str]:
    """Files of the source that no model or tokenizer is read from, such as its licence."""
    known = ("*.safetensors*", "*config.json", "tokenizer*", "chat_template*", "*.py", RECORD, *VOCABULARY)
    return sorted(p.name for p in source.iterdir() if p.is_file() and not any(map(p.match, known)))


def split_differs(folder: Path, tokenizer: PreTrainedTokenizerFast | None) -> list[str]:
    """A note, if AutoTokenizer replaces the split pattern of a Qwen3.5 folder's tokenizer.json by Qwen's own."""
    if tokenizer is None:
        return []
    read = AutoTokenizer.from_pretrained(folder).backend_tokenizer.pre_tokenizer
    if str(read) == str(tokenizer.backend_tokenizer.pre_tokenizer):
        return []
    return [
        f"AutoTokenizer splits texts in {folder} by Qwen's pattern, as it does for this model type, not by "
        f"the one in its tokenizer.json: load that with PreTrainedTokenizerFast. Clovers keep the tokenizer.json's"
    ]


def forget_token(folder: Path, id: int) -> None:
    """Takes the mask token out of a saved tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = read_json(folder / name)
        content.pop("mask_token", None)
        if "added_tokens" in content:
            content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] != id]
        write_json(folder / name, content)
