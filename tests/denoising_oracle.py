"""A Clover in plain loops and fp64, without a cache, a batch or anything of modeling_clover.py.

`logits` runs one row [prefix | block]: the prefix is causal, the block sees everything. Without a block it is
Qwen3.5-MoE, which `test_denoising_pass.py` checks against transformers; the block's part is written from the
formulas of the design.
"""

import math

import torch


def silu(x):
    return x * torch.sigmoid(x)


def unit(x):
    """L2-normalised, with the causal kernel's epsilon."""
    return x / torch.sqrt((x * x).sum() + 1e-6)


def convolution(ring, block, taps, right):
    """ring (K-1, C), block (T, C), taps (C, K), right (C, K-1) -> (T, C)."""
    kernel, inputs = taps.shape[1], [*ring, *block]
    out = []
    for t in range(len(block)):
        total = sum(inputs[t + j] * taps[:, j] for j in range(kernel))
        for d in range(1, kernel):
            if t + d < len(block):
                total = total + block[t + d] * right[:, d - 1]
        out.append(silu(total))
    return torch.stack(out)


def mixer(query, key, value, g, beta, state, logit_scale, history_bias, history_c):
    """One value head: query, key (T, d_k), of unit length; value (T, d_v); g, beta (T,); state (d_k, d_v)."""
    length, dim = query.shape
    g, log_beta, out = g.tolist(), beta.log().tolist(), []
    for t in range(length):
        similar = (key @ query[t]).tolist()
        logits = [history_bias + history_c * math.log(length) + sum(g[: t + 1])]
        for j in range(length):
            between = sum(g[min(t, j) + 1 : max(t, j) + 1])  # log decay from one to the other, <= 0
            logits.append(logit_scale * similar[j] + log_beta[j] + between)
        weights = torch.tensor(logits, dtype=value.dtype).softmax(0)
        out.append((weights[0] * (query[t] @ state) + weights[1:] @ value) / math.sqrt(dim))
    return torch.stack(out)


def coreset(router_probabilities, top_k, top_p):
    """The experts that a block (T, E) may use."""
    mass = [0.0] * router_probabilities.shape[1]
    for row in router_probabilities.tolist():
        for expert in sorted(range(len(row)), key=lambda e: -row[e])[:top_k]:
            mass[expert] += row[expert]
    order, chosen, reached = sorted(range(len(mass)), key=lambda e: -mass[e]), [], 0.0
    for expert in order:
        if len(chosen) < top_k or (reached < top_p * sum(mass) and mass[expert] > 0):
            chosen.append(expert)
            reached += mass[expert]
    return chosen


def gated_delta_net(x, w, clean, config):
    """A Gated DeltaNet layer over x (P + T, D), of which the first `clean` rows are the prefix."""
    taps = w["conv1d.weight"][:, 0]
    raw = x @ w["in_proj_qkv.weight"].T
    padded = torch.cat([raw.new_zeros(taps.shape[1] - 1, raw.shape[1]), raw])
    start, ring = padded[: taps.shape[1] - 1], padded[clean : clean + taps.shape[1] - 1]
    parts = []
    if clean:
        parts.append(convolution(start, raw[:clean], taps, torch.zeros_like(taps[:, 1:])))
    if clean < len(x):
        parts.append(convolution(ring, raw[clean:], taps, w["conv_right_weight"]))
    heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
    d_k, d_v = config.linear_key_head_dim, config.linear_value_head_dim
    query, key, value = torch.cat(parts).split([key_heads * d_k, key_heads * d_k, heads * d_v], dim=-1)
    beta = torch.sigmoid(x @ w["in_proj_b.weight"].T)
    g = -torch.exp(w["A_log"]) * torch.log1p(torch.exp(x @ w["in_proj_a.weight"].T + w["dt_bias"]))
    out = torch.zeros(len(x), heads, d_v, dtype=x.dtype)
    block = slice(clean, None)
    for h in range(heads):
        k = h // (heads // key_heads)
        q_h = torch.stack([unit(row) for row in query[:, k * d_k : (k + 1) * d_k]])
        k_h = torch.stack([unit(row) for row in key[:, k * d_k : (k + 1) * d_k]])
        v_h = value[:, h * d_v : (h + 1) * d_v]
        state = torch.zeros(d_k, d_v, dtype=x.dtype)
        for t in range(clean):
            state = state * torch.exp(g[t, h])
            state = state + beta[t, h] * torch.outer(k_h[t], v_h[t] - k_h[t] @ state)
            out[t, h] = q_h[t] @ state / math.sqrt(d_k)
        if clean < len(x):
            of_block = q_h[block], k_h[block], v_h[block], g[block, h], beta[block, h]
            names = ("logit_scale", "history_bias", "history_c")
            added = (w[f"bd_softmax_{name}"][h].item() for name in names)
            out[block, h] = mixer(*of_block, state, *added)
    rms = torch.sqrt((out * out).mean(-1, keepdim=True) + config.rms_norm_eps)
    z = (x @ w["in_proj_z.weight"].T).view(out.shape)
    return (out / rms * w["norm.weight"] * silu(z)).flatten(1) @ w["out_proj.weight"].T


class Oracle:
    def __init__(self, model):
        self.config = model.config
        self.weights = {name: weight.detach().double() for name, weight in model.state_dict().items()}

    def layer(self, i):
        start = f"model.layers.{i}."
        return {name.removeprefix(start): w for name, w in self.weights.items() if name.startswith(start)}

    def logits(self, prefix, block, coreset_top_p=None):
        """Token ids [..] and [..] -> (P + T, V)."""
        clean = len(prefix)
        x = self.weights["model.embed_tokens.weight"][[*prefix, *block]]
        for i, kind in enumerate(self.config.layer_types):
            w = self.layer(i)
            normed = self.norm(x, w["input_layernorm.weight"])
            if kind == "full_attention":
                x = x + self.attention(normed, w, clean)
            else:
                parts = {name.removeprefix("linear_attn."): weight for name, weight in w.items()}
                x = x + gated_delta_net(normed, parts, clean, self.config)
            x = x + self.experts(self.norm(x, w["post_attention_layernorm.weight"]), w, clean, coreset_top_p)
        return self.norm(x, self.weights["model.norm.weight"]) @ self.weights["lm_head.weight"].T

    def norm(self, x, weight):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.rms_norm_eps) * (1 + weight)

    def rotate(self, x, position):
        rotary = self.config.rope_parameters
        dims = int(self.config.head_dim * rotary["partial_rotary_factor"])
        x = x.clone()
        for i in range(dims // 2):
            angle = position * rotary["rope_theta"] ** (-2 * i / dims)
            a, b = x[..., i].clone(), x[..., i + dims // 2].clone()
            x[..., i] = a * math.cos(angle) - b * math.sin(angle)
            x[..., i + dims // 2] = b * math.cos(angle) + a * math.sin(angle)
        return x

    def attention(self, x, w, clean):
        dim, heads = self.config.head_dim, self.config.num_attention_heads
        kv_heads = self.config.num_key_value_heads
        query, gate = (x @ w["self_attn.q_proj.weight"].T).view(len(x), heads, 2 * dim).split(dim, dim=-1)
        key = (x @ w["self_attn.k_proj.weight"].T).view(len(x), kv_heads, dim)
        value = (x @ w["self_attn.v_proj.weight"].T).view(len(x), kv_heads, dim)
        query = self.norm(query, w["self_attn.q_norm.weight"])
        key = self.norm(key, w["self_attn.k_norm.weight"])
        query = torch.stack([self.rotate(row, position) for position, row in enumerate(query)])
        key = torch.stack([self.rotate(row, position) for position, row in enumerate(key)])
        sees = torch.tensor([[j <= i or i >= clean for j in range(len(x))] for i in range(len(x))])
        out = torch.zeros_like(query)
        for h in range(heads):
            kv = h // (heads // kv_heads)
            scores = query[:, h] @ key[:, kv].T / math.sqrt(dim)
            out[:, h] = scores.masked_fill(~sees, float("-inf")).softmax(-1) @ value[:, kv]
        return (out * torch.sigmoid(gate)).flatten(1) @ w["self_attn.o_proj.weight"].T

    def experts(self, x, w, clean, coreset_top_p):
        w = {name.removeprefix("mlp."): weight for name, weight in w.items()}
        top_k = self.config.num_experts_per_tok
        probabilities = (x @ w["gate.weight"].T).softmax(-1)
        inside = range(probabilities.shape[1])
        if coreset_top_p is not None:
            inside = coreset(probabilities[clean:], top_k, coreset_top_p)
        rows = []
        for t, row in enumerate(x):
            share = {e: p for e, p in enumerate(probabilities[t].tolist()) if t < clean or e in inside}
            chosen = sorted(share, key=lambda e: -share[e])[:top_k]
            total = sum(share[e] for e in chosen)
            routed = torch.zeros_like(row)
            for e in chosen:
                gate, up = (w["experts.gate_up_proj"][e] @ row).chunk(2)
                routed = routed + share[e] / total * (w["experts.down_proj"][e] @ (silu(gate) * up))
            gate, up = w["shared_expert.gate_proj.weight"] @ row, w["shared_expert.up_proj.weight"] @ row
            shared = w["shared_expert.down_proj.weight"] @ (silu(gate) * up)
            rows.append(routed + torch.sigmoid(w["shared_expert_gate.weight"] @ row) * shared)
        return torch.stack(rows)
