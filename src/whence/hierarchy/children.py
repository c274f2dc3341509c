"""One call written into a caller's code: which module it calls, and which of that module's bodies."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from whence._torch.trees import tree_flatten
from whence.errors import CallError
from whence.hierarchy.interface import Interface
from whence.hierarchy.tree import Tree
from whence.program import Named, Structure
from whence.provenance import ModulePath
from whence.schema import Phase
