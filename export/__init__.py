"""From a torch module to a folder that Triton Inference Server serves and batches by itself.

``python -m export MODEL`` runs the whole way; docs/export.md describes it. Imports point downward:

    __main__ → pipeline → tensorrt_engine, precision, parity, onnx_model, config_pbtxt, publish
             → resolve → recipe → errors

``recipes/`` holds the models that are exported by name.
"""
