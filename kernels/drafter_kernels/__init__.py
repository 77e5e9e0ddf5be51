"""The service's device operations: one folder each, with the reference that specifies it.

Importing this needs torch only. Tensors on a CPU run the references; Triton is imported when a tensor on a GPU comes
along.
"""

from drafter_kernels.compiles import CompileWatch
from drafter_kernels.dispatch import Backend

__all__ = ["Backend", "CompileWatch"]
