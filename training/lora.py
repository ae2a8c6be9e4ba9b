"""LoRA for a Clover, through PEFT: every matrix of the layers, the fused experts too.

What makes a Clover of an autoregressive model is small and new: the right taps, the calibrations and the mask token's
embedding. These are trained whole, beside the adapters, and saved in `added.safetensors`.
"""

import hashlib
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ..modeling_clover import CloverForDiffusionLM

ADDED = ("conv_right_weight", "bd_softmax_logit_scale", "bd_softmax_history_bias", "bd_softmax_history_c")
FILE = "added.safetensors"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
SHARED_EXPERT = ("gate_proj", "up_proj", "down_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")  # parameters (E, out, in), not modules


def with_lora(model: CloverForDiffusionLM, rank: int, alpha: int, dropout: float = 0.0) -> PeftModel:
    """The model with adapters; they and the added tensors are what is trained.

    Raises:
        ValueError: `dropout` above 0, which PEFT has not for the fused experts.
    """
    if dropout:
        raise ValueError(f"`lora_dropout` is {dropout}, but must be 0: PEFT has none for parameters, as experts are")
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=[*ATTENTION, *DELTA_NET, *SHARED_EXPERT],
        target_parameters=list(EXPERTS),
        trainable_token_indices={"embed_tokens": [model.config.mask_token_id]},
    )
    stamp = base_stamp(model)
    adapted = get_peft_model(model, config)
    adapted.base_stamp = stamp
    for _, parameter in added_parameters(adapted):
        parameter.requires_grad_(True)
    return adapted


def added_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The added tensors, by the names that they have without PEFT."""
    prefix = "base_model.model."
    return [(n.removeprefix(prefix), p) for n, p in model.named_parameters() if n.rsplit(".", 1)[-1] in ADDED]


def base_stamp(model: nn.Module) -> str:
    """What tells one base model from another: a digest of every tensor's name, shape and first values."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        first = [] if parameter.is_meta else parameter.detach().flatten()[:16].float().cpu().tolist()
        digest.update(repr((name, tuple(parameter.shape), first)).encode())
    return digest.hexdigest()


def save_added(model: nn.Module, folder: Path) -> None:
    """Saves the added tensors of a PEFT model; of another they are in its own file."""
    if isinstance(model, PeftModel):
        tensors = {name: p.detach().cpu().contiguous() for name, p in added_parameters(model)}
        save_file(tensors, folder / FILE, metadata={"base": model.base_stamp})


def load_added(model: nn.Module, folder: Path) -> None:
    """Loads them.

    Raises:
        ValueError: the file's tensors are not the model's, or were trained beside another base.
    """
    if not isinstance(model, PeftModel):
        return
    with safe_open(folder / FILE, "pt") as file:
        base = (file.metadata() or {}).get("base")
    if base != model.base_stamp:
        raise ValueError(f"{folder} was trained on another model than this")
    tensors, parameters = load_file(folder / FILE), dict(added_parameters(model))
    if set(tensors) != set(parameters):
        raise ValueError(f"{folder / FILE} has not the added tensors of this model: {set(tensors) ^ set(parameters)}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def merged(base: CloverForDiffusionLM, adapter: Path) -> CloverForDiffusionLM:
    """The model with what was trained added to its weights; no PEFT is needed to use it."""
    stamp = base_stamp(base)
    model = PeftModel.from_pretrained(base, adapter)
    model.base_stamp = stamp
    load_added(model, adapter)
    return model.merge_and_unload()
