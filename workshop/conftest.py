from common.conftest import (
    device,
    family_loaded,
    family_oracle,
    one_thread,
    random_loaded,
    random_oracle,
)

__all__ = [  # the fixtures of the engine's tests
    "device",
    "family_loaded",
    "family_oracle",
    "one_thread",
    "random_loaded",
    "random_oracle",
]
