"""The model described as data, before any module exists. No torch."""
