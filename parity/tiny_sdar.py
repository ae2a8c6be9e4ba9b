"""The tiny SDAR that SGLang wrote `logs/sglang-*-sdar-*.jsonl` with, rebuilt from its seed as a checkpoint."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 151_672, 32, 2, 4, 2, 16, 64
MASK, EOS, LIVE = 151_669, 150, slice(100, 164)  # only these tokens have a head row that is not zero
LM_SCALE = 1.2
CONFIG = {
    "architectures": ["SDARForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": MLP,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
}


def write_tiny_sdar(folder: Path) -> Path:
    """A checkpoint with the weights that the logs were recorded with: the same draws in the same order."""
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
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
