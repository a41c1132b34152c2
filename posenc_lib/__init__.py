"""Positional encoding, exact and small: five doors through which position enters attention, one class a method."""
from .absolute import Sinusoidal
from .angles import frequencies, wavelengths
from .attention import SelfAttention, attend
from .method import Compose, NoPE, PositionMethod
from .offsets import clip_offsets, relative_offsets
from .sinusoidal import complex_encoding, encoding_distance, shift_matrix, sinusoidal_encoding

__all__ = [
    "Compose", "NoPE", "PositionMethod", "SelfAttention", "Sinusoidal", "attend", "clip_offsets", "complex_encoding",
    "encoding_distance", "frequencies", "relative_offsets", "shift_matrix", "sinusoidal_encoding", "wavelengths",
]
