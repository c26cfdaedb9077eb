"""A small trained DeepSeek-V3: latent attention, routed experts, an MTP module.

`checkpoint/` is an ordinary transformers folder; `python -m profiles.miniature.train` makes it.
"""
