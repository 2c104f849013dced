"""What a layout will cost, before anything is started. No torch."""
