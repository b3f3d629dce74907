"""Other engines, measured as OpenAI endpoints: llama.cpp, ONNX Runtime GenAI, OpenVINO GenAI."""
