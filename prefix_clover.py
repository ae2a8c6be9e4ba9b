# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
# The layer that does not store extends transformers' DynamicLayer, Copyright The HuggingFace Inc. team.
"""The clean prefix of a block: a cache that a denoising pass reads and does not advance."""

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from .configuration_clover import require

if TYPE_CHECKING:
    from .modeling_clover import CloverForDiffusionLM


class PrefixAttentionLayer(DynamicLayer):
    """Keys and values of the clean prefix. `update` returns [prefix | block] and stores nothing."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        return torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)


def known_tokens(cache: Cache) -> int:
    """How many tokens a cache holds, padding included: of an attention layer, whose count is a shape.

    Since transformers 5.25 the first layer answers for the cache; where that is a GDN layer, the count is a tensor, and
    reading it would wait for the device.
    """
    layer = next((layer for layer in cache.layers if not isinstance(layer, LinearAttentionLayer)), cache)
    return int(layer.get_seq_length())


def set_count(layer: LinearAttentionLayer, tokens: int) -> None:
    """Tells a GDN layer how many tokens its states are of, where it counts: since transformers 5.25."""
    if hasattr(layer, "cumulative_length_linear"):
        layer.cumulative_length_linear.fill_(tokens)


def select_rows(cache: Cache, rows: torch.Tensor) -> Cache:
    """A cache of some rows of `cache`, or of rows repeated; `rows` are indices (b,). Copies; `cache` is unchanged."""
    layers = []
    for layer in cache.layers:
        selected = type(layer)()
        if isinstance(layer, LinearAttentionLayer):
            if layer.has_previous_state[0]:
                conv_states, recurrent_states = layer.conv_states[0][rows], layer.recurrent_states[0][rows]
                selected.lazy_initialization(conv_states=conv_states, recurrent_states=recurrent_states)
                selected.conv_states[0], selected.recurrent_states[0] = conv_states, recurrent_states
                selected.has_previous_state[0] = True
                set_count(selected, known_tokens(cache))
        elif layer.is_initialized:
            keys, values = layer.keys[rows], layer.values[rows]
            selected.lazy_initialization(keys, values)
            selected.keys, selected.values = keys, values
        layers.append(selected)
    return Cache(layers=layers)


def read_only(cache: Cache) -> Cache:
    """What a denoising pass may see of a cache: attention layers that do not store, GDN layers that it only reads."""

    def view(layer):
        if isinstance(layer, LinearAttentionLayer):
            return layer
        kind = type(layer).__name__
        require(isinstance(layer, DynamicLayer), "past_key_values", kind, "a DynamicCache: no other is read so far")
        return PrefixAttentionLayer(layer.keys, layer.values) if layer.is_initialized else DynamicLayer()

    return Cache(layers=[view(layer) for layer in cache.layers])


@dataclass
class CloverPrefix:
    """The clean tokens before a block: their cache, their ids (B, P), and which of them are real tokens (B, P)."""

    cache: Cache
    mask: torch.Tensor
    ids: torch.Tensor
    owner: "weakref.ref[CloverForDiffusionLM]"  # whose keys, values and states these are

    def select(self, rows: torch.Tensor) -> "CloverPrefix":
        return replace(self, cache=select_rows(self.cache, rows), mask=self.mask[rows], ids=self.ids[rows])

    def packed(self) -> "CloverPrefix":
        """The same with every row's real tokens moved to the right, and no column without any; in place."""
        width = int(self.mask.sum(-1).max())
        columns = self.mask.bool().long().argsort(dim=-1, stable=True)[:, self.mask.shape[1] - width :]
        for layer in self.cache.layers:
            if isinstance(layer, LinearAttentionLayer):
                set_count(layer, width)
            elif layer.is_initialized:
                index = columns[:, None, :, None].expand(-1, layer.keys.shape[1], -1, layer.keys.shape[-1])
                layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)
        return replace(self, mask=self.mask.gather(1, columns), ids=self.ids.gather(1, columns))
