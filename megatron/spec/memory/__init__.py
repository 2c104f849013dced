"""The memory that a layer's forward and backward take and free, derived from the layer's description."""
