"""A call of a module, ready to run: by its caller in the tree, or alone, by a person."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType
from typing import Any, Self

import torch
from torch import Tensor, nn

from whence._torch.trees import tree_unflatten
from whence.errors import CallError
from whence.hierarchy.children import ChildCall
from whence.hierarchy.alone import Alone, alone
from whence.hierarchy.differentiable import run_differentiably
from whence.hierarchy.plan import Plan
from whence.hierarchy.source import attribute, write
from whence.program import Convention, Named, Structure
from whence.program.convention import paths_of
from whence.provenance import ModulePath
from whence.schema import Phase
