"""The training system: mesh, communication, layers, optimizer, models."""
