# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
# The hooks stand around functions of SGLang 0.5.23, Copyright the SGLang team, Apache-2.0, and follow them.
"""What SGLang has to know of a Clover: its config, its blocks, its mask token."""

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import yaml
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.linear_attn_model_registry import LinearAttnModelSpec, register_linear_attn_model
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.qwen3_next import Qwen3NextConfig
from sglang.srt.dllm.config import DllmConfig
from sglang.srt.dllm.mixin.req import DllmReqPhase, ReqDllmMixin
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY

from ...configuration_clover import CloverConfig, require
from ...options_clover import validate_block_fields

ALGORITHM = "CloverLowConfidence"
ARCHITECTURES = ("CloverForDiffusionLM", "CloverMoeModelLM")
FIELDS = ("threshold", "block_size")  # of the file of `--dllm-algorithm-config`


class SglangCloverConfig(CloverConfig):
    """A `CloverConfig` that answers to the names which SGLang's Qwen3.5 code and memory pools read."""

    norm_topk_prob = True
    output_gate_type = None  # the gated norm's default, SiLU

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        # SGLang reads the field of the config's first level, transformers the one of the rotary parameters.
        self.partial_rotary_factor = self.rope_parameters.get("partial_rotary_factor", self.partial_rotary_factor)

    @property
    def layers_block_type(self) -> list[str]:
        return ["attention" if kind == "full_attention" else kind for kind in self.layer_types]

    @property
    def full_attention_layer_ids(self) -> list[int]:
        return [i for i, kind in enumerate(self.layer_types) if kind == "full_attention"]

    @property
    def linear_layer_ids(self) -> list[int]:
        return [i for i, kind in enumerate(self.layer_types) if kind == "linear_attention"]

    @property
    def full_attention_interval(self) -> int:
        """Read only to find the first attention layer, at or below this index minus one."""
        return min(self.full_attention_layer_ids, default=0) + 1

    mamba2_cache_params = Qwen3NextConfig.mamba2_cache_params  # shapes of the GDN states


def has_gdn_layers(config: SglangCloverConfig) -> bool:
    return bool(config.linear_layer_ids)


def dllm_config(original: Callable, server_args: Any) -> DllmConfig | None:
    """`DllmConfig.from_server_args`, whose table of architectures is a literal; for a Clover its config says it.

    Raises:
        ValueError: another algorithm, a config without a mask token, or settings that are none.
    """
    arguments = resolving_view(server_args)
    if arguments.dllm_algorithm is None:
        return original(server_args)
    config = ModelConfig.from_server_args(
        server_args, model_path=arguments.model_path, model_revision=arguments.revision
    ).hf_config
    name = (getattr(config, "architectures", None) or [""])[0]
    if name not in ARCHITECTURES:
        return original(server_args)
    if arguments.dllm_algorithm != ALGORITHM:
        raise ValueError(f"`--dllm-algorithm` is {arguments.dllm_algorithm!r}, but must be {ALGORITHM!r} for {name}.")
    if config.mask_token_id is None:
        raise ValueError("`mask_token_id` is null: set it, `--json-model-override-args '{\"mask_token_id\": N}'`.")
    # CloverConfig checks it as well, but not what `--json-model-override-args` sets.
    in_vocabulary = 0 <= config.mask_token_id < config.vocab_size
    require(in_vocabulary, "mask_token_id", config.mask_token_id, f"in [0, {config.vocab_size})")
    fields = read_fields(arguments.dllm_algorithm_config)
    block_size = fields.get("block_size", config.block_size)
    require(block_size >= 1, "block_size", block_size, "an integer of at least 1")
    return DllmConfig(
        algorithm=ALGORITHM,
        algorithm_config=fields,
        block_size=block_size,
        mask_id=config.mask_token_id,
        max_running_requests=arguments.max_running_requests or 1,
        first_done_first_out_mode=arguments.dllm_fdfo,
        requires_separate_context_encoding=True,
    )


def read_fields(path: str | None) -> dict[str, int | float]:
    """The settings in the YAML file of `--dllm-algorithm-config`, of which SGLang would check none.

    Raises:
        ValueError: the file holds no mapping, an unknown field or a value that is not allowed.
    """
    if path is None:
        return {}
    with open(path) as file:
        fields = yaml.safe_load(file)
    fields = {} if fields is None else fields  # an empty file
    require(isinstance(fields, dict), "--dllm-algorithm-config", fields, "a file with a mapping")
    for name, value in fields.items():
        if name not in FIELDS:
            raise ValueError(f"`{name}` is no field of {ALGORITHM}: there are {' and '.join(FIELDS)}.")
        require(value is not None, name, value, "left out or have a value")
    validate_block_fields(SimpleNamespace(**fields))
    return fields


def serves_clover(request: ReqDllmMixin) -> bool:
    return request.dllm_config is not None and request.dllm_config.algorithm == ALGORITHM


def fill_to_the_grid(original: Callable, request: ReqDllmMixin) -> None:
    """`_init_fill_ids_for_dllm`: what a request computes next is all that is known, filled up to a block with masks.

    SGLang's other model with a context pass begins its blocks where the prompt ends. Clover's lie on a grid from 0 on:
    a prompt of 10 tokens and blocks of 4 make the block `[p8, p9, MASK, MASK]`.
    """
    original(request)
    if not serves_clover(request) or request.dllm_incomplete_ids:
        return
    known, size = request.origin_input_ids + request.output_ids, request.dllm_config.block_size
    request.dllm_block_offset = len(known) // size * size
    masks = array("q", [request.dllm_config.mask_id]) * (request.dllm_block_offset + size - len(known))
    request.full_untruncated_fill_ids = known + masks


def start_phase(result: None, request: ReqDllmMixin, config: DllmConfig | None) -> None:
    """After `init_diffusion_llm`: a prompt shorter than a block has nothing to prefill."""
    if serves_clover(request) and len(request.origin_input_ids) < config.block_size:
        request.dllm_phase = DllmReqPhase.INCOMING_DECODE


def stash_context(original: Callable, scheduler: Any, request: ReqDllmMixin) -> None:
    """`_stash_dllm_context`, after a finished block: the keys of its denoising passes are freed, the context's stay.

    The block of a prompt shorter than it has no context, and SGLang does not take a row back that holds nothing. So
    the request gives its row and its GDN states back, as one that has not begun.
    """
    if not serves_clover(request) or request.dllm_block_offset > 0:
        return original(scheduler, request)
    request.kv.kv_committed_len = request.kv.kv_allocated_len
    release_kv_cache(request, scheduler.tree_cache, checkpoint=False)
    request.prefix_len = request.extend_end = 0


def register() -> None:
    _CONFIG_REGISTRY[CloverConfig.model_type] = SglangCloverConfig
    register_linear_attn_model(
        LinearAttnModelSpec(
            config_class=SglangCloverConfig,
            config_predicate=has_gdn_layers,
            backend_class_name="sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend",
            uses_mamba_radix_cache=True,  # it then gives a request's states back; the cache itself has to be off
        )
    )
    HookRegistry.register("sglang.srt.dllm.config.DllmConfig.from_server_args", dllm_config, HookType.AROUND)
    requests = "sglang.srt.dllm.mixin.req.ReqDllmMixin"
    HookRegistry.register(f"{requests}._init_fill_ids_for_dllm", fill_to_the_grid, HookType.AROUND)
    HookRegistry.register(f"{requests}.init_diffusion_llm", start_phase, HookType.AFTER)
    stash = "sglang.srt.dllm.mixin.scheduler.SchedulerDllmMixin._stash_dllm_context"
    HookRegistry.register(stash, stash_context, HookType.AROUND)
