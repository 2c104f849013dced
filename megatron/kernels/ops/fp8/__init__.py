"""Linear layers in FP8: formats, quantization, recipes of scales, and the products of quantized matrices."""
