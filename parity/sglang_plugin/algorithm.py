# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
# Subclasses LowConfidence of SGLang 0.5.23, Copyright the SGLang team, Apache-2.0; `run` and `configure_server_args`
# follow those of its Gemma4Renoise, the other algorithm with a context pass.
"""SGLang's LowConfidence, with finished blocks encoded causally in a pass of their own."""

from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.dllm.algorithm import algo_name_to_cls
from sglang.srt.dllm.algorithm.base import DllmRunOutput
from sglang.srt.dllm.algorithm.low_confidence import LowConfidence
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner

from .config import ALGORITHM, ARCHITECTURES, SglangCloverConfig, has_gdn_layers

TOP_K_OF_GREEDY = 1  # what SGLang makes of temperature 0


class CloverLowConfidence(LowConfidence):
    supported_architectures = ARCHITECTURES
    requires_separate_context_encoding = True
    excludes_mask_token = True  # for the observer of steps: see `_step_past_the_mask_token`

    @classmethod
    def configure_server_args(cls, server_args: Any) -> None:
        """No radix cache: a prefix of it would have to bring its GDN states. No graphs: none was ever captured."""
        arguments = resolving_view(server_args)
        if arguments.pp_size > 1:
            raise ValueError("`--pp-size` must be 1 for a Clover.")
        config = model_config_of(server_args).hf_config
        if isinstance(config, SglangCloverConfig) and has_gdn_layers(config) and not arguments.disable_radix_cache:
            # SGLang has settled by now how such a cache keeps GDN states; turned off here, it would be too late.
            raise ValueError("A Clover with Gated DeltaNet layers needs `--disable-radix-cache`.")
        graphs = with_phase(arguments.cuda_graph_config, Phase.DECODE, backend=Backend.DISABLED)
        graphs = with_phase(graphs, Phase.PREFILL, backend=Backend.DISABLED)
        declare_resolution(
            server_args, cls.__name__, disable_radix_cache=True, chunked_prefill_size=-1, cuda_graph_config=graphs
        )

    @classmethod
    def validate_request(cls, request: Any) -> str | None:
        """Names what a request asks for and LowConfidence would leave out in silence, and what would end the server."""
        sampling = request.sampling_params
        unsupported = {
            "temperature above 0": sampling.top_k != TOP_K_OF_GREEDY,
            "frequency_penalty": sampling.frequency_penalty != 0,
            "presence_penalty": sampling.presence_penalty != 0,
            "repetition_penalty": sampling.repetition_penalty != 1,
            "min_new_tokens": sampling.min_new_tokens != 0,
            "logit_bias": bool(sampling.logit_bias),
            "session_params": request.session is not None,
        }
        returned = ("return_logprob", "return_sampling_mask", "return_hidden_states", "return_routed_experts")
        unsupported |= {name: bool(getattr(request, name)) for name in returned}
        given = ("custom_logit_processor", "input_embeds", "positional_embed_overrides")
        unsupported |= {name: getattr(request, name) is not None for name in given}
        grammars = ("json_schema", "regex", "ebnf", "structural_tag")
        unsupported |= {name: getattr(sampling, name) is not None for name in grammars}
        named = [name for name, is_asked in unsupported.items() if is_asked]
        if named:
            return f"{ALGORITHM} is greedy and has no {', '.join(named)}."
        ids, size = request.origin_input_ids, request.vocab_size
        if size is not None and ids and not 0 <= min(ids) <= max(ids) < size:
            return f"`input_ids` has {min(ids) if min(ids) < 0 else max(ids)}, but must be in [0, {size})."
        return None

    def run(
        self, model_runner: ModelRunner, forward_batch: ForwardBatch, algo_states: list[Any] | None = None
    ) -> DllmRunOutput:
        if forward_batch.forward_mode.is_dllm_extend():
            return super().run(model_runner, forward_batch, algo_states)
        if forward_batch.input_ids.numel() == 0:
            return None, [], None, None, False
        out = model_runner.forward(forward_batch, pp_proxy_tensors=None)
        return out.logits_output, [], None, None, out.can_run_graph

    def step(self, forward_batch: ForwardBatch, full_logits: torch.Tensor, states: list[Any]) -> list[bool]:
        """One step, in place; which blocks are done. They are so at once: the pass that stores them comes later.

        Args:
            full_logits: (B * block_size, V).
        """
        masked = self._masked(forward_batch)
        if (masked.flatten() & (full_logits.argmax(-1) == self.mask_id)).any():
            self._step_past_the_mask_token(forward_batch, full_logits, masked)
        else:
            super().step(forward_batch, full_logits, states)
        return (~self._masked(forward_batch).any(-1)).tolist()

    def _masked(self, forward_batch: ForwardBatch) -> torch.Tensor:
        """Positions still to be filled (B, block_size); a mask token of the prompt itself is text."""
        masked = forward_batch.input_ids.view(-1, self.block_size) == self.mask_id
        return masked if forward_batch.dllm_prompt_mask is None else masked & ~forward_batch.dllm_prompt_mask

    def _step_past_the_mask_token(
        self, forward_batch: ForwardBatch, full_logits: torch.Tensor, masked: torch.Tensor
    ) -> None:
        """The same step where the likeliest token is the mask token, on which SGLang's own would never end.

        As in Clover's loop the mask token is never chosen, and stays in what the probabilities are normalised by.
        """
        logits = full_logits.view(*masked.shape, -1).float()
        others = logits.index_fill(-1, torch.tensor([self.mask_id], device=logits.device), float("-inf"))
        best, tokens = others.max(-1)  # (B, block_size)
        confidences = (best - logits.logsumexp(-1)).exp().masked_fill(~masked, float("-inf"))
        accepted = confidences > self.threshold
        surest = torch.zeros_like(masked).scatter_(-1, confidences.argmax(-1, keepdim=True), True) & masked
        accepted = torch.where(accepted.any(-1, keepdim=True), accepted, surest)
        block = forward_batch.input_ids.view(masked.shape)
        forward_batch.input_ids.copy_(torch.where(accepted, tokens, block).flatten())


def register() -> None:
    algo_name_to_cls[ALGORITHM] = CloverLowConfidence
