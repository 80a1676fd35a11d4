"""The methods of the papers, one file a paper: each proposes policies, and `proposals` carries them out."""

from . import checkmate, chen, hilp, min_memory, rockmate, rotor

__all__ = ["checkmate", "chen", "hilp", "min_memory", "rockmate", "rotor"]
