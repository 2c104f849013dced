"""The engine of generation: its cache, the model's steps over it, the choice of tokens, and their text."""
