"""The cause of a prediction: terms taken away, windows cut, and what that costs."""
