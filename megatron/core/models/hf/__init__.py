"""Models in Hugging Face format: config.json, names of tensors, folders of safetensors files."""
