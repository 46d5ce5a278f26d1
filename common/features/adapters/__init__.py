"""LoRA adapters: small additions to a model's matrices, another one for each request."""
