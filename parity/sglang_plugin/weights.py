# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
"""Whether a checkpoint is the model's, tensor by tensor.

SGLang's own loading does not say: it passes over what it does not know, a bias or a further layer too, cuts what is too
large, and does not miss one of several tensors that are one parameter in it, such as keys beside queries and values.
"""

import copy
import re
from collections.abc import Iterable, Iterator

import torch

from ...configuration_clover import CloverConfig
from ...modeling_clover import CloverForDiffusionLM

# What transformers leaves out of a Qwen3.5-MoE checkpoint too: the multi-token predictor and the vision model.
LEFT_OUT = re.compile(r"mtp\.|model\.visual\.")
# On a CPU SGLang pads these sizes, in the config itself, and leaves there what they were.
ORIGINALS = {
    "moe_intermediate_size": "original_moe_intermediate_size",
    "shared_expert_intermediate_size": "original_shared_expert_intermediate_size",
    "num_attention_heads": "original_num_attention_heads",
    "num_key_value_heads": "original_total_num_kv_heads",
}


def shapes_of(config: CloverConfig) -> dict[str, torch.Size]:
    """The tensors of a checkpoint whose experts are fused, as they are in memory."""
    config = copy.deepcopy(config)
    for name, original in ORIGINALS.items():
        setattr(config, name, getattr(config, original, getattr(config, name)))
    with torch.device("meta"):
        tensors = CloverForDiffusionLM(config).state_dict()
    return {name: tensor.shape for name, tensor in tensors.items()}


def of_each_expert(shapes: dict[str, torch.Size]) -> dict[str, torch.Size]:
    """The same with one tensor per expert and projection, as `save_pretrained` writes them."""
    split = {}
    for name, shape in shapes.items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts"):
            split[name] = shape
            continue
        experts, rows, columns = shape
        parts = ["gate_proj", "up_proj"] if last == "gate_up_proj" else [last]
        each = torch.Size([rows // len(parts), columns])
        split |= {f"{stem}.{i}.{part}.weight": each for i in range(experts) for part in parts}
    return split


def checked(weights: Iterable[tuple[str, torch.Tensor]], config: CloverConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors among `weights`, each checked as it passes.

    Raises:
        ValueError: one is no tensor of the model, or has another shape; at the end: one was missing.
    """
    fused = shapes_of(config)
    if config.tie_word_embeddings:
        del fused["lm_head.weight"]
    split, seen = of_each_expert(fused), set()
    for name, tensor in weights:
        if LEFT_OUT.match(name) or (config.tie_word_embeddings and name == "lm_head.weight"):
            continue
        shape = fused.get(name, split.get(name))
        if shape is None:
            raise ValueError(f"The checkpoint has {name}, which is no tensor of a Clover with this config.json.")
        if tensor.shape != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, but must be {tuple(shape)} with this config.json.")
        seen.add(name)
        yield name, tensor
    missing = min(fused.keys() - seen, split.keys() - seen, key=len)
    if missing:
        raise ValueError(f"The checkpoint lacks {len(missing)} of Clover's tensors, such as {min(missing)}.")
