"""A checkpoint on disk as its headers describe it, checked before a byte of a tensor is read.

Qwen3.5-MoE text models in every layout of theirs: one safetensors file or several, fused experts or one tensor each,
alone or inside a multimodal checkpoint; and Clovers. Pickle is never read.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerFast

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEAD = "lm_head.weight"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
LEFT_OUT = ("model.visual.", "mtp.")  # what stock's Qwen3_5MoeForCausalLM does not read either
NOT_FIELDS = ("model_type", "architectures", "auto_map", "transformers_version")


def demand(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class Stored:
    """A tensor of the source: the file it lies in, its name there, its shape and dtype."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Source:
    """What is read of a checkpoint before any tensor: the fields of its text model's config, its headers, its words."""

    folder: Path
    fields: dict
    tensors: dict[str, Stored]  # by their names in a text model, in the order of the files
    left_out: Counter  # of tensors that are no part of the text model, by kind
    tokenizer: PreTrainedTokenizerFast | None
    generation: dict | None  # generation_config.json


def read_source(folder: Path, kinds: tuple[str, ...]) -> Source:
    """Reads everything but the tensors' data. `kinds` are the allowed model types.

    Raises:
        ValueError: a file is damaged, missing, pickle, or of another kind of model; it is named.
        FileNotFoundError: no config.json.
    """
    fields = read_fields(folder, kinds)
    tensors, left_out = text_tensors(read_headers(folder))
    generation = folder / "generation_config.json"
    generation = read_json(generation) if generation.exists() else None
    return Source(folder, fields, tensors, left_out, read_tokenizer(folder), generation)


def digest(source: Source) -> str:
    """What tells one source from another, short of its tensors' data, which every finished shard is compared with."""
    files = {stored.file for stored in source.tensors.values()}
    sizes = sorted((file.name, file.stat().st_size) for file in files)
    headers = [(name, s.name, s.file.name, s.shape, str(s.dtype)) for name, s in source.tensors.items()]
    words = source.tokenizer.backend_tokenizer.to_str() if source.tokenizer is not None else None
    parts = [source.fields, source.generation, sizes, headers, words]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    demand(isinstance(content, dict), f"{path} holds no JSON object.")
    return content


def read_fields(folder: Path, kinds: tuple[str, ...]) -> dict:
    """What config.json says of the text model, without what names its class."""
    whole = read_json(folder / "config.json")
    kind = whole.get("model_type")
    hint = " It is a Clover already." if kind == "clover_moe" else ""
    demand(kind in kinds, f"{folder}/config.json: model_type is {kind!r}, must be {' or '.join(kinds)}.{hint}")
    fields = whole
    if kind == "qwen3_5_moe":
        fields = whole.get("text_config")
        demand(isinstance(fields, dict), f"{folder}/config.json has no text_config.")
        tied = bool(whole.get("tie_word_embeddings") or fields.get("tie_word_embeddings"))
        dtype = {name: whole[name] for name in ("dtype", "torch_dtype") if name in whole}
        fields = dtype | fields | {"tie_word_embeddings": tied}
    return {name: value for name, value in fields.items() if name not in NOT_FIELDS}


def weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor, as the index says."""
    names = read_json(folder / INDEX).get("weight_map")
    well_formed = isinstance(names, dict) and all(isinstance(name, str) for name in names.values())
    demand(well_formed, f"{folder / INDEX} has no weight_map.")
    return names


def weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if (folder / INDEX).exists():
        names = sorted(set(weight_map(folder).values()))
        absent = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        demand(not absent, f"{folder / INDEX} names {', '.join(absent)}: not in its folder.")
        return [folder / name for name in names]
    pickles = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind))
    demand(not pickles, f"{folder}: {', '.join(pickles)}: pickle can run code and is not read; save it as safetensors.")
    raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}.")


def read_headers(folder: Path) -> dict[str, Stored]:
    """Every tensor in the folder, by its name there."""
    stored = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt") as file:
                parts = {name: file.get_slice(name) for name in sorted(file.keys())}
                kinds = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        for name, (shape, dtype) in kinds.items():
            demand(name not in stored, f"{name} is in {path.name} and in another file.")
            demand(dtype in DTYPES, f"{name} is {dtype}; only {', '.join(DTYPES)} are converted.")
            stored[name] = Stored(path, name, shape, DTYPES[dtype])
    if not (folder / SINGLE).exists():
        differing = sorted(stored.keys() ^ weight_map(folder).keys())
        demand(not differing, f"{folder / INDEX} and its files disagree about {', '.join(differing[:5])}.")
    return stored


def text_tensors(stored: dict[str, Stored]) -> tuple[dict[str, Stored], Counter]:
    """The text model's tensors by their names in it; and a count of all others, by kind."""
    text, left_out = {}, Counter()
    for name, tensor in stored.items():
        kind = next((prefix for prefix in LEFT_OUT if name.startswith(prefix)), None)
        if kind:
            left_out[kind + "*"] += 1
            continue
        own = "model." + name.removeprefix("model.language_model.") if ".language_model." in name else name
        demand(own not in text, f"{name} is there twice, with and without language_model.")
        text[own] = tensor
    return text, left_out


def expected_shapes(whole: dict[str, torch.Tensor], tied: bool, found: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """The shapes to be found, by name, of a model's state dict: experts fused or one by one, as the source has them."""
    shapes = {}
    for name, tensor in whole.items():
        place, _, kind = name.rpartition(".")
        if place.endswith("mlp.experts") and name not in found:
            experts, out, inside = tensor.shape  # gate_up_proj (E, 2 I, H) or down_proj (E, H, I)
            parts = {"down_proj": out} if kind == "down_proj" else {"gate_proj": out // 2, "up_proj": out // 2}
            for part, rows in parts.items():
                shapes |= {f"{place}.{e}.{part}.weight": (rows, inside) for e in range(experts)}
        elif not (name == HEAD and tied):
            shapes[name] = tuple(tensor.shape)
    return shapes


def check_tensors(found: dict[str, Stored], expected: dict[str, tuple[int, ...]]) -> None:
    """Raises a `ValueError` that names what is unknown, missing, or of another shape than config.json makes it."""
    wrong = [f"{name} is unknown to the model" for name in found if name not in expected]
    wrong += [f"{name} is missing" for name in expected if name not in found]
    for name in found.keys() & expected.keys():
        if found[name].shape != expected[name]:
            wrong.append(f"{name} is {found[name].shape}, but config.json makes it {expected[name]}")
    more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    demand(not wrong, "The weights do not fit config.json: " + "; ".join(wrong[:5]) + more + ".")


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer exactly as tokenizer.json has it; None without one.

    Not through AutoTokenizer: for Qwen3.5's model types it puts a split pattern of its own in the place of the file's.
    """
    if (folder / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    others = [name for name in ("tokenizer_config.json", "vocab.json") if (folder / name).exists()]
    demand(not others, f"{folder} has {' and '.join(others)}, but no tokenizer.json: save the tokenizer as one first.")
    return None


def rows_of(table: Stored, start: int, stop: int) -> torch.Tensor:
    """(stop - start, H); nothing else of the table is read."""
    with safe_open(table.file, "pt") as file:
        return file.get_slice(table.name)[start:stop].clone()  # the slice itself would keep the file mapped


def mean_row(table: Stored, count: int) -> torch.Tensor:
    """The mean (H,) of a table's first `count` rows, summed in fp64."""
    parts = (rows_of(table, i, min(i + 4096, count)).double().sum(0) for i in range(0, count, 4096))
    return (sum(parts) / count).to(table.dtype)
