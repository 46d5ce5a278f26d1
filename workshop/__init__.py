"""What teaches and measures the engine, and no part of it: nothing above imports this."""
