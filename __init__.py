# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
"""Clover: a block-diffusion language model.

Importing this package tells transformers' Auto classes about it. They then load any `clover_moe` checkpoint with the
installed code, whatever code lies beside it, and `trust_remote_code` is not needed. What is saved afterwards carries
its code along, so that it also loads where this package is not installed.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_clover import CloverConfig
from .generation_clover import CloverGenerationConfig
from .modeling_clover import CloverForDiffusionLM

AutoConfig.register(CloverConfig.model_type, CloverConfig, exist_ok=True)
AutoModel.register(CloverConfig, CloverForDiffusionLM, exist_ok=True)
AutoModelForCausalLM.register(CloverConfig, CloverForDiffusionLM, exist_ok=True)
CloverConfig.register_for_auto_class()
CloverForDiffusionLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["CloverConfig", "CloverForDiffusionLM", "CloverGenerationConfig"]
