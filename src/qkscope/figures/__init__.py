"""Tables in, matplotlib figures out; each figure prepares its data in one function and draws it in another."""
