"""The five doors through which position can enter attention, and Compose, which opens several methods' doors."""
from torch import Tensor, nn


class PositionMethod(nn.Module):
    """A method is a subclass that overrides the doors it uses; the base class leaves all five shut, and so is NoPE.

    Shapes: x (batch, length, d_model); q, k, v (batch, heads, length, head_dim); positions int64 (length,) or
    (batch, length); logits and weights (batch, heads, q, k).
    """

    scale: float | None = None
    """Factor on q . k; None means head_dim**-0.5, as in torch's scaled_dot_product_attention."""

    def embed(self, x: Tensor, positions) -> Tensor:
        """Door 1, input: token vectors, once, before layer 1. `positions` may be an int n for arange(n)."""
        return x

    def rotate(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> tuple[Tensor, Tensor]:
        """Door 2, rotation: queries and keys, each by its own position."""
        return q, k

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """Door 3, bias: None, or (heads, q, k) or (batch, heads, q, k), added to the logits; knows no token."""
        return None

    def logits(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor,
               mask: Tensor | None = None) -> Tensor:
        """Door 4, logits: where tokens and positions meet. `mask` is True where a query may attend."""
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return (q * scale) @ k.transpose(-2, -1)

    def values(self, weights: Tensor, v: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Door 5, values: the weighted sum, (batch, heads, q, head_dim)."""
        return weights @ v

    def opens(self, door: str) -> bool:
        """Whether this method does anything at `door`: "embed", "rotate", "bias", "logits" or "values"."""
        return getattr(type(self), door) is not getattr(PositionMethod, door)


NoPE = PositionMethod


class Compose(PositionMethod):
    """Several methods as one: embeds and rotations in the order given, biases summed.

    Doors: all that its methods open. Cost: the sum of theirs. At most one of them may own logits, values or scale.
    Shapes as PositionMethod. Errors: TypeError for anything that is not a PositionMethod, ValueError for a second
    owner or biases that differ in shape.
    """

    def __init__(self, *methods: PositionMethod):
        super().__init__()
        for method in methods:
            if not isinstance(method, PositionMethod):
                raise TypeError(f"Compose takes PositionMethods, got {type(method).__name__}")
        self.methods = nn.ModuleList(methods)
        owners = self._owners()
        if len(owners) > 1:
            names = ", ".join(type(owner).__name__ for owner in owners)
            raise ValueError(f"at most one method may own logits, values or scale, got {len(owners)}: {names}")

    def _owners(self) -> list[PositionMethod]:
        return [m for m in self.methods if m.opens("logits") or m.opens("values") or m.scale is not None]

    @property
    def scale(self) -> float | None:
        return next((owner.scale for owner in self._owners()), None)

    def embed(self, x, positions):
        for method in self.methods:
            x = method.embed(x, positions)
        return x

    def rotate(self, q, k, q_positions, k_positions):
        for method in self.methods:
            q, k = method.rotate(q, k, q_positions, k_positions)
        return q, k

    def bias(self, q_positions, k_positions):
        total = None
        for method in self.methods:
            bias = method.bias(q_positions, k_positions)
            if total is not None and bias is not None:
                shared = max(3, min(total.dim(), bias.dim()))
                if total.shape[-shared:] != bias.shape[-shared:]:
                    raise ValueError("biases must agree in heads, q and k (and in batch where both have one), got "
                                     f"{tuple(total.shape)} and {tuple(bias.shape)} from {type(method).__name__}")
            total = bias if total is None else total if bias is None else total + bias
        return total

    def logits(self, q, k, q_positions, k_positions, mask=None):
        owner = next(iter(self._owners()), super())
        return owner.logits(q, k, q_positions, k_positions, mask)

    def values(self, weights, v, q_positions, k_positions):
        owner = next(iter(self._owners()), super())
        return owner.values(weights, v, q_positions, k_positions)

    def opens(self, door):
        of_a_subclass = getattr(type(self), door) is not getattr(Compose, door)
        return of_a_subclass or any(method.opens(door) for method in self.methods)
