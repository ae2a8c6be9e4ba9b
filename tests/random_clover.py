"""Random Clovers whose every part matters, for tests of the two passes.

transformers' own initialisation (0.02) would leave all effects under the tolerances. Here matrices keep the
scale of what they multiply, decays run from "forgets nothing" to "forgets at once", and no added tensor is
neutral. Sizes that could be confused (d_k and d_v, key and value heads) differ.
"""

from pathlib import Path

import torch
from transformers import DynamicCache

from clover import CloverConfig, CloverForDiffusionLM

ROOT = Path(__file__).parents[1]
CODE = tuple(sorted(path.name for path in ROOT.glob("*_clover.py")))
ADDED = ("conv_right_weight", "bd_softmax_logit_scale", "bd_softmax_history_bias", "bd_softmax_history_c")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    "mask_token_id": 63,
    "pad_token_id": 0,
}


def tiny_config(**changes) -> CloverConfig:
    return CloverConfig(**SIZES | changes)


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Draws all weights anew: of a Clover, or of the stock model, whose weights then are the same."""
    for name, weight in sorted(model.named_parameters()):
        torch.manual_seed(seed * 10_007 + sum(name.encode()))
        if name.endswith("A_log"):
            weight.uniform_(-4, 1)
        elif name.endswith("dt_bias"):
            weight.uniform_(-3, 0)
        elif "conv1d" in name or "conv_right" in name:
            weight.normal_(0, 0.4)
        elif "logit_scale" in name:
            weight.uniform_(1, 4)
        elif "history" in name:
            weight.uniform_(-0.5, 1)
        elif "linear_attn.norm" in name:
            weight.uniform_(0.5, 1.5)
        elif weight.ndim == 1:
            weight.normal_(0, 0.2)
        elif "embed_tokens" in name:
            weight.normal_(0, 1)
        else:
            weight.normal_(0, weight.shape[-1] ** -0.5)
    return model.eval()


def random_clover(seed: int = 0, **changes) -> CloverForDiffusionLM:
    return randomise(CloverForDiffusionLM(tiny_config(**changes)), seed)


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids (rows, length), none of them the pad or the mask token."""
    generator = torch.Generator().manual_seed(1 + seed)
    return torch.randint(1, 63, (rows, length), generator=generator)


@torch.no_grad()
def filled_cache(model, prefix: torch.Tensor, **inputs) -> DynamicCache:
    """The cache of a prefix (B, P), empty if P is 0."""
    cache = DynamicCache(config=model.config)
    if prefix.shape[1]:
        model(prefix, past_key_values=cache, use_cache=True, **inputs)
    return cache


def cached_tensors(cache: DynamicCache) -> dict[str, torch.Tensor]:
    """Every tensor that a cache holds, by layer and name."""
    found = {}
    for i, layer in enumerate(cache.layers):
        for name, held in vars(layer).items():
            for key, value in (held if isinstance(held, dict) else {"": held}).items():
                if isinstance(value, torch.Tensor):
                    found[f"{i}.{name}.{key}"] = value
    return found
