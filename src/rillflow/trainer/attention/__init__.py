"""How a model reads packed rows: the backends, the attention of forests, and the kernels of each device."""

from rillflow.trainer.attention.backends import choose, decoder, hidden_states

__all__ = ["choose", "decoder", "hidden_states"]
