from common.events.conftest import draft, letters, workshop

__all__ = ["draft", "letters", "workshop"]  # fixtures that write the runs that are read here
