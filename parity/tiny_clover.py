"""The tiny Clovers that SGLang wrote `logs/sglang-*-clover-*.jsonl` with, rebuilt from their seed as checkpoints.

One has full attention only, the other Gated DeltaNet layers too. The rest is a Clover's: gated attention, rotary
positions on a part of each head, experts and a shared expert, blocks, a mask token.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..configuration_clover import CloverConfig
from ..modeling_clover import CloverForDiffusionLM

VOCAB, MASK, EOS, BLOCK = 160, 159, 150, 8
HEAD_SCALE = 0.8  # some confidences are above 0.6, some blocks have none
KINDS = {"attention": ["full_attention"] * 2, "hybrid": ["linear_attention", "full_attention", "linear_attention"]}
SIZES = {
    "model_type": "clover_moe",
    "architectures": ["CloverForDiffusionLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}


def write_tiny_clover(folder: Path, kind: str) -> Path:
    """A checkpoint of one of `KINDS` with the weights that its log was recorded with: the same draws in the same order.

    Norms are drawn too: SGLang and transformers both add 1 to their weights. The mask token's embedding is weak, so
    that what a masked position sees of its context decides its token; its row of the head is zero, so that it is never
    the likeliest. Written by hand and not by `save_pretrained`, whose config.json is not the same in every version.
    """
    generator, sizes = (
        torch.Generator().manual_seed(0),
        SIZES | {"layer_types": KINDS[kind], "num_hidden_layers": len(KINDS[kind])},
    )
    with torch.device("meta"):
        shapes = CloverForDiffusionLM(CloverConfig(**sizes)).state_dict()
    weights = {}
    for name, shape in sorted((name, tensor.shape) for name, tensor in shapes.items()):
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.2
        weights[name] = torch.randn(shape, generator=generator) * scale + ("bd_softmax" in name)
    weights["model.embed_tokens.weight"] *= sizes["hidden_size"] ** 0.5
    weights["model.embed_tokens.weight"][MASK] *= 0.05
    weights["lm_head.weight"] *= sizes["hidden_size"] ** 0.5 * HEAD_SCALE
    weights["lm_head.weight"][MASK] = 0
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes, indent=1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
