# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
"""Gated DeltaNet on a CPU: what SGLang's GDN backend calls there, in torch, slow and plain.

Both write the states in place, in the slots that they are told, as SGLang's kernels do.
"""

import torch
from torch.nn import functional as F


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **kwargs,
) -> torch.Tensor:
    """x (C, N), the rows one after another; weight (C, K); conv_states (slots, C, K-1). Returns (C, N)."""
    if activation != "silu" or bias is not None:
        raise NotImplementedError(f"activation {activation}, bias {bias is not None}")
    starts, results = query_start_loc.tolist(), []
    for row, slot in enumerate(cache_indices.tolist()):
        inputs = torch.cat([conv_states[slot] * has_initial_state[row], x[:, starts[row] : starts[row + 1]]], dim=-1)
        results.append(F.silu(F.conv1d(inputs[None], weight[:, None], groups=weight.shape[0])[0]))
        conv_states[slot] = inputs[:, 1 - weight.shape[1] :]
    return torch.cat(results, dim=-1)


def causal_conv1d_update_cpu(*args, **kwargs):
    raise NotImplementedError("one token at a time, which a Clover is never asked for")


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[torch.Tensor, None, None]:
    """The delta rule, token by token, in fp32.

    q, k (1, N, H_k, d_k); v (1, N, H, d_v); g, beta (1, N, H); initial_state (slots, H, d_v, d_k). Returns (1, N, H,
    d_v).
    """
    if head_first or not use_qk_l2norm_in_kernel:
        raise NotImplementedError(f"head_first {head_first}, use_qk_l2norm_in_kernel {use_qk_l2norm_in_kernel}")
    groups = v.shape[2] // k.shape[2]
    q, k = (_normalised(x[0]).repeat_interleave(groups, dim=1) for x in (q, k))
    q, starts, result = q * q.shape[-1] ** -0.5, cu_seqlens.tolist(), torch.empty_like(v[0])
    for row, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].float()  # (H, d_v, d_k)
        for i in range(starts[row], starts[row + 1]):
            state = state * g[0, i].exp()[:, None, None]
            written = (v[0, i].float() - (state @ k[i, :, :, None])[..., 0]) * beta[0, i, :, None]
            state = state + written[..., None] * k[i, :, None]
            result[i] = (state @ q[i, :, :, None])[..., 0].to(result.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return result[None], None, None


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()
