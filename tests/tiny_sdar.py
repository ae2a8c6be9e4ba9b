"""The tiny SDAR that SGLang wrote the logs in `tests/data` with, rebuilt from its seed, behind the loop's three verbs.

Another model than Clover (Qwen3's layers, transformers' own), run another way: no cache, every pass is one forward
over everything so far with an explicit block-causal mask.
"""

from dataclasses import dataclass

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 151_672, 32, 2, 4, 2, 16, 64
MASK, LIVE = 151_669, slice(100, 164)  # only these tokens have a head row that is not zero
LM_SCALE = 1.2


def tiny_sdar() -> Qwen3ForCausalLM:
    """The weights that the logs were recorded with: the same draws in the same order."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, columns: int, scale: float | None = None) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (columns**-0.5 if scale is None else scale)

    weights = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN, 1.0), "model.norm.weight": torch.ones(HIDDEN)}
    weights["model.embed_tokens.weight"][MASK] *= 0.05
    for i in range(LAYERS):
        weights |= {
            f"model.layers.{i}.{name}": weight
            for name, weight in {
                "input_layernorm.weight": torch.ones(HIDDEN),
                "post_attention_layernorm.weight": torch.ones(HIDDEN),
                "self_attn.q_proj.weight": draw(HEADS * HEAD_DIM, HIDDEN),
                "self_attn.k_proj.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.v_proj.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.o_proj.weight": draw(HIDDEN, HEADS * HEAD_DIM),
                "self_attn.q_norm.weight": 2.5 * torch.ones(HEAD_DIM),
                "self_attn.k_norm.weight": torch.ones(HEAD_DIM),
                "mlp.gate_proj.weight": draw(MLP, HIDDEN),
                "mlp.up_proj.weight": draw(MLP, HIDDEN),
                "mlp.down_proj.weight": draw(HIDDEN, MLP),
            }.items()
        }
    weights["lm_head.weight"] = torch.zeros(VOCAB, HIDDEN)
    weights["lm_head.weight"][LIVE] = draw(LIVE.stop - LIVE.start, HIDDEN, LM_SCALE)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=MLP,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model.load_state_dict(weights, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are no weights
    return model.eval()


@dataclass
class Tokens:
    """The whole prefix: tokens (B, P), left-padded, and which of them are real."""

    ids: torch.Tensor
    real: torch.Tensor

    def select(self, rows: torch.Tensor) -> "Tokens":
        return Tokens(self.ids[rows], self.real[rows])


class UncachedSdar:
    """`prefill`, `denoise` and `commit`, where only `denoise` computes anything."""

    def __init__(self, model: Qwen3ForCausalLM, block_size: int):
        self.model, self.block_size = model, block_size

    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Tokens:
        return Tokens(input_ids, attention_mask.bool())

    def commit(self, prefix: Tokens, block: torch.Tensor) -> Tokens:
        real = torch.ones_like(block, dtype=torch.bool)
        return Tokens(torch.cat([prefix.ids, block], 1), torch.cat([prefix.real, real], 1))

    @torch.no_grad()
    def denoise(self, prefix: Tokens, block: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        text = self.commit(prefix, block)
        positions = (text.real.cumsum(-1) - 1).clamp(min=0)
        blocks = positions // self.block_size
        sees = (blocks[:, None, :] <= blocks[:, :, None]) & text.real[:, None, :]
        sees |= torch.eye(sees.shape[-1], dtype=torch.bool)  # a pad must see something
        mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[:, None]
        hidden = self.model.model(text.ids, attention_mask=mask, position_ids=positions, use_cache=False)[0]
        return self.model.lm_head(hidden[:, -block.shape[1] :][masked])
