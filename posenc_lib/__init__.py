"""Positional encoding, exact and small: five doors through which position enters attention, one class a method."""
from .absolute import Sinusoidal
from .angles import frequencies, wavelengths
from .attention import SelfAttention, attend
from .method import Compose, NoPE, PositionMethod
from .offsets import clip_offsets, relative_offsets
from .rotary import AxialRotary, Rotary, rotate
from .scaling import DynamicNTK, LinearScaling, Llama3, NTKAware, YaRN
from .sinusoidal import complex_encoding, encoding_distance, shift_matrix, sinusoidal_encoding

__all__ = [
    "AxialRotary", "Compose", "DynamicNTK", "LinearScaling", "Llama3", "NTKAware", "NoPE", "PositionMethod", "Rotary",
    "SelfAttention", "Sinusoidal", "YaRN", "attend", "clip_offsets", "complex_encoding", "encoding_distance",
    "frequencies", "relative_offsets", "rotate", "shift_matrix", "sinusoidal_encoding", "wavelengths",
]
