"""Small random Clovers for tests of generation, loaded as a user loads one: from a directory, with remote code.

Their weights are drawn so that a block depends on everything a Clover looks at, confidences spread over (0, 1), and
an answer is not one token over and over. `test_generate.py` checks that.
"""

import functools
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from clover import CloverConfig, CloverForDiffusionLM

VOCAB, MASK, PAD = 48, 47, 0


def draw(seed: int = 0, **changes) -> CloverForDiffusionLM:
    """A Clover of one GDN and one attention layer; `changes` are of its config."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
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
        "block_size": 8,
        "mask_token_id": MASK,
        "pad_token_id": PAD,
    }
    torch.manual_seed(seed)
    model = CloverForDiffusionLM(CloverConfig(**sizes | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "conv_right" in name or "conv1d" in name:
                parameter.normal_(0, 0.5)
            elif parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif "bd_softmax" in name:
                parameter.add_(torch.rand_like(parameter))
        model.model.embed_tokens.weight.normal_()
        model.model.embed_tokens.weight[model.config.mask_token_id] *= (
            0.05  # what a masked position sees of its context decides its token
        )
        model.lm_head.weight.normal_(0, 0.6)
    return model


@functools.cache
def small_clover(seed: int = 0, **changes) -> CloverForDiffusionLM:
    """The same, saved and loaded. Shared between tests: leave it as it is."""
    with tempfile.TemporaryDirectory() as folder:
        draw(seed, **changes).save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(Path(folder), trust_remote_code=True).eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens, neither pad nor mask."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(1, MASK, (length,), generator=generator).tolist()


def left_padded(prompts: list[list[int]], pad: int = PAD) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of prompts of unequal lengths."""
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(row)) + row for row in prompts]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
