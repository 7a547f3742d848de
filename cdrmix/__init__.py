"""CDRmix: trains RWKX-V language models under the DeepSpeed launcher."""

__version__ = "0.1.0"
