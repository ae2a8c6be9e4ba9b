"""Opens a checkpoint as a block model, whichever kind it is."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ..generation_clover import BlockModel
from .fingerprint import config_of
from .sdar import UncachedSdar

SDAR = {"SDARForCausalLM"}
CLOVER = {"CloverForDiffusionLM", "CloverMoeModelLM"}


def open_model(folder: Path, block_size: int, dtype: str = "float32", device: str = "cpu", **options) -> BlockModel:
    """The model of a folder behind the loop's three verbs; `architectures` in its config.json tells which it is.

    Args:
        options: of `from_pretrained`, for instance `attn_implementation`, `experts_implementation`.
    Raises:
        ValueError: another architecture, or a checkpoint that cannot be loaded.
    """
    names, kind = set(config_of(folder).get("architectures") or []), getattr(torch, dtype)
    if not names & (CLOVER | SDAR):
        raise ValueError(f"`architectures` is {sorted(names)}, but must name one of {sorted(CLOVER | SDAR)}.")
    try:
        if names & CLOVER:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=kind, **options).to(device).eval()
        return _open_sdar(folder, block_size, device, dtype=kind, **options)
    except (SafetensorError, RuntimeError) as error:  # weights that are damaged, or of another shape
        raise ValueError(f"{folder} cannot be loaded: {error}") from error


def _open_sdar(folder: Path, block_size: int, device: str, **options) -> UncachedSdar:
    fields = {k: value for k, value in config_of(folder).items() if k not in ("architectures", "model_type")}
    sdar = Qwen3ForCausalLM.from_pretrained(folder, config=Qwen3Config(**fields), **options)
    return UncachedSdar(sdar.to(device).eval(), block_size)


def check_device(name: str) -> None:
    """Raises a `ValueError` if nothing can be computed there."""
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"`--device` is {name!r}, but nothing can be computed there: {error}") from None


def backend_of(model: BlockModel) -> dict[str, str]:
    """What a model runs with: its implementations of attention and experts, and the device."""
    inner = model.model if isinstance(model, UncachedSdar) else model
    found = {"attention": inner.config._attn_implementation, "device": inner.device.type}
    experts = getattr(inner.config, "_experts_implementation", None)
    return found | ({"experts": experts} if experts else {})
