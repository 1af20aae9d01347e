"""Files of other libraries, read without running any of their code: their tensors become plain safetensors files."""
