"""The methods of the papers, one file a paper: each proposes policies, and `proposals` carries them out."""

from . import checkmate, chen, dtr, hilp, min_memory, pofo, rockmate, rotor, twremat

__all__ = ["checkmate", "chen", "dtr", "hilp", "min_memory", "pofo", "rockmate", "rotor", "twremat"]
