"""Update rules of optimizers, one per file."""
