"""
A local stand-in for the Hugging Face Hub, to which the unmodified clients talk over HTTP.

It speaks the part of the Hub's API that huggingface_hub and transformers use for models, and for Spaces,
which it keeps but does not run. Repositories are bare git repositories, which git can clone; large files
travel by git-lfs or by Xet, and come from a second origin, which refuses tokens of the Hub as the real
storage does.
"""

from .faults import Fault
from .hub import LocalHub


__all__ = ["Fault", "LocalHub"]
