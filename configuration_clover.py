# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
# Extends the configuration of Qwen3.5-MoE, Copyright 2025 The Qwen Team and The HuggingFace Inc. team.
"""CloverConfig: what the model is.

Everything that Qwen3.5-MoE's text configuration says, and three things more: the block, the mask token and the
expert coreset. How a block is decoded (threshold, budget, ...) is not here: see `generation_clover.py`.
"""

from huggingface_hub.dataclasses import strict
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raises a `ValueError` that names the field, the value it has and what it may be."""
    if not condition:
        raise ValueError(f"`{field}` is {value!r}, but must be {allowed}.")


@strict
class CloverConfig(Qwen3_5MoeTextConfig):
    r"""
    Configuration of a `CloverForDiffusionLM`.

    Args:
        block_size (`int`, *optional*, defaults to 32):
            Positions that are denoised together; blocks lie on a grid anchored at a row's first real token.
        mask_token_id (`int`, *optional*):
            The token that stands for "not yet decided". `mask_id` is another name for it. The 35B's id is not
            publicly known, so its `config.json` leaves it unset: such a model runs causally, and its denoising
            loop says how to set it.
        expert_coreset_top_p (`float`, *optional*):
            If set, a denoising pass routes a block's tokens only to the smallest set of experts that carries this
            share, in (0, 1], of the block's routing mass (dMoE, arXiv 2605.30876). Unset: exact per-token routing.
        kwargs:
            Every argument of `Qwen3_5MoeTextConfig`.

    Raises:
        ValueError: an argument has a value outside what is allowed, or `mask_id` contradicts `mask_token_id`.
    """

    model_type = "clover_moe"
    attribute_map = {"mask_id": "mask_token_id"}

    block_size: int = 32
    mask_token_id: int | None = None
    expert_coreset_top_p: float | int | None = None

    def __post_init__(self, **kwargs):
        kwargs.pop("model_type", None)  # a Qwen3.5-MoE's config.json describes a Clover, and must not rename it
        if "mask_id" in kwargs:
            mask_id = kwargs.pop("mask_id")
            agree = self.mask_token_id is None or mask_id is None or self.mask_token_id == mask_id
            require(agree, "mask_id", mask_id, f"equal to `mask_token_id` ({self.mask_token_id}): they are one field")
            self.mask_token_id = mask_id if self.mask_token_id is None else self.mask_token_id
        super().__post_init__(**kwargs)
        require(self.block_size >= 1, "block_size", self.block_size, "an integer of at least 1")
        in_vocabulary = self.mask_token_id is None or 0 <= self.mask_token_id < self.vocab_size
        require(in_vocabulary, "mask_token_id", self.mask_token_id, f"null or in [0, {self.vocab_size})")
        top_p = self.expert_coreset_top_p
        require(top_p is None or 0 < top_p <= 1, "expert_coreset_top_p", top_p, "null or in (0, 1]")


__all__ = ["CloverConfig"]
