"""LoRA adapters: small additions to a model's matrices, which can differ for each request."""
