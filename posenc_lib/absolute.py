"""Door 1: methods that add to the token vectors before the first layer."""
from numbers import Integral

from torch import Tensor

from . import _checks
from .method import PositionMethod
from .sinusoidal import sinusoidal_encoding


def input_positions(x: Tensor, positions, d_model: int) -> Tensor:
    """Checked positions for `embed`: x (batch, length, d_model); (length,), (batch, length), or an int = length."""
    batch, length, _ = _checks.token_vectors(x, d_model).shape
    if isinstance(positions, Integral) and not isinstance(positions, bool):
        positions = _checks.positions(positions, int_means_arange=True)
    return _checks.sequence_positions(positions, "positions", length=length, batch=batch).to(x.device)


class Sinusoidal(PositionMethod):
    """x + PE(positions): the sinusoidal encoding added to the token vectors.

    Door 1 (input). No weights, no table. d_model: even; base: > 0.
    Cost: length x d_model sines and cosines in float64 once per forward pass, output-sized memory.
    Errors: ValueError for odd d_model or bad base. x of `embed` is (batch, length, d_model).
    The paper multiplies the token embeddings by sqrt(d_model) first; that is the embedding layer's business.
    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.5.
    """

    def __init__(self, d_model: int, base: float = 10000.0):
        super().__init__()
        self.d_model, self.base = _checks.even_width(d_model), _checks.positive_number(base)

    def embed(self, x, positions):
        """x (batch, length, d_model), positions (length,), (batch, length) or the int length. Same shape and dtype.

        Errors: ValueError for shapes or positions that do not fit, TypeError for float positions or an x of integers.
        """
        positions = input_positions(x, positions, self.d_model)
        return x + sinusoidal_encoding(positions, self.d_model, self.base, dtype=x.dtype, device=x.device)

    def extra_repr(self):
        return f"d_model={self.d_model}, base={self.base:g}"
