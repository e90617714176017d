"""From a model and texts to a Run: the only code that knows torch and transformers."""
