# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
"""A stand-in for sgl-kernel's CPU build, which is on no package registry: what a Clover needs of it, in torch.

It declares none of the AMX operators, so SGLang finds no AMX and takes its own `forward_native` in its layers. Here are
the operators that its Qwen3.5 code calls on a CPU without asking. Any other name resolves, and raises if it is called.
"""

import torch

_library = torch.library.Library("sgl_kernel", "DEF")


def _operator(schema: str):
    """Registers a function under `torch.ops.sgl_kernel`."""

    def register(function):
        _library.define(schema)
        _library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
        return function

    return register


@_operator("fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate) -> ()")
def fused_sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> None:
    x.mul_(gate.reshape(x.shape).sigmoid())


def _gemma_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension, in fp32."""
    normalised = x.float() * (x.float().pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return (normalised * (1 + weight.float())).to(x.dtype)


@_operator(
    "fused_qk_gemma_rmsnorm_with_gate_cpu"
    "(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim, int heads)"
    " -> (Tensor, Tensor, Tensor)"
)
def fused_qk_gemma_rmsnorm_with_gate(q_gate, k, q_weight, k_weight, eps, head_dim, heads):
    """q_gate (N, heads * 2 * head_dim) is, per head, a query and its gate."""
    q, gate = q_gate.reshape(-1, heads, 2 * head_dim).chunk(2, dim=-1)
    k = k.reshape(-1, head_dim)
    return _gemma_norm(q, q_weight, eps).contiguous(), _gemma_norm(k, k_weight, eps), gate.contiguous()


@_operator(
    "fused_qk_gemma_rmsnorm_cpu(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim)"
    " -> (Tensor, Tensor)"
)
def fused_qk_gemma_rmsnorm(q, k, q_weight, k_weight, eps, head_dim):
    q, k = q.reshape(-1, head_dim), k.reshape(-1, head_dim)
    return _gemma_norm(q, q_weight, eps), _gemma_norm(k, k_weight, eps)


@_operator(
    "fused_qkvzba_split_reshape_cat_contiguous_cpu"
    "(Tensor qkvz, Tensor ba, int k_heads, int v_heads, int k_dim, int v_dim) -> (Tensor, Tensor, Tensor, Tensor)"
)
def fused_qkvzba_split_reshape_cat_contiguous(qkvz, ba, k_heads, v_heads, k_dim, v_dim):
    """qkvz (N, queries | keys | values | z), ba (N, b | a): queries to values in one, the others by head."""
    qkv, z = qkvz.split([2 * k_heads * k_dim + v_heads * v_dim, v_heads * v_dim], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv.contiguous(), z.reshape(-1, v_heads, v_dim), b.contiguous(), a.contiguous()


@_operator("fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)")
def fused_gdn_gating(A_log, a, b, dt_bias):
    """The decay's logarithm and the write gate, (1, N, H) each."""
    g = -A_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())
    return g[None], b.float().sigmoid()[None]


@_operator("fused_rmsnorm_gated_cpu(Tensor x, Tensor weight, Tensor z, float eps) -> Tensor")
def fused_rmsnorm_gated(x, weight, z, eps):
    normalised = x.float() * (x.float().pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return (normalised * weight.float() * torch.nn.functional.silu(z.float())).to(x.dtype)


@_operator("fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log) -> Tensor")
def fused_sigmoid_gating_delta_rule_update(A_log):
    raise NotImplementedError("one token at a time, which a Clover is never asked for")


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} was called, of which there is no stand-in.")

    return missing
