"""Tensors in, tensors out: the target, the drafters, INT4 experts, RoPE, the latent cache, checkpoint loading.

What belongs here: modules that compute on tensors and know nothing of requests, trees or users. They may import
`minieagle.dist` and nothing further right in the order `dist -> models -> spec -> minieagle`.
"""
