# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
# Subclasses the text model of SGLang 0.5.23's qwen3_5.py and qwen3_5_text.py, Copyright the SGLang and Qwen teams,
# Apache-2.0.
"""Clover in SGLang: its Qwen3.5-MoE, whose EXTEND passes are causal and whose DLLM_EXTEND passes denoise a block."""

from collections.abc import Iterable

import torch
from sglang.kernels.ops.attention.fla import layernorm_gated
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models import qwen2_moe, qwen3_5, qwen3_5_text
from sglang.srt.utils import cpu_has_amx_support, is_cpu

from .gdn import SglangCloverGatedDeltaNet
from .weights import checked

# The layers ask the config's `model_type` whether they have experts.
qwen3_5._QWEN3_5_MOE_TEXT_MODEL_TYPES += ("clover_moe",)


def add_gated(hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, routed: torch.Tensor) -> None:
    """Adds the shared expert's output (N, D), gated, to that of the routed ones, in place; `gate` is (D,)."""
    routed += (hidden @ gate).sigmoid()[:, None] * shared


if is_cpu() and not cpu_has_amx_support():
    # The two places that take a CPU without AMX for a GPU and launch a Triton kernel.
    qwen2_moe.fused_gate_sigmoid_mul_add = add_gated
    layernorm_gated._use_cpu = True  # its operator is among the stand-ins of `site_cpu`


class CloverAttentionDecoderLayer(qwen3_5.Qwen3_5AttentionDecoderLayer):
    def self_attention(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """SGLang's backends read the kind of attention off the layer; what is no decoder sees its block both ways."""
        denoising = forward_batch.forward_mode.is_dllm_extend()
        self.attn.attn_type = AttentionType.ENCODER_ONLY if denoising else AttentionType.DECODER
        return super().self_attention(positions, hidden_states, forward_batch)


class CloverLinearDecoderLayer(qwen3_5.Qwen3_5LinearDecoderLayer):
    def __init__(self, config, layer_id: int, quant_config=None, prefix: str = "", alt_stream=None, **kwargs):
        super().__init__(config, layer_id, quant_config, prefix, alt_stream, **kwargs)
        self.linear_attn = SglangCloverGatedDeltaNet(config, layer_id, quant_config, alt_stream, prefix)


class CloverModel(qwen3_5.Qwen3_5MoeForCausalLM):
    """The trunk (its name in SGLang notwithstanding)."""

    decoder_layer_types = {"attention": CloverAttentionDecoderLayer, "linear_attention": CloverLinearDecoderLayer}


class CloverForDiffusionLM(qwen3_5_text.Qwen3_5MoeForCausalLM):
    body_cls = CloverModel

    def __init__(self, config, quant_config=None, prefix: str = ""):
        if config.expert_coreset_top_p is not None:
            raise NotImplementedError("`expert_coreset_top_p` is set, but SGLang's experts are routed exactly here.")
        super().__init__(config, quant_config, prefix)
        self.logits_processor = LogitsProcessor(config, return_full_logits=True)
        self.is_mrope_enabled = False  # text has one row of positions

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch, **kwargs
    ) -> object | None:
        """Logits of every position of the blocks; none of a causal pass, which only writes its states."""
        if forward_batch.forward_mode.is_dllm_extend():
            return super().forward(input_ids, positions, forward_batch, **kwargs)
        self.model(input_ids, positions, forward_batch)
        return None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As the parent's, which leaves what a checkpoint lacks as it was allocated.

        Raises:
            ValueError: the checkpoint lacks something; without quantisation also: it holds more, or other shapes.
        """
        # Quantised tensors have other names and shapes, by method.
        loaded = super().load_weights(checked(weights, self.config) if self.quant_config is None else weights)
        missing = {name for name, _ in self.named_parameters()} - loaded
        if missing:
            raise ValueError(f"The checkpoint lacks {len(missing)} of Clover's parameters, such as {min(missing)}.")
        return loaded


class CloverMoeModelLM(CloverForDiffusionLM):
    """The architecture's name in the vendor's config.json."""


EntryClass = [CloverForDiffusionLM, CloverMoeModelLM]
