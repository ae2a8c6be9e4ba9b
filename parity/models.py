"""Opens a checkpoint as a block model, whichever kind it is."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ..generation_clover import BlockModel
from .sdar import UncachedSdar

SDAR = {"SDARForCausalLM"}
CLOVER = {"CloverForDiffusionLM", "CloverMoeModelLM"}


def open_model(folder: Path, block_size: int, dtype: str = "float32", device: str = "cpu", **options) -> BlockModel:
    """The model of a folder behind the loop's three verbs; `architectures` in its config.json tells which it is.

    Args:
        options: of `from_pretrained`, for instance `attn_implementation`, `experts_implementation`.
    Raises:
        ValueError: another architecture.
    """
    config = json.loads((folder / "config.json").read_text())
    names, kind = set(config.get("architectures") or []), getattr(torch, dtype)
    if names & CLOVER:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=kind, **options).to(device).eval()
    if names & SDAR:
        fields = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
        sdar = Qwen3ForCausalLM.from_pretrained(folder, config=Qwen3Config(**fields), dtype=kind, **options)
        return UncachedSdar(sdar.to(device).eval(), block_size)
    raise ValueError(f"`architectures` is {sorted(names)}, but must name one of {sorted(CLOVER | SDAR)}.")


def backend_of(model: BlockModel) -> dict[str, str]:
    """What a model runs with: its implementations of attention and experts, and the device."""
    inner = model.model if isinstance(model, UncachedSdar) else model
    found = {"attention": inner.config._attn_implementation, "device": inner.device.type}
    experts = getattr(inner.config, "_experts_implementation", None)
    return found | ({"experts": experts} if experts else {})
