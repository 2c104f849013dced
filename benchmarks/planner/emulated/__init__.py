"""Predicted and measured time of the steps of many layouts, on an emulated cluster that any machine can run."""
