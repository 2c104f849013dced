"""What the programs in tools/ share: opening a saved model, measuring layouts."""
