"""An oracle for the objective: generation, replayed with the right answer, one block after another.

For each block of a document, in order, exactly as `generate()` would:

1. denoise: the block, with some of its answer masked, against the clean prefix in the cache -> cross entropy of the
   masked positions (BD3-LM, arXiv 2503.09573, its two streams; here the clean stream is the cache of generation);
2. commit: the causal pass over the clean block -> cross entropy of the next token, and the states of the next prefix.

So the noisy block meets the very prefix states that it meets when generating, by construction and not by a mask; the
gradient flows through those states into the clean stream. Rows of a batch hold the same number of blocks and are
padded on the right, which no earlier position can see.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from clover.modeling_clover import CACHE, CloverForDiffusionLM


@dataclass
class Batch:
    """Documents of equal numbers of blocks, and the noisy blocks that denoise their answers.

    clean: (B, N*T) token ids, right-padded. predict: (B, N*T) bool, positions whose token the causal loss predicts.
    For block n: rows[n]: (M_n,) the document of each noisy block; targets[n]: (M_n, T) the tokens the block is to
    become, padding after the answer's end; noisy[n]: (M_n, T) the same with masks; weights[n]: (M_n, T) loss weight,
    0 where nothing is masked.
    """

    clean: torch.Tensor
    predict: torch.Tensor
    rows: list[torch.Tensor]
    targets: list[torch.Tensor]
    noisy: list[torch.Tensor]
    weights: list[torch.Tensor]


class _GraphLinearLayer(LinearAttentionLayer):
    """A Gated DeltaNet layer's states as part of the autograd graph: assigned, where the parent copies in place."""

    def update_conv_state(self, conv_states, state_idx=0, conv_kernel_size=None, **kwargs):
        kernel = conv_kernel_size or self.conv_states[0].shape[-1]
        previous = self.conv_states[0] if self.has_previous_state[0] else F.pad(conv_states[..., :0], (kernel, 0))
        full = torch.cat([previous, conv_states], dim=-1)
        self.conv_states[0], self.has_previous_state[0] = full[..., -kernel:], True
        if hasattr(self, "cumulative_length_linear"):  # since transformers 5.25; the next block's positions follow it
            self.cumulative_length_linear += conv_states.shape[-1]
        return full

    def update_recurrent_state(self, recurrent_states, state_idx=0, **kwargs):
        self.recurrent_states[0] = recurrent_states
        return recurrent_states


def graph_cache(config) -> Cache:
    """An empty cache through which gradients flow."""
    kinds = {"linear_attention": _GraphLinearLayer, "full_attention": DynamicLayer}
    return Cache(layers=[kinds[kind]() for kind in config.layer_types])


def cache_rows(cache: Cache, rows: torch.Tensor) -> Cache:
    """The cache of some rows, differentiable; row indices (M,) may repeat."""
    layers = []
    for layer in cache.layers:
        selected = type(layer)()
        if isinstance(layer, LinearAttentionLayer):
            if layer.has_previous_state[0]:
                selected.conv_states[0] = layer.conv_states[0][rows]
                selected.recurrent_states[0] = layer.recurrent_states[0][rows]
                selected.has_previous_state[0] = True
        elif layer.is_initialized:
            selected.lazy_initialization(layer.keys, layer.values)
            selected.keys, selected.values = layer.keys[rows], layer.values[rows]
        layers.append(selected)
    return Cache(layers=layers)


def block_diffusion_loss(model: CloverForDiffusionLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Denoising loss (weighted mean over masked positions) and causal loss (mean over predicted positions)."""
    width = model.config.block_size
    cache = graph_cache(model.config)
    denoising, causal = [], []
    for n, block in enumerate(batch.clean.split(width, dim=1)):
        if len(batch.rows[n]):
            masked = batch.weights[n] > 0
            prefix = cache_rows(cache, batch.rows[n]) if n else None
            out = model(batch.noisy[n], is_causal=False, logits_to_keep=masked, **{CACHE: prefix})
            denoising.append((out.logits, batch.targets[n][masked], batch.weights[n][masked]))
        # The chunked kernel pads to whole chunks: with the default of 64 half of its work would be padding.
        hidden = model.model(block, chunk_size=width, **{CACHE: cache}).last_hidden_state
        following = batch.clean[:, n * width + 1 : (n + 1) * width + 1]  # one shorter in the last block
        counted = batch.predict[:, n * width + 1 : (n + 1) * width + 1]
        causal.append((hidden[:, : following.shape[1]][counted], following[counted]))
    logits, targets, weights = (torch.cat(parts) for parts in zip(*denoising, strict=True))
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    hidden, following = (torch.cat(parts) for parts in zip(*causal, strict=True))
    causal_loss = F.cross_entropy(model.lm_head(hidden).float(), following)
    return (losses * weights).sum() / weights.sum(), causal_loss
