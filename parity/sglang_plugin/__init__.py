# Copyright 2026 The Clover authors. Licensed under the Apache License, Version 2.0.
"""Serves a Clover from SGLang 0.5.23, stock: a model class, a diffusion algorithm and two hooks, all from outside.

SGLang finds the model class through SGLANG_EXTERNAL_MODEL_PACKAGE and the rest through an entry point of the group
`sglang.srt.plugins`, which lies in `site/`. From the root of a checkout, where `clover` can be imported:

    export SGLANG_EXTERNAL_MODEL_PACKAGE=clover.parity.sglang_plugin PYTHONPATH=$PYTHONPATH:parity/sglang_plugin/site
    python -m sglang.launch_server --model-path DIR --dllm-algorithm CloverLowConfidence --disable-radix-cache

The entry point is not in setup.cfg, since every SGLang server beside an installed `clover` would then be hooked into,
whatever it serves.

On a CPU add `parity/sglang_plugin/site_cpu` to PYTHONPATH (sgl-kernel's CPU build is on no package registry; what of
it is needed is written there in torch), SGLANG_USE_CPU_ENGINE=1, and `--device cpu --attention-backend torch_native`.
SGLang keeps the convolutions' states in bf16; to compare in fp32, set SGLANG_MAMBA_CONV_DTYPE=float32.

How a request runs. SGLang's scheduler has a mode for models with a context pass of their own, and Clover is one:

- EXTEND, a causal pass: the prompt's whole blocks, later every finished block. It writes keys, values and GDN states.
- DLLM_EXTEND, a denoising pass: the block at the end, `[prompt's tail | masks]`. Its keys and values are overwritten
  by the block's EXTEND, its GDN layers read the states and write none. So there is nothing to restore between steps.

Leave room for the keys of `--max-running-requests` whole requests and a block each: SGLang's mode for diffusion takes
no request back when its memory is full. Requests then wait for ever, or the server ends; a stock SDAR's ends too.

What is here: `config.py` what SGLang asks a config for, the block's size and mask token, blocks on a grid from 0 on;
`algorithm.py` LowConfidence over that mode; `model.py` the model; `gdn.py` the Gated DeltaNet's denoising pass;
`weights.py` whether a checkpoint is the model's. What a Clover cannot do here is refused by name, in all of them.

UNTESTED ON A GPU. On a CPU all of it runs and agrees with this repository's own loop, but there SGLang's GDN kernels
are stand-ins. Tensor parallelism, quantised weights and CUDA graphs are untested too; the last are turned off.
"""


def activate() -> None:
    """Called by SGLang in each of its processes, before it reads its arguments."""
    from sglang.srt.utils import is_cpu

    from . import algorithm, config

    if is_cpu():
        import sgl_kernel  # noqa: F401  # whose operators SGLang's Qwen3.5 looks up when it is imported

    config.register()
    algorithm.register()
