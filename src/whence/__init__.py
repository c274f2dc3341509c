"""whence: capture what a PyTorch model computes, know where every value came from, get the modules back."""

from whence._torch.versions.door import entered

with entered():
    from whence.api import *  # noqa: F403
    from whence.api import __all__ as __all__
