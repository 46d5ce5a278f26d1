from common.events.conftest import draft, letters, workshop

__all__ = ["draft", "letters", "workshop"]  # the fixtures of those who write what is read here
