"""CPUs, through ONNX Runtime."""
