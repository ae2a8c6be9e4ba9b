# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
# Subclasses Qwen3.5-MoE, Copyright 2025 The Qwen Team and The HuggingFace Inc. team; the denoising forward of the
# decoder layer and of the Gated DeltaNet follow the order of operations of their causal forwards.
"""Clover: Qwen3.5-MoE's text model, which also denoises a block of masked tokens.

One trunk, two passes, told apart by one argument that travels from `CloverForDiffusionLM.forward` down to the layers:

- `is_causal=True`, the default: exactly `Qwen3_5MoeForCausalLM`. It prefills the prompt and commits resolved blocks.
- `is_causal=False`, the denoising pass: its input is one block, which sees itself both ways and the clean prefix in
  the cache, and leaves the cache as it was.

What the denoising pass does differently, in the order in which a block meets it:

- GDN convolution: the causal taps run over [prefix | block] and a second, right branch looks ahead inside the block.
- GDN mixer: a softmax over the block plus one slot for all history, read from the prefix's recurrent state.
- full attention: every prefix key and every block key, at their true rotary positions.
- experts: exact routing, or routing inside the block's coreset of experts.

Publicly stated of the vendor's model: the trunk, the four added tensors per GDN layer (their names), the formula of
the convolution, that the mixer is "a block softmax with a history slot read from the clean state", and that routing
uses a coreset. Decided here, because nothing public settles it: the mixer's formula and the shapes of its three
tensors (`block_softmax_mixer`), how the coreset is chosen (`coreset_routing`), and that it is unset by default.

Experts run through transformers' registry (eager, grouped_mm, batched_mm). transformers looks for the text
"@use_experts_implementation" in this very file to learn that; without it remote code gets the slow loop, silently.
"""

import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeAttention,
    Qwen3_5MoeDecoderLayer,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeGatedDeltaNet,
    Qwen3_5MoePreTrainedModel,
    Qwen3_5MoeRMSNorm,
    Qwen3_5MoeSparseMoeBlock,
    Qwen3_5MoeTextModel,
    Qwen3_5MoeTextRotaryEmbedding,
    l2norm,
    torch_chunk_gated_delta_rule,
)
from transformers.utils import can_return_tuple

from .configuration_clover import CloverConfig, require
from .generation_clover import CACHE, CloverGenerationMixin
from .objective_clover import CloverTrainingOutput, Objective, Streams, block_diffusion_loss, clean_stream
from .prefix_clover import CloverPrefix, known_tokens, read_only

# transformers skips its own renaming of checkpoints for custom code: without this, per-expert and
# `model.language_model.` checkpoints would load with random experts.
register_checkpoint_conversion_mapping(
    CloverConfig.model_type, get_checkpoint_conversion_mapping("qwen3_5_moe_text"), overwrite=True
)


# ---- the denoising operators: pure functions -------------------------------------------------------------------------


def block_conv(block: torch.Tensor, ring: torch.Tensor, taps: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Depthwise convolution of a block: causal taps over [ring | block], right taps inside the block.

    `out[t] = SiLU(sum_{j<K} in[t+j] * taps[j] + sum_{1<=d<K} block[t+d] * right[d-1])`, `in = [ring | block]`; what
    lies beyond the block counts as zero. Source: the public description of the vendor's convolution; stated, not
    decided here. With `right` zero it is the causal convolution.

    Args:
        block: (B, C, T) raw inputs of the block.
        ring: (B, C, K-1) the last raw inputs of the clean prefix, zeros before a row's first token.
        taps: (C, K). right: (C, K-1).
    Returns:
        (B, C, T).
    """
    channels, kernel = taps.shape
    causal = F.conv1d(torch.cat([ring, block], dim=-1), taps[:, None], groups=channels)
    ahead = F.conv1d(F.pad(block[..., 1:], (0, kernel - 1)), right[:, None], groups=channels)
    return F.silu(causal + ahead)


def block_softmax_mixer(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    log_beta: torch.Tensor,
    state: torch.Tensor,
    logit_scale: torch.Tensor,
    history_bias: torch.Tensor,
    history_c: torch.Tensor,
) -> torch.Tensor:
    """Mixes a block with itself, both ways, and with the prefix's recurrent state; in fp32.

    Per value head, `G = cumsum(g)`, T positions:
        l[t, j]    = logit_scale * <q_t, k_j> + log(beta_j) - |G_t - G_j|     for every j of the block
        l[t, hist] = history_bias + history_c * log(T) + G_t
        p          = softmax([l[t, hist], l[t, :]])
        o_t        = (p[t, hist] * S^T q_t + sum_j p[t, j] v_j) / sqrt(d_k)
    The decay gates give the block its recency, beta keeps what the causal kernel would hardly write from being
    read, and log(T) lets the history slot weigh as much as the block whatever its size.

    Decided here, and only here. Should the vendor's weights turn out to want the plain form - logits
    `logit_scale * <q_t, k_j>` against `history_bias + history_c * log(T)` - drop `log_beta`, the distance term and
    `G_t`. `docs/decisions.md` has the ablation that chose this form.

    Args:
        query, key: (B, T, H, d_k), L2-normalised over d_k. value: (B, T, H, d_v).
        g: (B, T, H) log decay, <= 0. log_beta: (B, T, H) log of the write gate.
        state: (B, H, d_k, d_v) recurrent state S of the clean prefix, zeros if there is none.
        logit_scale, history_bias, history_c: (H,).
    Returns:
        (B, T, H, d_v), fp32.
    """
    query, key, value, g, log_beta = (x.transpose(1, 2).float() for x in (query, key, value, g, log_beta))
    length, dim = query.shape[-2:]
    decay = g.cumsum(-1)  # (B, H, T)
    distance = (decay[..., :, None] - decay[..., None, :]).abs()
    block_logits = logit_scale.float()[:, None, None] * (query @ key.mT) + log_beta[..., None, :] - distance
    calibration = history_bias.float() + history_c.float() * math.log(length)
    history_logits = (calibration[:, None] + decay)[..., None]  # (B, H, T, 1)
    weights = torch.cat([history_logits, block_logits], dim=-1).softmax(-1)
    mixed = weights[..., :1] * (query @ state.float()) + weights[..., 1:] @ value
    return (mixed * dim**-0.5).transpose(1, 2)


def coreset_routing(router_logits: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes every token of a block inside the block's coreset of experts (after dMoE, arXiv 2605.30876).

    The block's mass on an expert is the sum, over its tokens, of the router's probability where the expert is among
    the token's top k. The coreset is the smallest set of heaviest experts whose share reaches `top_p`, and at least
    `top_k` of them. Decided here: the vendor's code names the mechanism, not its formula.

    Args:
        router_logits: (B, T, E), one block a row. top_p: in (0, 1]. top_k: experts per token.
    Returns:
        weights (B, T, top_k), fp32, normalised over the chosen; expert indices (B, T, top_k).
    """
    probabilities = router_logits.softmax(-1, dtype=torch.float32)
    top_values, top_indices = probabilities.topk(top_k, dim=-1)
    mass = torch.zeros_like(probabilities[:, 0]).scatter_add_(1, top_indices.flatten(1), top_values.flatten(1))
    heaviest = mass.sort(dim=-1, descending=True, stable=True)
    share = heaviest.values / heaviest.values.sum(-1, keepdim=True)
    reached_before = share.cumsum(-1) - share
    keep = (reached_before < top_p) & (share > 0)
    keep[:, :top_k] = True
    in_coreset = torch.zeros_like(keep).scatter_(1, heaviest.indices, keep)  # (B, E)
    inside = router_logits.float().masked_fill(~in_coreset[:, None], float("-inf"))
    chosen, indices = inside.topk(top_k, dim=-1)  # of logits: probabilities may underflow to the zero of those outside
    return chosen.softmax(-1), indices


# ---- the modules: only what differs from Qwen3.5-MoE -----------------------------------------------------------------


class CloverGatedDeltaNet(Qwen3_5MoeGatedDeltaNet):
    """Gated DeltaNet with a denoising pass: four added tensors, a convolution and a mixer that look both ways."""

    def __init__(self, config: CloverConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # The names are the vendor's (its llama.cpp converter lists them), the shapes of the last three are ours.
        self.conv_right_weight = nn.Parameter(torch.zeros(self.conv_dim, self.conv_kernel_size - 1))
        fp32 = {"dtype": torch.float32}  # also where the model is made in half precision
        self.bd_softmax_logit_scale = nn.Parameter(torch.full((self.num_v_heads,), self.head_k_dim**0.5, **fp32))
        self.bd_softmax_history_bias = nn.Parameter(torch.zeros(self.num_v_heads, **fp32))
        self.bd_softmax_history_c = nn.Parameter(torch.ones(self.num_v_heads, **fp32))

    @force_accelerate_hooks("conv1d")  # the weight of conv1d is read here without calling conv1d
    def forward(
        self, hidden_states: torch.Tensor, is_causal: bool = True, streams: Streams | None = None, **kwargs
    ) -> torch.Tensor:
        if streams is not None:
            return self._both_streams(hidden_states, streams)
        if is_causal:
            return super().forward(hidden_states, **kwargs)
        return self._denoise(hidden_states, *self._prefix_states(hidden_states, kwargs[CACHE]))

    def _prefix_states(self, block: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The convolution's last inputs (B, C, K-1) and the recurrent state (B, H, d_k, d_v); zeros if no prefix."""
        if cache is not None and cache.has_previous_state(self.layer_idx):
            layer = cache.layers[self.layer_idx]  # it keeps K inputs, of which the convolution needs K-1
            return layer.conv_states[0][..., 1 - self.conv_kernel_size :], layer.recurrent_states[0]
        rows = block.shape[0]
        ring = block.new_zeros(rows, self.conv_dim, self.conv_kernel_size - 1)
        state = block.new_zeros(rows, self.num_v_heads, self.head_k_dim, self.head_v_dim, dtype=torch.float32)
        return ring, state

    def _denoise(self, hidden_states: torch.Tensor, ring: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        mixed = self.in_proj_qkv(hidden_states).mT  # (B, C, T)
        mixed = block_conv(
            mixed, ring.to(mixed.dtype), self.conv1d.weight.squeeze(1), self.conv_right_weight.to(mixed.dtype)
        ).mT
        query, key, value = self.heads(mixed, normed=True)
        mixed = block_softmax_mixer(
            query,
            key,
            value,
            self.log_decay(self.in_proj_a(hidden_states)),
            F.logsigmoid(self.in_proj_b(hidden_states).float()),
            state,
            self.bd_softmax_logit_scale,
            self.bd_softmax_history_bias,
            self.bd_softmax_history_c,
        )
        return self._gated_output(mixed, hidden_states)

    def heads(self, mixed: torch.Tensor, normed: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values (B, T, H, d) of the convolution's output (B, T, C), for each value head."""
        batch, length, _ = mixed.shape
        query, key, value = mixed.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        query, key = (x.reshape(batch, length, -1, self.head_k_dim) for x in (query, key))
        if normed:
            query, key = l2norm(query.float()), l2norm(key.float())
        groups = self.num_v_heads // self.num_k_heads
        query, key = query.repeat_interleave(groups, dim=2), key.repeat_interleave(groups, dim=2)
        return query, key, value.reshape(batch, length, -1, self.head_v_dim)

    def log_decay(self, a: torch.Tensor) -> torch.Tensor:
        """g (..., H) <= 0 of in_proj_a's output, in fp32."""
        return -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)

    def _gated_output(self, mixed: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the parent does with its kernel's output (B, T, H, d_v)."""
        z = self.in_proj_z(hidden_states).reshape(-1, self.head_v_dim)
        normed = self.norm(mixed.reshape(-1, self.head_v_dim).to(hidden_states.dtype), z)
        return self.out_proj(normed.reshape(*hidden_states.shape[:-1], -1))

    def _both_streams(self, hidden_states: torch.Tensor, streams: Streams) -> torch.Tensor:
        """Training: the clean stream causally, the noisy blocks each against the clean states before it."""
        clean, noisy = streams.split(hidden_states)  # (B, n, T, D), (B, m, T, D)
        inputs = self.in_proj_qkv(clean)
        rings = streams.rings(inputs, self.conv_kernel_size - 1).mT  # (B, n, C, K-1)
        mixed, states = clean_stream(self, clean, inputs, rings, streams)
        noisy_out = self._denoise(noisy.flatten(0, 1), streams.of_noisy(rings), streams.of_noisy(states))
        return streams.joined(self._gated_output(mixed, clean), noisy_out.unflatten(0, noisy.shape[:2]))

    def states_after(
        self, ring: torch.Tensor, state: torch.Tensor, projected: dict[str, torch.Tensor], counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The cache's states (B, C, K) and (B, H, d_k, d_v) after the first `counts` (B,), >= 1, of T tokens.

        `ring` and `state` are those before the T tokens, `projected` what a causal pass over all of them has computed:
        in_proj_qkv's (B, T, C), in_proj_a's and in_proj_b's (B, T, H). No projection is run again.
        """
        _, length, channels = projected["in_proj_qkv"].shape
        inputs = torch.cat([ring, projected["in_proj_qkv"].mT], dim=-1)  # (B, C, K-1+T)
        _, key, value = self.heads(F.silu(F.conv1d(inputs, self.conv1d.weight, groups=channels)).mT)
        dropped = (torch.arange(length, device=counts.device) >= counts[:, None])[..., None]
        _, state = torch_chunk_gated_delta_rule(
            key,  # in the place of queries, whose results are not used
            key,
            value,
            g=self.log_decay(projected["in_proj_a"]).masked_fill(dropped, 0),  # what is dropped decays nothing
            beta=projected["in_proj_b"].sigmoid().masked_fill(dropped, 0),  # and writes nothing
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        columns = counts[:, None, None] - 1 + torch.arange(self.conv_kernel_size, device=counts.device)
        return inputs.gather(-1, columns.expand(-1, channels, -1)), state


class CloverSparseMoeBlock(Qwen3_5MoeSparseMoeBlock):
    """The mixture of experts; with `expert_coreset_top_p` set, tokens are routed inside their block's coreset.

    In training the clean tokens come first and are routed exactly; of the rest each `block_size` are a block.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        expert_coreset_top_p: float | None = None,
        streams: Streams | None = None,
    ) -> torch.Tensor:
        if expert_coreset_top_p is None:
            return super().forward(hidden_states)
        batch, _, dim = hidden_states.shape
        flat = hidden_states.reshape(-1, dim)
        router_logits, weights, indices = (x.unflatten(0, (batch, -1)) for x in self.gate(flat))  # (B, L, E or k)
        clean, size = (streams.clean, streams.block_size) if streams else (0, hidden_states.shape[1])
        blocks = router_logits[:, clean:].unflatten(1, (-1, size)).flatten(0, 1)
        inside = coreset_routing(blocks, self.gate.top_k, expert_coreset_top_p)
        inside_weights, inside_indices = (x.reshape(batch, -1, self.gate.top_k) for x in inside)
        weights = torch.cat([weights[:, :clean], inside_weights.to(weights.dtype)], dim=1)
        indices = torch.cat([indices[:, :clean], inside_indices], dim=1)
        routed = self.experts(flat, indices.flatten(0, 1), weights.flatten(0, 1).to(router_logits.dtype))
        shared = F.sigmoid(self.shared_expert_gate(flat)) * self.shared_expert(flat)
        return (routed + shared).view(hidden_states.shape)


class CloverDecoderLayer(Qwen3_5MoeDecoderLayer):
    """A decoder layer of two passes: the causal one is the parent's, the denoising one, and training, are spelt out."""

    def __init__(self, config: CloverConfig, layer_idx: int):
        GradientCheckpointingLayer.__init__(self)  # the parent's would build its own mixer and experts
        self.hidden_size = config.hidden_size
        self.block_type = config.layer_types[layer_idx]
        if self.block_type == "linear_attention":
            self.linear_attn = CloverGatedDeltaNet(config, layer_idx)
        elif self.block_type == "full_attention":
            self.self_attn = Qwen3_5MoeAttention(config, layer_idx)
        self.mlp = CloverSparseMoeBlock(config)
        self.input_layernorm = Qwen3_5MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3_5MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        denoising: bool = False,
        prefix: Cache | None = None,  # not under the cache's name, which gradient checkpointing would set to None
        expert_coreset_top_p: float | None = None,
        streams: Streams | None = None,
        **kwargs,
    ) -> torch.Tensor:
        if not denoising:
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        cache = {CACHE: prefix}
        mixed = self.input_layernorm(hidden_states)
        if self.block_type == "linear_attention":
            mixed = self.linear_attn(mixed, is_causal=False, streams=streams, **cache)
        else:
            # Without a mask sdpa would fall back to a causal one; `is_causal=False` says that none is meant.
            mixed, _ = self.self_attn(mixed, position_embeddings, attention_mask, is_causal=False, **cache)
        hidden_states = hidden_states + mixed
        normed = self.post_attention_layernorm(hidden_states)
        return hidden_states + self.mlp(normed, expert_coreset_top_p=expert_coreset_top_p, streams=streams)


class CloverPreTrainedModel(Qwen3_5MoePreTrainedModel):
    config: CloverConfig
    _no_split_modules = ["CloverDecoderLayer"]
    _keep_in_fp32_modules_strict = ["bd_softmax_logit_scale", "bd_softmax_history_bias", "bd_softmax_history_c"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """The parent's initialisation; the added tensors start so that block and history weigh the same."""
        super()._init_weights(module)
        if isinstance(module, CloverGatedDeltaNet):
            init.zeros_(module.conv_right_weight)
            init.constant_(module.bd_softmax_logit_scale, module.head_k_dim**0.5)
            init.zeros_(module.bd_softmax_history_bias)
            init.ones_(module.bd_softmax_history_c)


class CloverModel(CloverPreTrainedModel, Qwen3_5MoeTextModel):
    """The trunk: Qwen3.5-MoE's text model over Clover's layers."""

    def __init__(self, config: CloverConfig):
        super(Qwen3_5MoeTextModel, self).__init__(config)  # past the parent's, which would build its own layers
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([CloverDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3_5MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3_5MoeTextRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        is_causal: bool = True,
        expert_coreset_top_p: float | None = None,
        streams: Streams | None = None,
        **kwargs,
    ):
        """As `Qwen3_5MoeTextModel.forward`; `CloverForDiffusionLM.forward` has the arguments of a denoising pass."""
        cache = past_key_values if cache is None else cache
        if streams is not None:
            coreset = {"expert_coreset_top_p": self.config.expert_coreset_top_p}
            denoising = {"denoising": True, "streams": streams} | coreset
        elif is_causal:
            require(
                expert_coreset_top_p is None,
                "expert_coreset_top_p",
                expert_coreset_top_p,
                "null in a causal pass: only a denoising pass has a coreset",
            )
            denoising = {}
        else:
            if inputs_embeds is None:
                input_ids, inputs_embeds = None, self.embed_tokens(input_ids)
            prefix, cache = (read_only(cache) if cache is not None else None), None
            if position_ids is None:
                past = known_tokens(prefix) if prefix is not None else 0
                position_ids = (past + torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device))[None]
            attention_mask = self._block_mask(inputs_embeds, attention_mask, prefix)
            if expert_coreset_top_p is None:
                expert_coreset_top_p = self.config.expert_coreset_top_p
            in_range = expert_coreset_top_p is None or 0 < expert_coreset_top_p <= 1
            require(in_range, "expert_coreset_top_p", expert_coreset_top_p, "null or in (0, 1]")
            # Not under the name `is_causal`: transformers' decorator writes that into the config while a pass runs,
            # and another thread's causal pass would read it there.
            denoising = {"denoising": True, "prefix": prefix, "expert_coreset_top_p": expert_coreset_top_p}
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache if is_causal else False,
            **{CACHE: cache},
            **denoising,
            **kwargs,
        )

    def _block_mask(
        self, block: torch.Tensor, prefix_mask: torch.Tensor | None, cache: Cache | None
    ) -> dict[str, torch.Tensor | None]:
        """Masks by layer type: every query of the block sees the whole block and the prefix's real tokens."""
        if prefix_mask is not None:
            is_tensor = isinstance(prefix_mask, torch.Tensor)
            require(is_tensor, "attention_mask", type(prefix_mask).__name__, "a (B, P) tensor in a denoising pass")
            shape, prefix = tuple(prefix_mask.shape), known_tokens(cache) if cache is not None else 0
            fits = shape == (block.shape[0], prefix)
            require(fits, "attention_mask", shape, f"{(block.shape[0], prefix)}: a denoising pass masks its prefix")
            left_padded = bool((prefix_mask.long().diff(dim=-1) >= 0).all())
            require(left_padded, "attention_mask", "padded after real tokens", "padded on the left only")
            prefix_mask = F.pad(prefix_mask.bool(), (0, block.shape[1]), value=True)  # the block is never padded
        mask = create_bidirectional_mask(self.config, block, prefix_mask, **{CACHE: cache})
        return {"full_attention": mask, "linear_attention": None}


class CloverForDiffusionLM(CloverGenerationMixin, CloverPreTrainedModel, Qwen3_5MoeForCausalLM):
    """A block-diffusion language model: `generate()` denoises block after block; the causal pass is a language model.

    Denoising logits at position i are of position i itself; causal logits at i are of position i+1.

    `objective` is what `forward(input_ids, labels=...)` minimises: see `objective_clover.py`.
    """

    objective = Objective()

    def __init__(self, config: CloverConfig):
        super(Qwen3_5MoeForCausalLM, self).__init__(config)  # past the parent's, which would build its own trunk
        self.model = CloverModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.num_experts = config.num_experts
        self.num_experts_per_tok = config.num_experts_per_tok
        self.post_init()

    def load_adapter(self, peft_model_id: str | None = None, *args, **kwargs):
        """transformers' own, which would load half of what `training/lora.py` trained, and call it whole."""
        is_half = peft_model_id is not None and (Path(peft_model_id) / "added.safetensors").is_file()
        merge = "merged into its base, by `python -m clover.training merge`"
        require(not is_half, "adapter", str(peft_model_id), merge)
        return super().load_adapter(peft_model_id, *args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cache: Cache | None = None,
        is_causal: bool | None = None,
        expert_coreset_top_p: float | None = None,
        **kwargs,
    ) -> MoeCausalLMOutputWithPast | CloverTrainingOutput:
        """One pass. The arguments not named here are those of `Qwen3_5MoeForCausalLM.forward`.

        With `labels`, and nothing said of `is_causal`, this is training: see `block_diffusion_loss` for the arguments
        and for what comes back. With `is_causal=True` the loss is the autoregressive one.

        Args:
            is_causal (`bool`, defaults to True without `labels`): False is a denoising pass over one block per row.
            input_ids: (B, T); in a denoising pass one block, usually of `block_size` positions, any T >= 1.
            attention_mask: causal: (B, P+T), left-padded. Denoising: (B, P), the padding of the prefix in the
                cache; the block itself is never padded.
            position_ids: (B, T); by default, as in transformers, the columns after those in the cache.
            past_key_values, or cache: the clean prefix. A denoising pass reads it and leaves it as it was.
            logits_to_keep: an int or 1-D index as in transformers, or, in a denoising pass, a bool mask (B, T).
            expert_coreset_top_p: overrides the config's, in a denoising pass.
        Returns:
            `logits` (B, T', V), or (mask.sum(), V) for a bool mask. Causal logits at i predict token i+1,
            denoising logits at i predict token i.
        Raises:
            ValueError: `labels` in a denoising pass; a mask that does not fit the prefix or pads on the right.
        """
        cache = past_key_values if cache is None else cache
        if labels is not None and is_causal is None:
            follows = {"past_key_values": cache, "inputs_embeds": inputs_embeds, "position_ids": position_ids}
            for name, value in follows.items():
                require(value is None, name, type(value).__name__, "null in training, where it follows from the rest")
            kwargs |= {"output_router_logits": output_router_logits}
            return block_diffusion_loss(self, input_ids, labels, attention_mask, **kwargs)
        is_causal = is_causal is not False
        inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, CACHE: cache}
        inputs |= {"attention_mask": attention_mask, "position_ids": position_ids}
        if is_causal:
            return super().forward(
                **inputs,
                labels=labels,
                use_cache=use_cache,
                output_router_logits=output_router_logits,
                logits_to_keep=logits_to_keep,
                **({} if expert_coreset_top_p is None else {"expert_coreset_top_p": expert_coreset_top_p}),
                **kwargs,
            )
        require(
            labels is None, "labels", "a tensor", "null in a denoising pass: without `is_causal` they are trained on"
        )
        outputs = self.model(
            **inputs,
            is_causal=False,
            expert_coreset_top_p=expert_coreset_top_p,
            output_router_logits=output_router_logits,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if isinstance(logits_to_keep, torch.Tensor) and logits_to_keep.dtype == torch.bool:
            hidden_states = hidden_states[logits_to_keep]
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            hidden_states = hidden_states[:, kept]
        return MoeCausalLMOutputWithPast(
            logits=self.lm_head(hidden_states),
            **{CACHE: cache},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )

    # ---- the three verbs of the generation loop ----

    def prefill(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, prefix: CloverPrefix | None = None
    ) -> CloverPrefix:
        """The prefix of left-padded prompts (B, P), by one causal pass; P may be 0.

        With the `prefix` of an earlier answer, which is left as it is, only the columns after its own are run.
        """
        if prefix is None:
            nothing = (attention_mask[:, :0], input_ids[:, :0])
            prefix = CloverPrefix(DynamicCache(config=self.config), *nothing, weakref.ref(self))
        else:
            prefix = prefix.select(torch.arange(len(input_ids), device=input_ids.device))
        known = prefix.ids.shape[1]
        if known == input_ids.shape[1]:
            return prefix
        return self._advance(prefix, input_ids[:, known:], attention_mask[:, known:])[0]

    def denoise(self, prefix: CloverPrefix, block: torch.Tensor, masked: torch.Tensor, **options) -> torch.Tensor:
        """Logits (N, V) of the N masked positions of blocks (B, T); the prefix is left as it is."""
        positions = prefix.mask.sum(-1, keepdim=True) + torch.arange(block.shape[1], device=block.device)
        outputs = self(
            block,
            attention_mask=prefix.mask,
            position_ids=positions,
            is_causal=False,
            logits_to_keep=masked,
            **{CACHE: prefix.cache},
            **options,
        )
        return outputs.logits

    def commit(self, prefix: CloverPrefix, block: torch.Tensor) -> CloverPrefix:
        """The prefix with resolved blocks (B, T) added, by one causal pass; the cache is advanced in place."""
        return self._advance(prefix, block, torch.ones_like(block))[0]

    def verify(
        self, prefix: CloverPrefix, block: torch.Tensor
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], CloverPrefix]]:
        """Causal logits (B, T, V) of blocks (B, T), and a function of counts (B,) to the prefix with so many of them.

        The Gated DeltaNet's state cannot be rolled back: it is computed anew from the one before the block and from
        what this pass has projected. The cache is advanced in place.
        """
        layers = [module for module in self.modules() if isinstance(module, CloverGatedDeltaNet)]
        before = [[x.clone() for x in layer._prefix_states(block, prefix.cache)] for layer in layers]
        projected, hooks, caller = [{} for _ in layers], [], threading.get_ident()

        def keep(name: str, results: dict, output: torch.Tensor) -> None:
            if threading.get_ident() == caller:  # the modules are shared, and so are the hooks on them
                results[name] = output

        for layer, results in zip(layers, projected, strict=True):
            for name in ("in_proj_qkv", "in_proj_a", "in_proj_b"):
                hook = lambda _, inputs, output, name=name, results=results: keep(name, results, output)  # noqa: E731
                hooks.append(getattr(layer, name).register_forward_hook(hook))
        try:
            advanced, hidden_states = self._advance(prefix, block, torch.ones_like(block))
        finally:
            for hook in hooks:
                hook.remove()

        def keep_first(counts: torch.Tensor) -> CloverPrefix:
            for layer, states, results in zip(layers, before, projected, strict=True):
                cached = advanced.cache.layers[layer.layer_idx]
                cached.conv_states[0], cached.recurrent_states[0] = layer.states_after(*states, results, counts)
            new = torch.arange(block.shape[1], device=block.device) < counts[:, None]
            mask = torch.cat([prefix.mask, new.to(prefix.mask.dtype)], dim=1)
            return replace(advanced, mask=mask).packed()

        return self.lm_head(hidden_states), keep_first

    def _advance(
        self, prefix: CloverPrefix, tokens: torch.Tensor, token_mask: torch.Tensor
    ) -> tuple[CloverPrefix, torch.Tensor]:
        """The prefix with tokens (B, T) added, and their hidden states (B, T, D)."""
        mask = torch.cat([prefix.mask, token_mask], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        # The trunk alone: nobody asks for logits here, and the head is the largest matrix there is.
        inputs = {"attention_mask": mask, "position_ids": positions, CACHE: prefix.cache}
        advanced = replace(prefix, mask=mask, ids=torch.cat([prefix.ids, tokens], dim=1))
        return advanced, self.model(tokens, use_cache=True, **inputs).last_hidden_state


CloverMoeModelLM = CloverForDiffusionLM  # the architecture's name in the vendor's config.json

__all__ = ["CloverForDiffusionLM", "CloverModel", "CloverMoeModelLM", "CloverPreTrainedModel"]
