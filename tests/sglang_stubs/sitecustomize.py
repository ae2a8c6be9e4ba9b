"""Lets `import torchvision` succeed beside a CPU build of torch; Python runs this at its start.

PyPI's torchvision is a CUDA build, whose operators cannot be loaded there, and its import describes two of them. With
these declarations there is something to describe; nobody calls them.
"""

import torch

_declared = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
