"""What tells one checkpoint from another: a hash of its config and of every weight."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .json_text import parsed

IGNORED = ("transformers_version", "auto_map", "dtype", "torch_dtype")  # say how a model is loaded, not which it is


def fingerprint(folder: Path) -> str:
    """sha256 over config.json's fields and over name, type, shape and bytes of each tensor, in order of names.

    Raises:
        FileNotFoundError: no config.json, or no safetensors file.
        ValueError: one of them is damaged.
    """
    digest = hashlib.sha256()
    kept = {name: value for name, value in config_of(folder).items() if name not in IGNORED}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no safetensors file.")
    try:
        _add_weights(digest, files)
    except SafetensorError as error:
        raise ValueError(f"the weights in {folder} cannot be read: {error}") from None
    return "sha256:" + digest.hexdigest()


def _add_weights(digest: "hashlib._Hash", files: list[Path]) -> None:
    places = {}
    for path in files:
        with safe_open(path, "pt") as file:
            places |= dict.fromkeys(file.keys(), path)
    for name in sorted(places):
        with safe_open(places[name], "pt") as file:
            tensor = file.get_tensor(name).contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")


def config_of(folder: Path) -> dict:
    """What config.json says."""
    path = folder / "config.json"
    try:
        config = parsed(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no object")
    return config


def vocabulary_of(folder: Path) -> int | None:
    """How many tokens the checkpoint has, if its config says it."""
    config = config_of(folder)
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")


def describe(folder: Path) -> dict:
    """What a log's header says of a checkpoint, but for the mask token: architectures, fingerprint, end tokens."""
    config = config_of(folder)
    eos = config.get("eos_token_id")
    return {
        "architectures": config.get("architectures") or [],
        "fingerprint": fingerprint(folder),
        "eos_token_ids": eos if isinstance(eos, list) else [] if eos is None else [eos],
    }
