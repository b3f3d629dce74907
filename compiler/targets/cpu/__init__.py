"""CPUs: ONNX Runtime's operators here, kernels of our own in ``native``. Imports neither."""
