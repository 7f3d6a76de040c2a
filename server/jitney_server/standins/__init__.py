"""What the stand-ins for the native ONNX Runtime and TensorRT backends share.

``backend/onnxruntime/model.py`` and ``backend/tensorrt/model.py`` serve on the embedded server what
the C++ backends of those names serve in NVIDIA's container, from the same model repository. Nothing
here imports torch or the server's own module. Importing a module must stay cheap, because a process
that completes a configuration lives only for a moment.
"""
