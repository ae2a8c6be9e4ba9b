"""What tells one checkpoint from another: a hash of its config and of every weight."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open

IGNORED = ("transformers_version", "auto_map", "dtype", "torch_dtype")  # say how a model is loaded, not which it is


def fingerprint(folder: Path) -> str:
    """sha256 over config.json's fields and over name, type, shape and bytes of each tensor, in order of names.

    Raises:
        FileNotFoundError: no config.json, or no safetensors file.
    """
    digest = hashlib.sha256()
    config = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in IGNORED}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no safetensors file.")
    places = {}
    for path in files:
        with safe_open(path, "pt") as file:
            places |= dict.fromkeys(file.keys(), path)
    for name in sorted(places):
        with safe_open(places[name], "pt") as file:
            tensor = file.get_tensor(name).contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return "sha256:" + digest.hexdigest()


def describe(folder: Path) -> dict:
    """What a log's header says of a checkpoint, but for the mask token: architectures, fingerprint, end tokens."""
    config = json.loads((folder / "config.json").read_text())
    eos = config.get("eos_token_id")
    return {
        "architectures": config["architectures"],
        "fingerprint": fingerprint(folder),
        "eos_token_ids": eos if isinstance(eos, list) else [] if eos is None else [eos],
    }
