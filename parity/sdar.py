"""An SDAR-shaped checkpoint (Qwen3's layers, SGLang's `SDARForCausalLM`) behind the loop's three verbs.

Another model than Clover, run another way: no cache, every pass is one forward over everything so far with an explicit
block-causal mask.
"""

from dataclasses import dataclass

import torch
from transformers import Qwen3ForCausalLM


@dataclass
class Tokens:
    """The whole prefix: tokens (B, P), left-padded, and which of them are real."""

    ids: torch.Tensor
    real: torch.Tensor

    def select(self, rows: torch.Tensor) -> "Tokens":
        return Tokens(self.ids[rows], self.real[rows])

    def packed(self) -> "Tokens":
        return self


@dataclass
class UncachedSdar:
    """`prefill`, `denoise` and `commit`, where only `denoise` computes anything."""

    model: Qwen3ForCausalLM
    block_size: int

    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Tokens:
        return Tokens(input_ids, attention_mask.bool())

    def commit(self, prefix: Tokens, block: torch.Tensor) -> Tokens:
        real = torch.ones_like(block, dtype=torch.bool)
        return Tokens(torch.cat([prefix.ids, block], 1), torch.cat([prefix.real, real], 1))

    @torch.no_grad()
    def denoise(self, prefix: Tokens, block: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        text = self.commit(prefix, block)
        positions = (text.real.cumsum(-1) - 1).clamp(min=0)
        blocks = positions // self.block_size
        sees = (blocks[:, None, :] <= blocks[:, :, None]) & text.real[:, None, :]
        sees |= torch.eye(sees.shape[-1], dtype=torch.bool, device=block.device)  # a pad must see something
        dtype = self.model.dtype
        mask = torch.zeros(sees.shape, dtype=dtype, device=block.device)
        mask = mask.masked_fill(~sees, torch.finfo(dtype).min)[:, None]
        hidden = self.model.model(text.ids, attention_mask=mask, position_ids=positions, use_cache=False)[0]
        return self.model.lm_head(hidden[:, -block.shape[1] :][masked])
