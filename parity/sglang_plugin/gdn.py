# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
# Subclasses Qwen3_5GatedDeltaNet of SGLang 0.5.23, Copyright the SGLang and Qwen teams, Apache-2.0, and follows the
# order of operations of its constructor and forward.
"""The Gated DeltaNet's denoising pass inside SGLang. UNTESTED ON A GPU; see the package's docstring.

It is `CloverGatedDeltaNet._denoise` over SGLang's projections and SGLang's pool of states. The states are read and
never written, so each pass over a block starts from the same clean prefix. (SGLang's own GDN backend writes them in
place in every pass; it is called for causal passes only.)
"""

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.mamba.mamba import mamba_v2_sharded_weight_loader
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.model_loader.weight_utils import sharded_weight_loader
from sglang.srt.models.qwen3_5 import Qwen3_5GatedDeltaNet
from sglang.srt.runtime_context import linear_attn_parallel_group
from sglang.srt.utils import set_weight_attrs
from torch import nn
from torch.nn import functional as F

from ...modeling_clover import block_conv, block_softmax_mixer, l2norm


class SglangCloverGatedDeltaNet(Qwen3_5GatedDeltaNet):
    def __init__(self, config, layer_id: int, quant_config=None, alt_stream=None, prefix: str = ""):
        super().__init__(config, layer_id, quant_config, alt_stream, prefix)
        channels, heads = self.conv_dim // self.attn_tp_size, self.num_v_heads // self.attn_tp_size
        self.conv_right_weight = nn.Parameter(torch.empty(channels, self.conv_kernel_size - 1))
        sizes = [(self.key_dim, 0, False), (self.key_dim, 0, False), (self.value_dim, 0, False)]
        loader = mamba_v2_sharded_weight_loader(sizes, self.attn_tp_size, self.attn_tp_rank)
        set_weight_attrs(self.conv_right_weight, {"weight_loader": loader})
        for name in ("bd_softmax_logit_scale", "bd_softmax_history_bias", "bd_softmax_history_c"):
            parameter = nn.Parameter(torch.empty(heads, dtype=torch.float32))  # also where the model is in bf16
            loader = sharded_weight_loader(0, parallel_group=linear_attn_parallel_group())
            set_weight_attrs(parameter, {"weight_loader": loader})
            self.register_parameter(name, parameter)

    def forward(self, hidden_states: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """(N, D) of N tokens; a denoising pass has as many of each row: N = B * block_size."""
        if not forward_batch.forward_mode.is_dllm_extend():
            return super().forward(hidden_states, forward_batch)
        if not isinstance(hidden_states, torch.Tensor):
            raise NotImplementedError("Quantised hidden states: a Clover's denoising pass is written for plain ones.")
        rows, tokens = forward_batch.batch_size, hidden_states.shape[0]
        if tokens % rows or len(set(forward_batch.extend_seq_lens.tolist())) > 1:
            raise NotImplementedError(f"{tokens} tokens of {rows} rows: padded batches have no denoising pass here.")
        query, key, value, z, b, a = self.fix_query_key_value_ordering(*self._forward_input_proj(hidden_states))
        ring, state = self._prefix_states(forward_batch)
        mixed = torch.cat([x.reshape(rows, tokens // rows, -1) for x in (query, key, value)], dim=-1).mT  # (B, C, T)
        right = self.conv_right_weight.to(mixed.dtype)
        mixed = block_conv(mixed, ring.to(mixed.dtype), self.conv1d.weight.squeeze(1), right).mT
        sizes = [self.key_dim // self.attn_tp_size] * 2 + [self.value_dim // self.attn_tp_size]
        query, key, value = mixed.split(sizes, dim=-1)
        query, key = (x.unflatten(-1, (-1, self.head_k_dim)) for x in (query, key))
        value = value.unflatten(-1, (-1, self.head_v_dim))
        groups = value.shape[2] // key.shape[2]
        a, b = (x.float().view(rows, tokens // rows, -1) for x in (a, b))
        mixed = block_softmax_mixer(
            l2norm(query.float()).repeat_interleave(groups, dim=2),
            l2norm(key.float()).repeat_interleave(groups, dim=2),
            value,
            -self.A_log.float().exp() * F.softplus(a + self.dt_bias),
            F.logsigmoid(b),
            state,
            self.bd_softmax_logit_scale,
            self.bd_softmax_history_bias,
            self.bd_softmax_history_c,
        )  # (B, T, H, d_v)
        mixed = mixed.reshape(-1, self.head_v_dim).to(hidden_states.dtype)
        mixed = self.norm(mixed, z.reshape(-1, self.head_v_dim))
        return self.out_proj(mixed.view(tokens, -1))[0]

    def _prefix_states(self, forward_batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of what the rows' last causal pass left: (B, C, K-1) and (B, H, d_k, d_v); zeros without a prefix.

        SGLang's pool has the recurrent state as (slots, H, d_v, d_k).
        """
        backend = get_attn_backend()
        if not isinstance(backend, HybridLinearAttnBackend):
            raise NotImplementedError(f"{type(backend).__name__} holds no GDN states.")
        slots = backend.linear_attn_backend.forward_metadata.mamba_cache_indices.long()
        cache = backend.req_to_token_pool.mamba2_layer_cache(self.layer_id)
        has_prefix = (forward_batch.extend_prefix_lens > 0)[:, None, None]
        ring = cache.conv[0][slots] * has_prefix
        return ring, cache.temporal[slots].mT * has_prefix[..., None]
