"""Positional encoding, exact and small: five doors through which position enters attention, one class a method."""
from .absolute import Sinusoidal
from .angles import frequencies, wavelengths
from .attention import SelfAttention, attend
from .bias import TUPE, ALiBi, T5Bias
from .method import Compose, NoPE, PositionMethod
from .offsets import alibi_slopes, clip_offsets, deberta_bucket, relative_offsets, t5_bucket
from .relative import DeBERTa, Huang, Shaw, TransformerXL
from .rotary import AxialRotary, Rotary, rotate
from .scaling import DynamicNTK, LinearScaling, Llama3, NTKAware, YaRN
from .sinusoidal import complex_encoding, encoding_distance, shift_matrix, sinusoidal_encoding

__all__ = [
    "ALiBi", "AxialRotary", "Compose", "DeBERTa", "DynamicNTK", "Huang", "LinearScaling", "Llama3", "NTKAware",
    "NoPE", "PositionMethod", "Rotary", "SelfAttention", "Shaw", "Sinusoidal", "T5Bias", "TUPE", "TransformerXL",
    "YaRN", "alibi_slopes", "attend", "clip_offsets", "complex_encoding", "deberta_bucket", "encoding_distance",
    "frequencies", "relative_offsets", "rotate", "shift_matrix", "sinusoidal_encoding", "t5_bucket", "wavelengths",
]
