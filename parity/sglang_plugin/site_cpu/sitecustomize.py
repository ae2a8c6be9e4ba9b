"""Only for SGLang on a CPU: lets `import torchvision` succeed beside a torch without CUDA.

torchvision's wheel is built for CUDA, so two operators are not there that its import asks for. Declaring them is
enough: nothing here calls them.
"""

import torch

_library = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _library.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
